//! What commands say to people: text on standard output and standard error, sizes and tables ([`format`]), colour ([`color`]), and what goes
//! when Ctrl-C ends a command ([`interrupt`]).
//!
//! Standard output may be closed or full: the command ends, and what it has in temporary files goes with it. Standard
//! error may be, too: the command goes on.

use std::fmt::Arguments;
use std::io::{ErrorKind, Write};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::process::ExitCode;

use anyhow::Result;
use serde::Serialize;

/// Prints a line. Ends the command if that fails: see [`terminal`](crate::terminal).
#[macro_export]
macro_rules! say {
    ($($text:tt)*) => { $crate::terminal::say(format_args!("{}\n", format_args!($($text)*))) };
}
/// Prints without an end of line.
#[macro_export]
macro_rules! say_part {
    ($($text:tt)*) => { $crate::terminal::say(format_args!($($text)*)) };
}
/// Prints a line to standard error. Nobody may read there: then the line is lost, and the command goes on.
#[macro_export]
macro_rules! say_error {
    ($($text:tt)*) => { $crate::terminal::say_error(format_args!("{}\n", format_args!($($text)*))) };
}

pub mod color;
pub mod format;
pub mod interrupt;

/// Exit code of a failed command.
pub const FAILED: u8 = 1;

/// The exit code of a command that has told the reason itself, or whose output cannot be written.
#[derive(Debug, thiserror::Error)]
#[error("exit code {0}")]
pub struct Exit(pub u8);

/// Ends a command that has told the reason itself.
///
/// # Errors
/// [`Exit`], if it is so.
pub fn exit_if(is_so: bool, code: u8) -> Result<()> {
    if is_so { Err(Exit(code).into()) } else { Ok(()) }
}

/// Prints a text. Unwinds to [`ends_commands`] if that fails.
pub fn say(text: Arguments) {
    let mut out = std::io::stdout().lock();
    let Err(error) = out.write_fmt(text).and_then(|()| out.flush()) else { return };
    let code = match error.kind() {
        // The reader has closed the pipe: `stepfs status | head -1`.
        ErrorKind::BrokenPipe => 0,
        _ => {
            say_error!("stepfs: standard output: {error}");
            FAILED
        }
    };
    resume_unwind(Box::new(Exit(code)));
}

/// Prints an answer as JSON.
///
/// # Errors
/// It cannot be JSON.
pub fn say_json(answer: &impl Serialize) -> Result<()> {
    say!("{}", serde_json::to_string_pretty(answer)?);
    Ok(())
}

/// Prints an answer: for programs as JSON, for people as `words` prints it.
///
/// # Errors
/// It cannot be JSON.
pub fn say_answer<T: Serialize>(json: bool, answer: &T, words: impl FnOnce(&T)) -> Result<()> {
    if json {
        return say_json(answer);
    }
    words(answer);
    Ok(())
}

/// Prints a text to standard error, if somebody reads there. `eprintln` would panic.
pub fn say_error(text: Arguments) {
    let _ = std::io::stderr().lock().write_fmt(text);
}

/// Runs a command, and ends it where its output cannot be written.
pub fn ends_commands(run: impl FnOnce() -> ExitCode) -> ExitCode {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| match panic.downcast::<Exit>() {
        Ok(exit) => ExitCode::from(exit.0),
        Err(panic) => resume_unwind(panic),
    })
}

/// Prints the library's warnings for a command that works on a store directly.
pub fn log_to_stderr(default: &str) {
    let env = env_logger::Env::new().filter_or("STEPFS_LOG", default);
    // Users of a mount choose names in the log: no name may start a log line or send control characters to a terminal.
    let line = |out: &mut env_logger::fmt::Formatter, record: &log::Record<'_>| {
        let now = humantime::format_rfc3339_seconds(std::time::SystemTime::now());
        writeln!(out, "[{now} {:<5}] {}", record.level(), format::name(record.args().to_string()))
    };
    let _ = env_logger::Builder::from_env(env).format(line).try_init();
}
