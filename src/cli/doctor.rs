//! `stepfs doctor`

mod machine;
mod place;

use std::path::PathBuf;

use anyhow::Result;
use serde::Serialize;

use super::{FAILED, exit_if, format, say_json};

/// Check whether this machine can mount a store, and say how to fix each problem.
///
/// With DIR, also check the file system there: a store, a mount, or the place for a new store. This writes a few bytes
/// there and removes them. Exit code 1 means a problem; warnings do not count.
#[derive(clap::Args)]
#[command(after_help = "Example: stepfs doctor ~/ckpts.store")]
pub(super) struct Args {
    /// A store, a mount, or a directory for a new store.
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

fn ok(check: &'static str, says: impl Into<String>) -> Finding {
    Finding { check, level: Level::Ok, says: says.into(), mend: None }
}

fn warning(check: &'static str, says: impl Into<String>, mend: impl Into<String>) -> Finding {
    Finding { check, level: Level::Warning, says: says.into(), mend: Some(mend.into()) }
}

fn problem(check: &'static str, says: impl Into<String>, mend: impl Into<String>) -> Finding {
    Finding { check, level: Level::Problem, says: says.into(), mend: Some(mend.into()) }
}

pub(super) fn run(args: Args) -> Result<()> {
    let mut findings = machine::findings();
    let mut leases = None;
    if let Some(dir) = &args.dir {
        let (found, known) = place::findings(dir);
        findings.extend(found);
        leases = known;
    }
    findings.push(machine::passthrough(leases));
    match args.json {
        true => say_json(&findings)?,
        false => print(&findings),
    }
    exit_if(findings.iter().any(|finding| finding.level == Level::Problem), FAILED)
}

fn print(findings: &[Finding]) {
    let level = |level| match level {
        Level::Ok => "ok",
        Level::Warning => "warning",
        Level::Problem => "problem",
    };
    for Finding { check, level: found, says, mend } in findings {
        let mend = mend.as_ref().map_or(String::new(), |mend| format!("; fix: {}", format::name(mend)));
        say!("{:<8} {check:<12} {}{mend}", level(*found), format::name(says));
    }
}
