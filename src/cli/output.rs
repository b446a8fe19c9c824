//! Standard output that may be closed or full: the command ends, and what it has in temporary files goes with it.
//! Standard error may be, too: the command goes on.

use std::fmt::Arguments;
use std::io::{ErrorKind, Write};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::process::ExitCode;

/// Unwinds the stack of a command whose output nobody can have.
struct Ended(ExitCode);

/// Prints a text. Unwinds to [`ends_commands`] if that fails.
pub(super) fn say(text: Arguments) {
    let mut out = std::io::stdout().lock();
    let Err(error) = out.write_fmt(text).and_then(|()| out.flush()) else { return };
    let code = match error.kind() {
        // The reader has closed the pipe: `stepfs status | head -1`.
        ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        _ => {
            say_error!("stepfs: standard output: {error}");
            ExitCode::from(super::FAILED)
        }
    };
    resume_unwind(Box::new(Ended(code)));
}

/// Prints a text to standard error, if somebody reads there. `eprintln` would panic.
pub(super) fn say_error(text: Arguments) {
    let _ = std::io::stderr().lock().write_fmt(text);
}

/// Runs a command, and ends it where its output cannot be written.
pub(super) fn ends_commands(run: impl FnOnce() -> ExitCode) -> ExitCode {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| match panic.downcast::<Ended>() {
        Ok(ended) => ended.0,
        Err(panic) => resume_unwind(panic),
    })
}
