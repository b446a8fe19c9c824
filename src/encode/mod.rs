//! From a file to its object: plan, encode, make durable, read back, compare.
//!
//! [`Difference::write`] is the whole way. It knows no catalog and no mount: the archive, [`encode_series`] and repair
//! use it alike.
//! `plan` chooses a coding for each tensor. `tensors` writes the tiles in order, made in parallel by `workers`, and each
//! is compared with the file. `verify` reads the object back from the device: each tile must decode to the same bytes.

mod base;
mod difference;
mod error;
pub(crate) mod fingerprint;
pub(crate) mod original;
pub(crate) mod plan;
mod published;
pub(crate) mod runs;
mod series;
pub(crate) mod skeleton;
pub(crate) mod succession;
mod tensor_writer;
mod tensors;
mod tile_encoder;
mod verify;
mod workers;

pub(crate) use base::{Base, LONGEST_READ, Place};
pub(crate) use difference::{Difference, Facts, Written};
pub(crate) use error::{StepError, StepResult};
pub(crate) use plan::Material;
pub use series::{SeriesFile, SeriesObject, encode_series};
pub(crate) use workers::Workers;

/// Target of the notes, at level trace, that name the stage of encoding that a file ended. `examples/speed` takes
/// the time at each.
pub const STAGES: &str = "stepfs::stages";

/// Lets training run first: lowers the priority of the calling thread.
pub(crate) fn yield_to_others() {
    const WHO_PROCESS: libc::c_int = 1;
    const BEST_EFFORT_LAST: libc::c_int = 2 << 13 | 7;
    // On Linux, no process and process 0 both mean the calling thread.
    let _ = rustix::process::setpriority_process(None, 10);
    // SAFETY: the call passes no memory.
    unsafe { libc::syscall(libc::SYS_ioprio_set, WHO_PROCESS, 0, BEST_EFFORT_LAST) };
}
