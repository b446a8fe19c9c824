//! `stepfs doctor`

mod machine;
mod place;

use std::path::PathBuf;

use anyhow::Result;
use serde::Serialize;

use super::mirror::local_path;
use super::{FAILED, exit_if, format, say_answer};

/// Check whether this machine can mount a store, and say how to fix each problem.
///
/// With DIR, also check the file system there: a store, a mount, or the place for a new store. This writes a few bytes
/// there and removes them. Exit code 1 means a problem; warnings do not count.
#[derive(clap::Args)]
#[command(after_help = "Example: stepfs doctor ~/ckpts.store")]
pub(super) struct Args {
    /// A store, a mount, or a directory for a new store.
    #[arg(value_parser = local_path())]
    dir: Option<PathBuf>,
    /// Print a JSON array.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Level {
    Ok,
    /// It works with a limitation.
    Warning,
    /// It cannot work.
    Problem,
}

/// A check and its result.
#[derive(Debug, Serialize)]
struct Finding {
    check: &'static str,
    level: Level,
    says: String,
    /// The command or action that fixes it.
    mend: Option<String>,
}

fn ok(says: impl Into<String>) -> Finding {
    Finding { check: "", level: Level::Ok, says: says.into(), mend: None }
}

fn warning(says: impl Into<String>, mend: impl Into<String>) -> Finding {
    Finding { level: Level::Warning, mend: Some(mend.into()), ..ok(says) }
}

fn problem(says: impl Into<String>, mend: impl Into<String>) -> Finding {
    Finding { level: Level::Problem, mend: Some(mend.into()), ..ok(says) }
}

impl Finding {
    /// The finding of this check.
    fn of(self, check: &'static str) -> Finding {
        Finding { check, ..self }
    }
}

pub(super) fn run(args: Args) -> Result<()> {
    let mut findings = machine::findings();
    let mut leases = None;
    if let Some(dir) = &args.dir {
        let (found, known) = place::findings(dir);
        findings.extend(found);
        leases = known;
    }
    findings.push(machine::passthrough(leases).of("passthrough"));
    say_answer(args.json, &findings, |findings| findings.iter().for_each(print))?;
    exit_if(findings.iter().any(|finding| finding.level == Level::Problem), FAILED)
}

fn print(Finding { check, level, says, mend }: &Finding) {
    let level = match level {
        Level::Ok => "ok",
        Level::Warning => "warning",
        Level::Problem => "problem",
    };
    let mend = mend.as_ref().map_or(String::new(), |mend| format!("; fix: {}", format::name(mend)));
    say!("{level:<8} {check:<12} {}{mend}", format::name(says));
}
