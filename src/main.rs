//! The `stepfs` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    stepfs::cli::main()
}
