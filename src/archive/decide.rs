//! Which step may a file take now, and why not another: one pure function of plain data.
//!
//! Its nouns: a *run* is all files whose names may be states of one training run ([`step_pattern::run`]); only these
//! wait for each other. A *lineage* is the states of one file of it. A *checkpoint* is a directory of the run, or files
//! beside each other with one step. [`decide`] takes the files of one run and answers for each which step it may take
//! ([`Verdict`]) and what keeps it ([`Why`]). Encoders, release, `stepfs why` and `stepfs status` read this answer.
//!
//! Two orders count within a lineage. By time: training goes on from the newest state. By the steps in the names: a run
//! that was resumed from step 60 writes 64 after 140, and `resume_from_checkpoint=True` still picks 140. The last state
//! of either order stays exact. A file before both is *history*.
//!
//! A checkpoint is *open* once each of its files that waits is history. A crash between two files of the next checkpoint
//! could otherwise leave only a partly quantized one to resume from. For a file without which a run cannot go on it waits
//! without a limit, for any other of a directory `settle` nanoseconds. A directory with more files than each newer one of
//! the run waits, too: a crash may have cut that one short.
//!
//! Two facts about other files are weighed first. A file whose index tells its tensors is a state only while the save is
//! *finished* ([`Siblings`]); otherwise an older checkpoint would lose something for an interrupted save. A *mark*
//! ([`Mark`]) says that a file is the best of its run: it loses nothing.

mod marks;
mod places;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use crate::store::step_pattern;

use super::entry::{Entry, Held, Part, Siblings, State};
use marks::marks;
pub(super) use marks::{Mark, Others, Results};
use places::{Place, places};

/// The two clocks at one moment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Now {
    /// For attempts that are repeated.
    pub(super) instant: Instant,
    /// For files' times; nanoseconds since 1970.
    pub(super) wall_ns: i64,
}

/// A file of the tree. Those of one checkpoint share one [`Checkpoint`].
#[derive(Clone, Debug)]
pub(super) struct File {
    pub(super) path: Arc<Path>,
    /// See [`step_pattern::run`].
    pub(super) run: Arc<Path>,
    pub(super) checkpoint: Option<Arc<Checkpoint>>,
    /// What its name shows.
    pub(super) results: Option<Arc<Results>>,
    pub(super) entry: Entry,
}

/// The checkpoint of a file.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Checkpoint {
    pub(super) group: step_pattern::Group,
    /// Of a directory: its path without its steps, and these. Newer ones of a series have higher steps.
    place: Option<(Vec<u8>, Vec<u64>)>,
}

impl Checkpoint {
    /// The checkpoint of a file in this state.
    pub(super) fn of(path: &Path, state: &State) -> Option<Checkpoint> {
        let group = step_pattern::Group::of(path, state.part() == Some(Part::Whole))?;
        let counted = group.steps.is_none().then(|| step_pattern::of_directory(&group.directory));
        Some(Checkpoint { place: counted.map(|counted| (counted.series, counted.steps)), group })
    }

    /// Else its files lie beside others.
    pub(super) fn is_directory(&self) -> bool {
        self.group.steps.is_none()
    }
}

/// A step of a file's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Work {
    /// Make it durable, and find its tensors.
    Seal,
    /// The same together with others.
    Together,
    /// Find out whether it is a copy of a decoded object.
    Compare,
    /// Encode it. With the place of the state after it.
    Archive(usize),
    /// Put a stub in its place.
    Release,
}

/// Whether a file may take its step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Now.
    Now(Work),
    /// Once all files of its checkpoint are archived that can be now.
    Next(Work),
    /// An attempt failed, and may be repeated then.
    At(Work, Instant),
    /// Once its checkpoint is open.
    Settle(Work),
    /// There is none.
    Stay,
}

impl Verdict {
    /// The step, whenever it is taken.
    pub(super) fn work(self) -> Option<Work> {
        match self {
            Verdict::Now(work) | Verdict::Next(work) | Verdict::At(work, _) | Verdict::Settle(work) => Some(work),
            Verdict::Stay => None,
        }
    }

    /// Whether a step can be taken, now or after a failure has passed.
    pub(super) fn is_queued(self) -> bool {
        !matches!(self, Verdict::Stay | Verdict::Settle(_))
    }
}

/// The reason that keeps a file as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Why {
    /// A stub has taken its place.
    Released,
    /// Its state has the reason.
    Resident,
    /// A handle that can write is open.
    Open,
    /// An attempt failed.
    Failed,
    Held(Held),
    /// The save that it belongs to is not finished.
    Unfinished,
    /// A handle is open, or it has several names.
    Busy,
    /// It was closed, and nobody has looked at it since.
    Unexamined,
    /// Some of its weights are not finite.
    Unsound,
    /// It is the newest of its lineage.
    Newest,
    /// It has the highest step of its lineage.
    Highest,
    /// No newer checkpoint has as many files.
    Fullest,
    /// The file of the checkpoint at this place has no newer state.
    HeldUpBy(usize),
    /// Nothing; threads are at work on it, or on files before it.
    Work,
}

/// The decision about one file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Decision {
    pub(super) verdict: Verdict,
    pub(super) why: Why,
    /// A newer state of its lineage is sealed.
    pub(super) has_newer: bool,
    /// So is one with higher steps: only then may it lose anything.
    pub(super) is_history: bool,
    /// The save that it belongs to is not finished.
    pub(super) is_unfinished: bool,
    /// An archived file may become a stub.
    pub(super) may_go: bool,
    /// When a file of its checkpoint, or a newer state of one, was last modified; and whether the file waits for it.
    pub(super) newest: Option<i64>,
    pub(super) is_held_up: bool,
}

/// The decision about a run, in the order of its files.
#[derive(Debug, Default)]
pub(super) struct Answer {
    pub(super) files: Vec<Decision>,
    /// The best of the run.
    pub(super) marks: BTreeMap<usize, Mark>,
    /// Places of the files to archive and to release now, the oldest first.
    pub(super) archives: Vec<usize>,
    pub(super) releases: Vec<usize>,
    /// Steps to archive or to release, now or after a failure has passed.
    pub(super) queued: usize,
    /// Files whose steps wait for their checkpoint.
    pub(super) settling: usize,
    /// The lowest number that a file with such a step was opened with.
    pub(super) oldest: Option<u64>,
    /// When the first of these steps became possible: its file was closed, or the states after it were. Nanoseconds since 1970.
    pub(super) since: Option<i64>,
    /// When a failed attempt may be repeated, and when a checkpoint is waited for no longer.
    pub(super) retry: Option<Instant>,
    pub(super) settles: Option<i64>,
}

impl Answer {
    /// Whether the time has come to decide again.
    pub(super) fn is_due(&self, now: Now) -> bool {
        self.retry.is_some_and(|at| at <= now.instant) || self.settles.is_some_and(|at| at <= now.wall_ns)
    }
}

/// Decides about the files of one run, given in the order of sealing. `settle`: how long a directory waits for the rest
/// of its checkpoint, in nanoseconds; 0: there are no checkpoints.
pub(super) fn decide(files: &[Arc<File>], others: &Others, settle: i64, now: Now) -> Answer {
    let marks = marks(files, others);
    let unfinished = unfinished(files);
    // Why a file stays, whatever its lineage and its checkpoint say.
    let stays = |at: usize| match files[at].entry.held.filter(|held| *held != Held::Best || marks.contains_key(&at)) {
        Some(held) => Some(Why::Held(held)),
        None => unfinished[at].then_some(Why::Unfinished),
    };
    let stays: Vec<Option<Why>> = (0..files.len()).map(stays).collect();
    let places = places(files, |at| !unfinished[at]);
    let (groups, of_file) =
        if settle > 0 { groups(files, &places, &stays) } else { (Vec::new(), vec![None; files.len()]) };
    let group = |at: usize| of_file[at].map(|group: usize| &groups[group]);
    let is_open = |group: &Group| group.is_open(settle, now.wall_ns);
    let is_unexamined = files.iter().any(|file| matches!(work(&file.entry), Some(Work::Seal | Work::Compare)));
    let mut archiving = vec![false; groups.len()];
    let mut answer = Answer { files: Vec::with_capacity(files.len()), marks, ..Answer::default() };
    for (at, file) in files.iter().enumerate() {
        let place = places[at];
        let closed = group(at).filter(|group| !is_open(group));
        let retry = file.entry.failed.as_ref().and_then(|failed| failed.retry).filter(|at| *at > now.instant);
        let able = || stays[at].is_none() && !file.entry.busy && !file.entry.is_given_up();
        let work = match file.entry.state {
            State::Sealed(_) if able() => place.after.filter(|_| place.is_history).map(Work::Archive),
            State::Archived(..) if able() => Some(Work::Release),
            _ => work(&file.entry),
        };
        let verdict = match (work, closed, retry) {
            (None, ..) => Verdict::Stay,
            (Some(work @ (Work::Archive(_) | Work::Release)), Some(_), _) => Verdict::Settle(work),
            (Some(work), _, Some(retry)) => Verdict::At(work, retry),
            (Some(work), ..) => Verdict::Now(work),
        };
        if let (Verdict::Now(Work::Archive(_)), Some(group)) = (verdict, of_file[at]) {
            archiving[group] = true;
        }
        let is_copy = matches!(&file.entry.state, State::Archived(sealed, _) if sealed.copy);
        answer.files.push(Decision {
            verdict,
            why: why(&file.entry, stays[at], place, closed, is_unexamined),
            has_newer: place.has_newer,
            is_history: place.is_history,
            is_unfinished: unfinished[at],
            may_go: is_copy || place.stays_history && closed.is_none() && !unfinished[at],
            newest: group(at).map(|group| group.newest),
            is_held_up: closed.is_some(),
        });
    }
    for (at, decision) in answer.files.iter_mut().enumerate() {
        match decision.verdict {
            Verdict::Now(Work::Archive(_)) => answer.archives.push(at),
            Verdict::Now(Work::Release) if of_file[at].is_some_and(|group| archiving[group]) => {
                decision.verdict = Verdict::Next(Work::Release);
            }
            Verdict::Now(Work::Release) => answer.releases.push(at),
            Verdict::At(_, retry) => answer.retry = Some(answer.retry.map_or(retry, |first| first.min(retry))),
            Verdict::Settle(_) => {
                answer.settling += 1;
                let settles = of_file[at].and_then(|group| groups[group].settles(settle));
                answer.settles = answer.settles.into_iter().chain(settles).min();
            }
            _ => {}
        }
        if decision.verdict.is_queued() {
            let is_later = matches!(decision.verdict.work(), Some(Work::Archive(_) | Work::Release));
            answer.queued += usize::from(is_later);
            let opened = files[at].entry.opened;
            answer.oldest = Some(answer.oldest.map_or(opened, |oldest| oldest.min(opened)));
            let since = files[at].entry.seen_ns.max(places[at].since);
            answer.since = Some(answer.since.map_or(since, |first| first.min(since)));
        }
    }
    for list in [&mut answer.archives, &mut answer.releases] {
        list.sort_by_cached_key(|at| rank(&files[*at].entry));
    }
    answer
}

/// Whether the decisions about a run's other files stand, and at most allow less than new ones would, after this change of
/// a file: a thread took a step of it, or failed. `was_history`: it had newer states, so others do not need it as theirs.
pub(super) fn lets_stand(old: &Entry, new: &Entry, was_history: bool) -> bool {
    use State::{Archived, Closed, Durable, Released, Resident, Sealed, Staged};
    let is_step = match (&old.state, &new.state) {
        (Sealed(_), Archived(..) | Resident(_)) => was_history,
        (Durable(_), Sealed(_) | Archived(..)) | (Archived(..), Released(_)) => true,
        (Durable(a), Durable(b)) | (Sealed(a), Sealed(b)) | (Archived(a, _), Archived(b, _)) => Arc::ptr_eq(a, b),
        (Staged, Staged) | (Closed, Closed) | (Released(_), Released(_)) | (Resident(_), Resident(_)) => true,
        _ => false,
    };
    // What other files are weighed with.
    let facts = |entry: &Entry| {
        let Entry { version, held, unsound, cut, seen_ns, asked_ns, stamp, .. } = entry;
        let says = entry.says.as_ref().map(Arc::as_ptr);
        (*version, *held, *unsound, *cut, *seen_ns, *asked_ns, *stamp, says, entry.state.counts_as_file())
    };
    is_step && facts(old) == facts(new) && (new.is_given_up() || !old.is_given_up())
}

/// The age of a state within its lineage: by modification time, then by the steps in its name (an unpacked archive
/// has whole seconds), then by the order of closing.
pub(super) fn rank(entry: &Entry) -> (i64, &[u64], u64) {
    match entry.state.sealed() {
        Some(sealed) => (sealed.modified_ns, &sealed.steps, entry.sequence),
        None => (0, &[], entry.sequence),
    }
}

/// The step of a file that waits for no other file.
pub(super) fn work(entry: &Entry) -> Option<Work> {
    match &entry.state {
        _ if entry.is_given_up() => None,
        State::Staged | State::Closed if entry.waits_until().is_some() => Some(Work::Together),
        State::Closed => Some(Work::Seal),
        State::Durable(_) => Some(Work::Compare),
        _ => None,
    }
}

/// Whether the save is not finished that each file belongs to. A copy loses nothing, whatever becomes of its save.
fn unfinished(files: &[Arc<File>]) -> Vec<bool> {
    fn siblings(file: &File) -> Option<&Arc<Siblings>> {
        file.entry.state.sealed().filter(|sealed| !sealed.copy)?.siblings.as_ref()
    }
    if files.iter().all(|file| siblings(file).is_none()) {
        return vec![false; files.len()];
    }
    let entries: HashMap<&Path, &Entry> = files.iter().map(|file| (&*file.path, &file.entry)).collect();
    // The files of each finished save.
    let mut saves: HashMap<*const Siblings, HashSet<&Path>> = HashMap::new();
    let mut is_unfinished = |file| {
        let Some(of) = siblings(file) else { return false };
        let save = saves.entry(Arc::as_ptr(of)).or_insert_with(|| {
            let is_finished = of.are_finished(|path| entries.get(path).copied());
            of.files.iter().filter(|_| is_finished).map(|(path, _)| path.as_path()).collect()
        });
        !save.contains(&*file.path)
    };
    files.iter().map(|file| is_unfinished(file)).collect()
}

fn why(entry: &Entry, stays: Option<Why>, place: Place, closed: Option<&Group>, is_unexamined: bool) -> Why {
    match &entry.state {
        State::Released(_) => Why::Released,
        State::Resident(_) => Why::Resident,
        State::Staged => Why::Open,
        _ if entry.failed.is_some() => Why::Failed,
        _ if stays.is_some() => stays.unwrap_or(Why::Work),
        _ if entry.busy => Why::Busy,
        State::Closed => Why::Unexamined,
        State::Sealed(_) if entry.unsound && !place.is_history => Why::Unsound,
        State::Sealed(_) if !is_unexamined && !place.has_newer => Why::Newest,
        State::Sealed(_) if !is_unexamined && !place.is_history => Why::Highest,
        _ => match closed {
            Some(group) if group.is_fullest && group.essential.is_none() => Why::Fullest,
            Some(group) => group.essential.or(group.pending).map_or(Why::Work, Why::HeldUpBy),
            None => Why::Work,
        },
    }
}

/// When a file was last modified or written; nanoseconds since 1970.
fn touched(entry: &Entry) -> i64 {
    entry.state.sealed().map_or(entry.seen_ns, |sealed| sealed.modified_ns.min(entry.seen_ns))
}

/// The condition that the files of a checkpoint wait for.
#[derive(Clone, Debug)]
struct Group {
    is_directory: bool,
    /// The first file that is not history yet, and the first of these without which a run cannot go on. It may be the
    /// last of its lineage because a crash cut the next checkpoint short: the run then goes on from this one, at any
    /// later time.
    pending: Option<usize>,
    essential: Option<usize>,
    /// The last modification of its files and of the newer files that made them history.
    newest: i64,
    /// Its durable files. Empty, cut short and temporary ones do not count.
    files: usize,
    /// A directory with more of them than each newer one of its run.
    is_fullest: bool,
    /// A user wants it released, unless something was modified after this time.
    asked: i64,
}

impl Group {
    /// No time opens it, but only a newer checkpoint.
    fn waits_without_limit(&self) -> bool {
        self.is_fullest || self.essential.is_some()
    }

    fn is_open(&self, settle: i64, now: i64) -> bool {
        let is_settled = || !self.is_directory || self.pending.is_none() || self.newest.saturating_add(settle) <= now;
        !self.waits_without_limit() && is_settled() || self.newest <= self.asked
    }

    /// When it is waited for no longer.
    fn settles(&self, settle: i64) -> Option<i64> {
        (!self.waits_without_limit()).then(|| self.newest.saturating_add(settle)).filter(|at| *at < i64::MAX)
    }
}

/// The checkpoints of a run, and the one of each file that waits for others.
fn groups(files: &[Arc<File>], places: &[Place], stays: &[Option<Why>]) -> (Vec<Group>, Vec<Option<usize>>) {
    let mut known: HashMap<*const Checkpoint, usize> = HashMap::new();
    let (mut groups, mut keys): (Vec<Group>, Vec<&Arc<Checkpoint>>) = (Vec::new(), Vec::new());
    let mut of_file = vec![None; files.len()];
    // Neighbours are of one checkpoint most often.
    let mut former: Option<(*const Checkpoint, usize)> = None;
    for (at, file) in files.iter().enumerate() {
        let (Some(key), entry) = (&file.checkpoint, &file.entry) else { continue };
        let address = Arc::as_ptr(key);
        let own = former.filter(|(of, _)| *of == address).map(|(_, own)| own).unwrap_or_else(|| {
            *known.entry(address).or_insert_with(|| {
                keys.push(key);
                groups.push(Group {
                    is_directory: key.is_directory(),
                    pending: None,
                    essential: None,
                    newest: i64::MIN,
                    files: 0,
                    is_fullest: false,
                    asked: i64::MIN,
                });
                groups.len() - 1
            })
        });
        former = Some((address, own));
        let group = &mut groups[own];
        group.asked = group.asked.max(entry.asked_ns);
        let counts = entry.state.counts_as_file() && key.is_directory();
        group.files += usize::from(counts && !step_pattern::is_temporary(&file.path));
        // A copy of an archived file loses nothing, whatever happens to the rest.
        if matches!(&entry.state, State::Archived(sealed, _) if sealed.copy) {
            continue;
        }
        of_file[at] = Some(own);
        let is_done = matches!(entry.state, State::Resident(_) | State::Released(_));
        if is_done || entry.is_given_up() || stays[at].is_some() {
            continue;
        }
        group.newest = group.newest.max(touched(entry)).max(places[at].since);
        if !places[at].is_history {
            group.pending = group.pending.or(Some(at));
            // An archived file that became the newest again must be released in vain first: then it is sealed again.
            let is_archived = matches!(entry.state, State::Archived(..));
            // Nobody has examined it yet, or a run needs it.
            if !is_archived && entry.state.part() != Some(Part::Other) {
                group.essential = group.essential.or(Some(at));
            }
        }
    }
    mark_fullest(&keys, &mut groups);
    (groups, of_file)
}

/// A run that dies between two files of a checkpoint may be unable to go on from it, whatever the missing file is. Such a
/// directory has fewer files than the one before, so that one keeps its exact bytes.
fn mark_fullest(keys: &[&Arc<Checkpoint>], groups: &mut [Group]) {
    let mut directories: Vec<_> = keys
        .iter()
        .enumerate()
        .filter_map(|(at, key)| key.place.as_ref().map(|(series, steps)| (series, steps, &key.group.directory, at)))
        .collect();
    directories.sort_unstable();
    for series in directories.chunk_by(|a, b| a.0 == b.0) {
        let mut most = 0;
        for (.., at) in series.iter().rev() {
            groups[*at].is_fullest = groups[*at].files > most;
            most = most.max(groups[*at].files);
        }
    }
}

#[cfg(test)]
mod tests;
