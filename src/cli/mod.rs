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
mod mount;
mod mount_helper;
mod mount_options;
mod pin;
mod profile;
mod pull;
mod push;
mod recall;
mod release;
mod remote;
mod reshard;
mod source;
mod status;
mod sync;
mod umount;
mod verify;
mod wait;
mod why;

use std::process::ExitCode;

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

#[derive(Subcommand)]
enum Command {
    Mount(mount::Args),
    #[command(name = mount_helper::NAME, hide = true, disable_help_subcommand = true)]
    MountHelper(mount_helper::Args),
    Umount(umount::Args),
    Sync(sync::Args),
    Push(push::Args),
    Pull(pull::Args),
    Pin(pin::PinArgs),
    Unpin(pin::UnpinArgs),
    Profile(profile::Args),
    Release(release::Args),
    Recall(recall::Args),
    Ls(ls::Args),
    Status(status::Args),
    Why(why::Args),
    Inspect(inspect::Args),
    Import(import::Args),
    Export(export::Args),
    Cat(cat::Args),
    Reshard(reshard::Args),
    Compare(compare::Args),
    Tune(tune::Args),
    Gc(gc::Args),
    Verify(verify::Args),
    Doctor(doctor::Args),
    Completions(manual::CompletionsArgs),
    Man(manual::ManArgs),
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
    let result = match command {
        Command::Mount(args) => mount::run(args),
        Command::MountHelper(args) => return mount_helper::run(args),
        Command::Umount(args) => umount::run(args),
        Command::Sync(args) => sync::run(args),
        Command::Push(args) => push::run(args),
        Command::Pull(args) => pull::run(args),
        Command::Pin(args) => pin::pin(args),
        Command::Unpin(args) => pin::unpin(args),
        Command::Profile(args) => profile::run(args),
        Command::Release(args) => release::run(args),
        Command::Recall(args) => recall::run(args),
        Command::Ls(args) => ls::run(args),
        Command::Status(args) => status::run(args),
        Command::Why(args) => why::run(args),
        Command::Inspect(args) => inspect::run(args),
        Command::Import(args) => import::run(args),
        Command::Export(args) => export::run(args),
        Command::Cat(args) => cat::run(args),
        Command::Reshard(args) => reshard::run(args),
        Command::Compare(args) => compare::run(args),
        Command::Tune(args) => tune::run(args),
        Command::Gc(args) => gc::run(args),
        Command::Verify(args) => verify::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Completions(args) => manual::completions(args),
        Command::Man(args) => manual::man(args),
    };
    result.unwrap_or_else(|error| {
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
