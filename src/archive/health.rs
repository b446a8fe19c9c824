//! The health of a store and of a file: each problem with its file and the next step.

use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::terminal::format::{size, time};

use super::about::About;
use super::checkpoints::Condition;
use super::decide::Mark;
use super::entry::{Entry, State};
use super::resident::ResidentReason;
use super::shared::Shared;

/// Something that a person must know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    /// For programs: `moved`, `damaged`, `cut-short`, `not-finite`, `full`, `stalled`, `mirror`, `failed`, `kept` or `clock`.
    pub kind: String,
    /// The event, and its file.
    pub says: String,
    /// The next step.
    pub mend: String,
}

impl Problem {
    /// A problem, and the next step.
    pub fn new(kind: &str, says: impl Into<String>, mend: impl Into<String>) -> Problem {
        Problem { kind: kind.into(), says: says.into(), mend: mend.into() }
    }

    /// A file that cannot be read.
    pub fn damaged(path: &Path, why: &str) -> Problem {
        let mend = "unmount, then `stepfs verify --repair STORE` mends what it can";
        Problem::new("damaged", format!("{} cannot be read: {why}", path.display()), mend)
    }

    /// A file that ends too early.
    pub fn cut_short(path: &Path, why: &str) -> Problem {
        let mend = "do not resume from it (`stepfs latest` names the newest whole checkpoint); remove it";
        Problem::new("cut-short", format!("{} is cut short: {why}", path.display()), mend)
    }

    /// States that nobody goes on from: `count` of them, `path` among them.
    pub fn not_finite(count: usize, path: &Path) -> Problem {
        let (files, path) = (if count == 1 { "file has" } else { "files have" }, path.display());
        let mend = "go on from the state before (`stepfs latest` names it), which stays exact";
        Problem::new("not-finite", format!("{count} {files} weights that are not finite: {path}"), mend)
    }

    /// Files with times in the future: `count` of them, `path` with the latest one.
    pub fn future(count: usize, path: &Path, modified_ns: i64) -> Problem {
        let files = if count == 1 { "1 file has a time".into() } else { format!("{count} files have times") };
        let (path, when) = (path.display(), time(modified_ns / 1_000_000_000));
        let says =
            format!("{files} in the future: a clock was wrong; {path} of {when} counts as the newest until then");
        Problem::new("clock", says, "set the clock if it is wrong now; else give them their time: touch -d TIME FILE")
    }

    /// The clock leapt forward by `doubted`.
    pub fn leapt(doubted: Duration) -> Option<Problem> {
        let by = humantime::format_duration(Duration::from_secs(doubted.as_secs()));
        let says =
            format!("the clock leapt forward by {by}: for a day, `keep_for` and `keep_manifests` do not count that");
        (!doubted.is_zero()).then(|| Problem::new("clock", says, "set the clock, if it is wrong"))
    }

    /// A file system without room for another file of this size, if that is so.
    pub fn full(free: u64, largest: u64) -> Option<Problem> {
        let says = || {
            let (free, largest) = (size(free), size(largest));
            format!(
                "the disk of the store has {free} left, and a save may need {largest}: the next one may be cut short"
            )
        };
        let mend = "remove checkpoints, or let [[retention]] in stepfs.toml do it";
        (free < largest).then(|| Problem::new("full", says(), mend))
    }
}

/// All that a daemon knows of one file.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FileStatus {
    /// `staged`, `sealed`, `archived` or `released`.
    pub state: String,
    /// Whether it is whole.
    pub condition: Condition,
    /// Why it is not whole, or cannot be read.
    pub fault: Option<String>,
    /// The profile that it has, or would get.
    pub profile: Option<String>,
    /// [`crate::archive::lossy_words`].
    pub lossy: Option<String>,
    /// Lossy restores behind it.
    pub generations: Option<u32>,
    /// The object that holds it.
    pub object: Option<String>,
    /// The file or link that names it as the best of its run.
    pub best: Option<String>,
    /// Its name shows the best result of its run.
    pub has_best_result: bool,
}

impl FileStatus {
    /// What is known of a file. May read an object, or the head of the file. `None` if no such file is known.
    pub(super) fn of(about: &About<'_>) -> Option<FileStatus> {
        let word = |name| String::from_utf8(about.attribute(name)?).ok();
        let (shared, path) = (about.shared, about.path);
        let (fault, has_best_result) = {
            let mut catalog = shared.catalog();
            let has_best_result = catalog.decided().mark(path) == Some(Mark::Result);
            (fault(shared, catalog.get(path)?), has_best_result)
        };
        Some(FileStatus {
            state: word("state")?,
            condition: shared.condition(path),
            fault,
            profile: word("profile"),
            lossy: word("lossy"),
            generations: word("generations").and_then(|count| count.parse().ok()),
            object: word("object"),
            best: word("best"),
            has_best_result,
        })
    }
}

/// Why a file is not whole, or cannot be read.
pub(super) fn fault(shared: &Shared, entry: &Entry) -> Option<String> {
    use ResidentReason::{CutShort, DamagedStub, NotDurable, OtherStore, Unreadable};
    match &entry.state {
        State::Released(id) => match shared.recall.failure(*id) {
            Some(why) => Some(why),
            None if shared.objects.get(*id).is_none() => Some(format!("its object {id} is missing or damaged")),
            None => None,
        },
        State::Resident(why @ (CutShort(_) | NotDurable | DamagedStub | OtherStore | Unreadable)) => {
            Some(why.to_string())
        }
        _ => None,
    }
}
