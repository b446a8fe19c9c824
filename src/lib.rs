//! stepfs: a filesystem to mount as a training job's checkpoint directory.
//!
//! The layers, from the top; each may use those below it and none above:
//!
//! - [`cli`]: one file per command; text for people, `--json` for programs.
//! - [`fs`]: the interface to the kernel: operations, handles, errno. The only user of `fuser`.
//! - [`tools`]: compares ways of storing a series of checkpoints, and reshards one. Nothing but [`cli`] uses it.
//! - [`archive`]: the life of a file after the last close: seal, choose a base, archive, release, remove.
//! - [`mirror`]: a bucket or directory follows a store.
//! - [`encode`]: from a file to its object: plans, encodes, reads back, compares.
//! - [`recall`]: finds the objects and tiles that a read needs, decodes them, and caches decoded files.
//! - [`store`]: tree, objects, stubs, recovery, lock; all durable I/O.
//! - [`tile`]: the codec of a tile: every coding from bytes to a payload and back (pure).
//!
//! Below them are three crates, which do no I/O and know nothing of a store:
//!
//! - `crates/formats`: finds the tensors in a file's bytes, and the places to patch.
//! - `crates/papers`: other systems, as their papers describe them; only [`tile`] decodes with them.
//! - `crates/codec`: tensors to symbols and back, symbols to bits and back, and the checksums of everything on the device.
//!
//! [`cli`] and [`tools`] speak through [`terminal`]. All layers use two more modules. `sync` has locks and threads, so
//! that a test can replace the scheduler. [`clock`] has the time.
//!
//! `docs/DESIGN.md` gives the reasons, `docs/FORMAT.md` describes every durable byte, and `docs/SEMANTICS.md` lists the
//! guarantees for programs that use the mount.
//!
//! Every function passes on the errors of the functions that it calls. An `# Errors` section names only further ones.

#[macro_use]
pub mod terminal;

pub mod archive;
pub mod cli;
pub mod clock;
pub mod encode;
pub mod fs;
pub mod mirror;
pub mod recall;
pub mod store;
mod sync;
pub mod tile;
pub mod tools;

/// The program and its version. A daemon tells it, since it serves on when the program's file is replaced.
pub fn version() -> &'static str {
    // Read from memory, not from instructions: a test changes it in a copy of the program.
    std::hint::black_box(concat!("stepfs ", env!("CARGO_PKG_VERSION")))
}
