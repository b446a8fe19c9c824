//! `stepfs-passthrough`: the helper as a program with the file capability CAP_SYS_ADMIN. Its standard input is the
//! socket of the daemon that started it. It takes no arguments, and reads no environment.

use std::process::ExitCode;

fn main() -> ExitCode {
    let done = match std::env::args_os().nth(1) {
        Some(_) => Err(std::io::Error::other("it takes no arguments")),
        None => passthrough::helper::run(None),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("stepfs-passthrough: {error}");
            ExitCode::FAILURE
        }
    }
}
