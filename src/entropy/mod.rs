//! Symbols to bits and back; pure.
