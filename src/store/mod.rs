//! The store: tree, objects, stubs, recovery, lock; all durable I/O.
