//! Checkpoints as no training should write them, and some do.
