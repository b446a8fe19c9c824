//! The commands, one file each. Output is text for people, and JSON for programs with `--json`. Exit codes are an
//! interface: 0 done, 1 failed, 2 wrong usage, 3 damage found.

mod against;
mod cat;
mod doctor;
mod export;
mod gc;
mod import;
mod inspect;
mod latest;
mod listing;
mod ls;
mod manual;
mod metrics;
mod mirror;
mod mount;
mod mount_helper;
mod mount_options;
mod passthrough;
mod pin;
mod place;
mod profile;
mod pull;
mod recall;
mod release;
mod report;
mod reshard;
mod source;
mod status;
mod sync;
mod top;
mod umount;
mod verify;
mod view;
mod wait;
mod why;

use std::io::Write;
use std::process::ExitCode;

use anyhow::Result;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::store::Error;
use crate::terminal::interrupt::{self, interrupted};
use crate::terminal::{self, Exit, FAILED, color, exit_if, format, log_to_stderr, say_answer, say_json};
use crate::tools::{compare, convert, diff, merge, tune};

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
stepfs ls /ckpts                       the size of each checkpoint\n  \
stepfs umount /ckpts\n\n\
`stepfs help COMMAND` explains one, with examples.\n\
Exit codes: 0 done, 1 failed, 2 wrong usage, 3 damage found.")]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// Colour on standard output: auto (on a terminal, unless NO_COLOR is set), always or never.
    #[arg(long, global = true, value_name = "WHEN", default_value = "auto", hide_default_value = true)]
    #[arg(hide_possible_values = true)]
    color: clap::ColorChoice,
}

/// The commands in groups, a row each: its arguments, and the function that runs it.
macro_rules! commands {
    ($($group:literal { $($(#[$with:meta])* $name:ident($args:ty) => $run:expr,)* })*) => {
        #[derive(Subcommand)]
        enum Command { $($($(#[$with])* $name($args),)*)* }

        impl Command {
            fn run(self) -> Result<()> {
                match self { $($(Command::$name(args) => ($run)(args),)*)* }
            }
        }

        /// The groups, and the variants in each.
        const GROUPS: &[(&str, &[&str])] = &[$(($group, &[$(stringify!($name),)*]),)*];
    };
}

commands! {
    "Mount" {
        Mount(mount::Args) => mount::run,
        #[command(name = mount_helper::NAME, hide = true, disable_help_subcommand = true)]
        MountHelper(mount_helper::Args) => mount_helper::run,
        Umount(umount::Args) => umount::run,
        Sync(sync::Args) => sync::run,
        Doctor(doctor::Args) => doctor::run,
    }
    "Look" {
        Ls(ls::Args) => ls::run,
        Status(status::Args) => status::run,
        Top(top::Args) => top::run,
        Metrics(metrics::Args) => metrics::run,
        Latest(latest::LatestArgs) => latest::latest,
        Best(latest::BestArgs) => latest::best,
        Why(why::Args) => why::run,
        Inspect(inspect::Args) => inspect::run,
        Diff(diff::Args) => |args| diff::run(args, &place::find),
        Report(report::Args) => report::run,
    }
    "Choose what stays, and how" {
        Pin(pin::PinArgs) => pin::pin,
        Unpin(pin::UnpinArgs) => pin::unpin,
        Profile(profile::Args) => profile::run,
        Release(release::Args) => release::run,
        Recall(recall::Args) => recall::run,
        Gc(gc::Args) => gc::run,
        Compare(compare::Args) => compare::run,
        Tune(tune::Args) => tune::run,
    }
    "Copy, check and mend" {
        Import(import::Args) => import::run,
        Export(export::Args) => export::run,
        Cat(cat::Args) => cat::run,
        Pull(pull::Args) => pull::run,
        Verify(verify::Args) => verify::run,
        Merge(merge::Args) => |args| merge::run(args, &place::find),
        Convert(convert::Args) => |args| convert::run(args, &place::find),
        Reshard(reshard::Args) => reshard::run,
    }
    "Shell" {
        Completions(manual::CompletionsArgs) => manual::completions,
        Man(manual::ManArgs) => manual::man,
    }
}

/// Columns of a command's name in the list of commands, with the margin and the space behind it.
const NAME_COLUMNS: usize = 15;
/// The columns of a narrow terminal.
const COLUMNS: usize = 80;

/// The program's arguments, with its commands in groups.
fn arguments() -> clap::Command {
    let command = Cli::command();
    let mut list = String::new();
    for (group, names) in GROUPS {
        list += &format!("\n{group}:\n");
        let shown = names.iter().filter_map(|name| command.find_subcommand(name.to_lowercase()));
        for command in shown.filter(|command| !command.is_hide_set()) {
            let mut line = format!("  {:1$}", command.get_name(), NAME_COLUMNS - 2);
            for word in command.get_about().map(ToString::to_string).unwrap_or_default().split(' ') {
                if line.len() + word.len() > COLUMNS {
                    list += line.trim_end();
                    line = format!("\n{:NAME_COLUMNS$}", "");
                }
                line += word;
                line.push(' ');
            }
            list += line.trim_end();
            list.push('\n');
        }
    }
    let head = "{about-with-newline}\n{usage-heading} {usage}\n";
    command.help_template(format!("{head}{list}\nOptions:\n{{options}}{{after-help}}"))
}

/// Runs the command that the program's arguments name.
pub fn main() -> ExitCode {
    let words = mount_helper::arguments(std::env::args_os());
    let matches = arguments().try_get_matches_from(&words);
    let cli = match matches.and_then(|matches| Cli::from_arg_matches(&matches)) {
        Ok(cli) => cli,
        Err(error) => {
            let is_helper = words.get(1).is_some_and(|word| word == mount_helper::NAME);
            let code = if is_helper { mount_helper::USAGE } else { USAGE };
            let _ = error.print();
            return if error.use_stderr() { ExitCode::from(code) } else { ExitCode::SUCCESS };
        }
    };
    color::decide(cli.color);
    terminal::ends_commands(|| run(cli.command))
}

/// Prints a path for a script, byte for byte.
fn say_path(path: &std::path::Path) -> Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(path.as_os_str().as_encoded_bytes())?;
    Ok(out.write_all(b"\n")?)
}

fn run(command: Command) -> ExitCode {
    let Err(error) = command.run() else { return ExitCode::SUCCESS };
    if let Some(Exit(code)) = error.downcast_ref() {
        return ExitCode::from(*code);
    }
    // The reader may close the pipe early: `stepfs cat STORE PATH | head`.
    let mut of_device = error.chain().filter_map(|cause| cause.downcast_ref::<std::io::Error>());
    if of_device.any(|error| error.kind() == std::io::ErrorKind::BrokenPipe) {
        return ExitCode::SUCCESS;
    }
    say_error!("stepfs: {}", format::lines(&told(&error)));
    ExitCode::from(FAILED)
}

/// An error with its causes. Of a store that is in use: where it is mounted.
fn told(error: &anyhow::Error) -> String {
    let busy = error.chain().find_map(|cause| match cause.downcast_ref() {
        Some(Error::Busy { path, .. }) => Some(std::fs::canonicalize(path).ok()),
        _ => None,
    });
    let next = match busy.as_ref().map(|store| source::mounted_at(store.as_deref()?)) {
        None => String::new(),
        Some(Some(mounted)) => {
            format!("; it is mounted at {0}: work there, or first `stepfs umount {0}`", mounted.point.display())
        }
        Some(None) => "; try again when that has ended".into(),
    };
    let mut words = format::causes(error);
    // After the system's own words there is no next step.
    let bare = error.chain().filter_map(|cause| cause.downcast_ref::<std::io::Error>()?.raw_os_error());
    match bare.last().filter(|code| words.ends_with(&format!("(os error {code})"))) {
        Some(libc::EACCES | libc::EPERM) => words += "; work as its owner, or as root",
        Some(libc::EROFS) => words += "; mount its file system read-write: mount -o remount,rw",
        Some(libc::EIO) => words += "; if it lies in a mount, `stepfs why FILE` says what is damaged",
        Some(libc::ENOSPC | libc::EDQUOT) => words += "; make room there, and try again",
        _ => {}
    }
    words + &next
}
