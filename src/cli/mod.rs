//! The commands, one file each. Output is text for people, and JSON for programs with `--json`. Exit codes are an
//! interface: 0 done, 1 failed, 2 wrong usage, 3 damage found.

mod against;
mod cat;
mod doctor;
mod export;
mod gc;
mod import;
mod inspect;
mod listing;
mod ls;
mod manual;
mod mirror;
mod mount;
mod mount_helper;
mod mount_options;
mod pin;
mod profile;
mod pull;
mod recall;
mod release;
mod reshard;
mod source;
mod status;
mod sync;
mod umount;
mod verify;
mod wait;
mod why;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

use crate::terminal::interrupt::{self, interrupted};
use crate::terminal::{self, FAILED, format, log_to_stderr, say_json};
use crate::tools::{compare, tune};

pub use reshard::reshard;

/// Exit code for wrong arguments.
const USAGE: u8 = 2;
/// Exit code of `verify` and `export --salvage` if something is damaged or lost.
const DAMAGED: u8 = 3;

/// A filesystem for training checkpoints.
///
/// Mount it as a job's checkpoint directory. Frameworks write ordinary files. The newest checkpoint stays as written;
/// older ones become quantized differences. Every file can be read, copied, moved or removed at any time.
#[derive(Parser)]
#[command(name = "stepfs", version, propagate_version = true, max_term_width = 100)]
#[command(after_help = "Example:\n  \
stepfs mount ~/ckpts.store /ckpts      then train, with /ckpts as checkpoint directory\n  \
stepfs ls /ckpts                       the size of each checkpoint\n  stepfs umount /ckpts\n\n\
Exit codes: 0 done, 1 failed, 2 wrong usage, 3 damage found.")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// A row per command: its arguments, and the function that runs it.
macro_rules! commands {
    ($($(#[$with:meta])* $name:ident($args:ty) => $run:path,)*) => {
        #[derive(Subcommand)]
        enum Command { $($(#[$with])* $name($args),)* }

        impl Command {
            fn run(self) -> Result<ExitCode> {
                match self { $(Command::$name(args) => $run(args),)* }
            }
        }
    };
}

commands! {
    Mount(mount::Args) => mount::run,
    #[command(name = mount_helper::NAME, hide = true, disable_help_subcommand = true)]
    MountHelper(mount_helper::Args) => mount_helper::run,
    Umount(umount::Args) => umount::run,
    Sync(sync::Args) => sync::run,
    Pull(pull::Args) => pull::run,
    Pin(pin::PinArgs) => pin::pin,
    Unpin(pin::UnpinArgs) => pin::unpin,
    Profile(profile::Args) => profile::run,
    Release(release::Args) => release::run,
    Recall(recall::Args) => recall::run,
    Ls(ls::Args) => ls::run,
    Status(status::Args) => status::run,
    Why(why::Args) => why::run,
    Inspect(inspect::Args) => inspect::run,
    Import(import::Args) => import::run,
    Export(export::Args) => export::run,
    Cat(cat::Args) => cat::run,
    Reshard(reshard::Args) => reshard::run,
    Compare(compare::Args) => compare::run,
    Tune(tune::Args) => tune::run,
    Gc(gc::Args) => gc::run,
    Verify(verify::Args) => verify::run,
    Doctor(doctor::Args) => doctor::run,
    Completions(manual::CompletionsArgs) => manual::completions,
    Man(manual::ManArgs) => manual::man,
}

/// Runs the command that the program's arguments name.
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse_from(mount_helper::arguments(std::env::args_os())) {
        Ok(cli) => cli,
        Err(error) => {
            let code = if mount_helper::is_called(std::env::args_os()) { mount_helper::USAGE } else { USAGE };
            let _ = error.print();
            return if error.use_stderr() { ExitCode::from(code) } else { ExitCode::SUCCESS };
        }
    };
    terminal::ends_commands(|| run(cli.command))
}

fn run(command: Command) -> ExitCode {
    command.run().unwrap_or_else(|error| {
        // The reader may close the pipe early: `stepfs ls | head`.
        let kind = |cause: &(dyn std::error::Error + 'static)| match cause.downcast_ref::<serde_json::Error>() {
            Some(error) => error.io_error_kind(),
            None => cause.downcast_ref::<std::io::Error>().map(std::io::Error::kind),
        };
        if error.chain().any(|cause| kind(cause) == Some(std::io::ErrorKind::BrokenPipe)) {
            return ExitCode::SUCCESS;
        }
        say_error!("stepfs: {}", format::lines(&format::causes(&error)));
        ExitCode::from(FAILED)
    })
}
