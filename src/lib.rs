//! stepfs: a filesystem to mount as a training job's checkpoint directory.
//!
//! The layers, from the top; each may use those below it and none above:
//!
//! - [`cli`]: one file per command; words for people, `--json` for programs.
//! - [`fs`]: the kernel's face: operations, handles, errno. The only place that names `fuser`.
//! - [`compare`]: many ways of keeping a series of checkpoints, side by side.
//! - [`archive`]: after the last close: find the tensors, choose the base, encode, verify, commit, release.
//! - [`recall`]: which objects and tiles a read needs; tiles to bytes; the cache of decoded files.
//! - [`store`]: tree, objects, stubs, recovery, lock; all durable I/O.
//! - [`tile`]: the codec of a tile: every coding's way from bytes to a payload and back (pure).
//! - [`container`]: where the tensors are in a file's bytes, and what must be patched (pure).
//! - [`codec`]: tensors to symbols and back (pure).
//! - [`published`]: other systems, as their papers describe them; [`tile`] alone decodes with them (pure).
//! - [`entropy`]: symbols to bits and back (pure).
//!
//! Beside them, `sync` has the locks and threads of all, so that a test can take the scheduler's place, `clock` the time, and `hash` what
//! everything on the device is checked by.
//!
//! `docs/DESIGN.md` says why, `docs/FORMAT.md` describes every durable byte, `docs/SEMANTICS.md` what a program
//! that uses the mount may rely on.

pub mod archive;
pub mod cli;
mod clock;
pub mod codec;
pub mod compare;
pub mod container;
pub mod entropy;
pub mod fs;
mod hash;
pub mod published;
pub mod recall;
pub mod store;
mod sync;
pub mod tile;
