//! The `stepfs` command.

use std::process::ExitCode;

#[cfg(feature = "jemalloc")]
mod allocator;

fn main() -> ExitCode {
    stepfs::cli::main()
}
