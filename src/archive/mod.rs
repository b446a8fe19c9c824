//! After the last close: find the tensors, choose the base, encode, verify, commit, release.
