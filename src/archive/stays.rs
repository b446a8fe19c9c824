//! Why a file stays as it is, where something follows from that.

/// Its fsync failed: under whatever name, until it is written again.
pub(super) const NOT_DURABLE: &str = "could not be made durable";
/// Its stub is damaged, or became zeros.
pub(super) const DAMAGED_STUB: &str = "it is a damaged stub";
/// It is a stub of an object that is here, and says that its store is another: the id in `stepfs.toml` is wrong.
pub(super) const OTHER_STORE: &str = "its object is here, and it says that its store is another";
/// It has no more on the device than a stub has: perhaps it was one.
pub(super) const HOLE: &str = "it is a hole";
/// The daemon may not, or cannot, read it.
pub(super) const UNREADABLE: &str = "it cannot be read";
