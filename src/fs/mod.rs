//! The kernel's face of the store.
