//! The life of a file, step by step. Read this first.
//!
//! ```text
//! staged ─last close─▶ closed ─seal─▶ sealed ─archive─▶ archived ─release─▶ released
//!   ▲                    └──compare: a copy──────────▶ archived               │
//!   └──────────────────────── opened for writing: recall ─────────────────────┘
//! ```
//!
//! The catalog (`catalog.rs`) offers a step when its condition holds, and one thread claims it (`threads.rs`). A step
//! that fails leaves the file as it was (`error.rs`). A crash between two steps loses nothing: the next mount finds the
//! file as it is.

use crate::encode::StepResult;

use super::Archive;
use super::catalog::{Step, Task};

impl Archive {
    /// Takes the step that a thread has claimed.
    ///
    /// # Errors
    /// The reason for its end; [`Archive::take`] decides how to go on.
    pub(super) fn step(&self, task: &Task) -> StepResult<()> {
        match &task.step {
            // The last handle is gone. The file becomes durable; its tensors and its lineage are found.
            Step::Seal => self.seal(task),
            // A program has opened the file again before its turn came. What it had closed before becomes durable.
            Step::Sync => self.seal(task),
            // An object may decode to the file's bytes. Then the file is archived by that object, without a newer state.
            Step::Compare { sealed } => self.twins().compare(task, sealed),
            // A newer state with other bytes is sealed. The file is encoded as a difference to an older state, made
            // durable, read back from the device, and compared with its bounds. Its bytes are still in the tree.
            Step::Archive { sealed, newer } => self.archive_file(task, sealed, newer),
            // All files of the checkpoint are archived, and none is open. A durable stub takes its place.
            Step::Release { .. } => self.release(task),
        }
    }
}
