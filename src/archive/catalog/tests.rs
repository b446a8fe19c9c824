//! The decisions and the choice among them against a scan of all entries.

use std::collections::{BTreeMap, HashMap};
use std::time::Instant;

use proptest::prelude::*;

use super::*;
use crate::archive::FileId;
use crate::archive::decide::{Decision, Mark, rank};
use crate::archive::entry::{Failed, MOMENT, Part, Siblings};
use crate::archive::resident::ResidentReason;
use crate::store::TRASH;
use crate::store::step_pattern;

/// Longer than any test, so that groups wait until they are told not to.
const LONG: Duration = Duration::from_secs(1 << 31);
/// Those below `exp` are of another run.
const FILES: [&str; 13] = [
    "checkpoint-1/a", "checkpoint-1/b", "checkpoint-2/a", "checkpoint-2/b", "checkpoint-3/a", "x_1", "x_2", "x_3",
    "z_1", "y", "exp/checkpoint-1/a", "exp/checkpoint-2/a", "exp/x_1",
];
/// The parts of files in the lineages 0, 1 and 2.
const PARTS: [Part; 3] = [Part::Other, Part::Whole, Part::Piece];
const TARGETS: [&str; 6] = ["/mnt/checkpoint-1", "checkpoint-2", "/x/checkpoint-3", "/mnt/x_1", "x_2", ""];
const DIRECTORIES: [&str; 3] = ["checkpoint-1", "checkpoint-2", "checkpoint-3"];

fn sealed(lineage: u64, modified_ns: i64, sample: u64) -> Arc<Sealed> {
    sealed_at(Vec::new(), lineage, modified_ns, sample)
}

fn sealed_at(steps: Vec<u64>, lineage: u64, modified_ns: i64, sample: u64) -> Arc<Sealed> {
    let file = FileId { dev: 1, ino: 1 };
    Arc::new(Sealed {
        file,
        len: 1,
        modified_ns,
        steps,
        sample,
        signature: 0,
        lineage,
        part: PARTS[lineage as usize % 3],
        siblings: None,
        copy: false,
        changed_ns: None,
    })
}

/// Without objects.
fn catalog(settle: Duration) -> Catalog {
    let dir = tempfile::tempdir().unwrap();
    Catalog::new(settle, Arc::new(Objects::load(dir.path(), |_, _| {}).unwrap()))
}

fn found(catalog: &mut Catalog, path: impl AsRef<Path>, state: State) {
    catalog.found(path.as_ref(), state, (Stamp::default(), None), None);
}

/// As a sealer does that has read a file.
fn says(catalog: &mut Catalog, path: &Path, names: Option<&[&str]>, modified_ns: i64) {
    let version = catalog.get(path).map_or(0, |entry| entry.version);
    let names = names.map(|names| names.iter().map(|name| name.to_string()).collect());
    catalog.examined(path, version, (Stamp { modified_ns, ..Stamp::default() }, None), names);
}

#[derive(Clone, Debug)]
enum Note {
    Open(usize),
    /// With so many bytes, if it was written.
    Close(usize, Option<u64>),
    Seal(usize, u64, i64, u64, u64),
    /// It may be a copy.
    Durable(usize, u64, i64, u64),
    Archive(usize),
    Release(usize),
    Stay(usize),
    Busy(usize, bool),
    Fail(usize, Option<u64>),
    Hold(usize, bool),
    Remove(usize),
    Rename(usize, usize),
    RenameDirectory(usize, usize),
    Exchange(usize, usize),
    Link(usize, usize),
    Profile(usize),
    /// A file names a file or directory as the best.
    Says(usize, usize, i64),
    SaysNothing(usize),
    /// As the archive does when a file's turn comes.
    HoldBest(usize),
    /// Some of its weights are not finite.
    Unsound(usize),
    Retry,
    Later(u64),
    /// A thread takes the next file to seal, files to seal together, or another step.
    Claim(u8),
    /// The bytes of a claimed file are durable.
    Synced(usize, Option<bool>),
    /// One that was claimed is done.
    Done(usize),
}

fn note() -> impl Strategy<Value = Note> {
    let file = 0..FILES.len();
    let directory = 0..DIRECTORIES.len();
    prop_oneof![
        4 => file.clone().prop_map(Note::Open),
        4 => (file.clone(), prop_oneof![Just(None), Just(Some(1)), Just(Some(1 << 20)), Just(Some(1 << 40))])
            .prop_map(|(f, len)| Note::Close(f, len)),
        10 => (file.clone(), 0..3u64, 0..4i64, 0..3u64, 0..3u64).prop_map(|(f, l, m, s, n)| Note::Seal(f, l, m, s, n)),
        2 => (file.clone(), 0..3u64, 0..4i64, 0..3u64).prop_map(|(f, l, m, s)| Note::Durable(f, l, m, s)),
        6 => (0..3u8).prop_map(Note::Claim),
        3 => (0..8usize, prop::option::of(any::<bool>())).prop_map(|(at, log)| Note::Synced(at, log)),
        4 => (0..8usize).prop_map(Note::Done),
        5 => file.clone().prop_map(Note::Archive),
        3 => file.clone().prop_map(Note::Release),
        1 => file.clone().prop_map(Note::Stay),
        2 => (file.clone(), any::<bool>()).prop_map(|(f, b)| Note::Busy(f, b)),
        2 => (file.clone(), prop::option::of(0..20u64)).prop_map(|(f, r)| Note::Fail(f, r)),
        2 => (file.clone(), any::<bool>()).prop_map(|(f, h)| Note::Hold(f, h)),
        2 => file.clone().prop_map(Note::Remove),
        2 => (file.clone(), file.clone()).prop_map(|(a, b)| Note::Rename(a, b)),
        1 => (directory.clone(), directory).prop_map(|(a, b)| Note::RenameDirectory(a, b)),
        1 => (file.clone(), file.clone()).prop_map(|(a, b)| Note::Exchange(a, b)),
        1 => (file.clone(), file).prop_map(|(a, b)| Note::Link(a, b)),
        1 => (0..FILES.len()).prop_map(Note::Profile),
        4 => (0..FILES.len(), 0..TARGETS.len(), 0..3i64).prop_map(|(f, t, at)| Note::Says(f, t, at)),
        1 => (0..FILES.len()).prop_map(Note::SaysNothing),
        4 => (0..FILES.len()).prop_map(Note::HoldBest),
        1 => Just(Note::Retry),
        2 => (0..5u64).prop_map(Note::Later),
    ]
}

fn make(catalog: &mut Catalog, note: &Note, (start, now): (Instant, Instant)) {
    let path = |at: &usize| Path::new(FILES[*at]);
    // Files of two runs are of no lineage together.
    let of = |at: &usize, lineage: u64| lineage + if FILES[*at].starts_with("exp") { 3 } else { 0 };
    let version = |catalog: &Catalog, at: &usize| catalog.get(path(at)).map_or(0, |entry| entry.version);
    match note {
        Note::Open(f) => catalog.opened_for_writing(path(f), Instant::now()),
        Note::Close(f, len) => catalog.closed(path(f), len.map(|len| (len, now))),
        Note::Seal(f, lineage, modified, sample, step) => {
            let state = State::Sealed(sealed_at(vec![*step], of(f, *lineage), *modified, *sample));
            catalog.advance(path(f), version(catalog, f), state);
        }
        Note::Durable(f, lineage, modified, sample) => {
            catalog.advance(path(f), version(catalog, f), State::Durable(sealed(of(f, *lineage), *modified, *sample)));
        }
        Note::Archive(f) => {
            if let Some(State::Sealed(sealed)) = catalog.get(path(f)).map(|entry| entry.state.clone()) {
                catalog.advance(path(f), version(catalog, f), State::Archived(sealed, Id([1; 16])));
            }
        }
        Note::Release(f) => {
            if let Some(State::Archived(_, id)) = catalog.get(path(f)).map(|entry| entry.state.clone()) {
                catalog.advance(path(f), version(catalog, f), State::Released(id));
            }
        }
        Note::Stay(f) => {
            catalog.advance(path(f), version(catalog, f), State::Resident(ResidentReason::Small));
        }
        Note::Busy(f, busy) => drop(catalog.edit(path(f), version(catalog, f), |entry| entry.busy = *busy)),
        Note::Fail(f, retry) => {
            let retry = retry.map(|seconds| start + Duration::from_secs(seconds));
            let failed = Failed { why: f.to_string(), retry, is_passing: false };
            catalog.edit(path(f), version(catalog, f), |entry| entry.failed = Some(failed));
        }
        Note::Hold(f, hold) => {
            catalog.edit(path(f), version(catalog, f), |entry| entry.held = hold.then_some(Held::Pinned));
        }
        Note::Remove(f) => catalog.removed(path(f)),
        Note::Rename(a, b) if a != b => catalog.renamed(path(a), path(b)),
        Note::RenameDirectory(a, b) if a != b => {
            catalog.renamed(Path::new(DIRECTORIES[*a]), Path::new(DIRECTORIES[*b]));
        }
        Note::Exchange(a, b) if a != b => catalog.exchanged(path(a), path(b)),
        Note::Link(a, b) if a != b => catalog.linked(path(a), path(b)),
        Note::Profile(f) => catalog.profile_changed(path(f)),
        Note::Says(f, target, at) => {
            let names = Some(TARGETS[*target]).filter(|name| !name.is_empty());
            says(catalog, path(f), Some(&Vec::from_iter(names)), *at);
        }
        Note::SaysNothing(f) => says(catalog, path(f), None, 0),
        Note::HoldBest(f) => {
            catalog.edit(path(f), version(catalog, f), |entry| entry.held = Some(Held::Best));
        }
        Note::Unsound(f) => {
            catalog.edit(path(f), version(catalog, f), |entry| entry.unsound = matches!(entry.state, State::Sealed(_)));
        }
        Note::Retry => catalog.retry(),
        _ => {}
    }
}

/// The catalog's answers, by a scan of everything.
struct Scan<'a> {
    catalog: &'a Catalog,
    claims: &'a [Task],
    /// Files that are the best of their run.
    marks: &'a HashMap<PathBuf, Mark>,
    groups: bool,
    /// They are waited for, not only those with an essential file.
    waits: bool,
}

impl Scan<'_> {
    /// The state after one that is neither the newest of its lineage nor the highest.
    fn history(&self, entry: &Entry) -> Option<&Path> {
        let (State::Sealed(sealed) | State::Archived(sealed, _)) = &entry.state else { return None };
        let of_lineage = |other: &Entry| match &other.state {
            State::Sealed(of) if !other.unsound => {
                of.lineage == sealed.lineage && (of.len, of.sample) != (sealed.len, sealed.sample)
            }
            _ => false,
        };
        fn height(entry: &Entry) -> (&[u64], i64, u64) {
            let (modified_ns, steps, sequence) = rank(entry);
            (steps, modified_ns, sequence)
        }
        let others = || self.catalog.files().iter().filter(|(_, other)| of_lineage(other));
        let newer = others().filter(|(_, other)| rank(other) > rank(entry));
        let newer = newer.min_by(|(_, a), (_, b)| rank(a).cmp(&rank(b)));
        newer.filter(|_| others().any(|(_, other)| height(other) > height(entry))).map(|(path, _)| path)
    }

    fn is_held(&self, path: &Path, entry: &Entry) -> bool {
        entry.held.is_some_and(|held| held != Held::Best || self.marks.contains_key(path))
    }

    fn given_up(entry: &Entry) -> bool {
        entry.failed.as_ref().is_some_and(|failed| failed.retry.is_none())
    }

    fn group(&self, path: &Path) -> Option<step_pattern::Group> {
        let is_whole = self.catalog.get(path)?.state.part() == Some(Part::Whole);
        step_pattern::Group::of(path, is_whole).filter(|_| self.groups)
    }

    /// Whether the directory has more durable files than each newer one of its run.
    fn is_fullest(&self, directory: &Path) -> bool {
        let place = |directory: &Path| (step_pattern::of_directory(directory).steps, directory.to_path_buf());
        let series = |directory: &Path| step_pattern::of_directory(directory).series;
        let mut files: BTreeMap<PathBuf, usize> = BTreeMap::new();
        for (path, _) in self.catalog.files().iter().filter(|(_, entry)| entry.state.counts_as_file()) {
            step_pattern::group(path).into_iter().for_each(|of| *files.entry(of).or_default() += 1);
        }
        let is_newer = |of: &Path| series(of) == series(directory) && place(of) > place(directory);
        let own = files.get(directory).copied().unwrap_or(0);
        own > 0 && files.iter().all(|(of, count)| !is_newer(of) || *count < own)
    }

    fn is_open(&self, path: &Path) -> bool {
        let Some(group) = self.group(path) else { return true };
        if group.steps.is_none() && self.is_fullest(&group.directory) {
            return false;
        }
        let waits = self.waits && group.steps.is_none();
        let mut files = self.catalog.files().iter().filter(|(path, _)| self.group(path).as_ref() == Some(&group));
        files.all(|(path, entry)| {
            let stays = matches!(entry.state, State::Resident(_) | State::Released(_));
            let counts = !stays && !Self::given_up(entry) && !self.is_held(path, entry);
            let is_archived = matches!(entry.state, State::Archived(..));
            let is_essential = entry.state.part() != Some(Part::Other) && !is_archived;
            !counts || self.history(entry).is_some() || !waits && !is_essential
        })
    }

    /// All steps, also those under way: urgency, path, and the newer state's path.
    fn tasks(&self) -> Vec<(u8, &Path, Option<&Path>)> {
        let mut tasks = Vec::new();
        for (path, entry) in self.catalog.files().iter().filter(|(_, entry)| !Self::given_up(entry)) {
            let free = !entry.busy && !self.is_held(path, entry) && self.is_open(path);
            match &entry.state {
                State::Staged | State::Closed if entry.turn.at.is_some() => tasks.push((4, path, None)),
                State::Closed => tasks.push((0, path, None)),
                State::Archived(..) if free => tasks.push((1, path, None)),
                State::Durable(_) => tasks.push((2, path, None)),
                State::Sealed(_) if free && self.history(entry).is_some() => {
                    tasks.push((3, path, self.history(entry)));
                }
                _ => {}
            }
        }
        tasks
    }

    fn is_claimed(&self, path: &Path) -> bool {
        let sequence = self.catalog.get(path).unwrap().sequence;
        self.claims.iter().any(|claim| claim.sequence == sequence)
    }

    /// Whether a closed file may turn out to be an older state.
    fn waits_for_seals(&self, waits: impl Fn(&Path) -> bool) -> bool {
        let is_together = |claim: &Task| self.catalog.claims.is_together(claim.sequence);
        let claimed = self.claims.iter().any(|claim| matches!(claim.step, Step::Seal) && !is_together(claim));
        claimed || self.tasks().iter().any(|(urgency, path, _)| *urgency == 0 && !waits(path))
    }

    /// Whether a state of the same lineage, or with the same bytes, or with the same tensors and another name is
    /// being archived.
    fn waits_for_another(&self, path: &Path) -> bool {
        let State::Sealed(own) = &self.catalog.get(path).unwrap().state else { return false };
        let name = |path: &Path| path.file_name().unwrap().to_str().unwrap().replace(|c: char| c.is_ascii_digit(), "");
        self.claims.iter().any(|claim| match &claim.step {
            Step::Archive { sealed, .. } => {
                sealed.lineage == own.lineage
                    || (sealed.len, sealed.sample) == (own.len, own.sample)
                    || name(&claim.path) != name(path)
            }
            _ => false,
        })
    }

    fn is_any_released(&self) -> bool {
        self.claims.iter().any(|claim| matches!(claim.step, Step::Release { .. }))
    }

    /// The next one to seal, or the next other step.
    fn next(&self, now: Instant, seals: bool) -> Option<(u8, &Path, Option<&Path>)> {
        let entry = |path: &Path| self.catalog.get(path).unwrap();
        let waits = |path: &Path| entry(path).failed.as_ref().is_some_and(|f| f.retry.is_some_and(|at| at > now));
        let mut to_archive: HashMap<step_pattern::Group, usize> = HashMap::new();
        let tasks = self.tasks();
        for (_, path, _) in tasks.iter().filter(|task| task.0 == 3 && (self.is_claimed(task.1) || !waits(task.1))) {
            self.group(path).into_iter().for_each(|group| *to_archive.entry(group).or_default() += 1);
        }
        let in_group = |path: &Path| self.group(path);
        let first = |path: &Path| in_group(path).is_none_or(|group| !to_archive.contains_key(&group));
        let unsealed = self.waits_for_seals(waits);
        let tasks = tasks.into_iter().filter(|(urgency, path, _)| {
            (*urgency == 0) == seals
                && !waits(path)
                && !self.is_claimed(path)
                && *urgency != 4
                && (*urgency != 1 || first(path) && !unsealed && !self.is_any_released())
                && (*urgency != 3 || !unsealed && !self.waits_for_another(path))
        });
        tasks.min_by(|a, b| (a.0, rank(entry(a.1))).cmp(&(b.0, rank(entry(b.1)))))
    }
}

pub(super) fn claim_seal(catalog: &mut Catalog, now: Instant) -> Option<Task> {
    loop {
        match catalog.steps().claim_closed(now).0? {
            Closed::File(task) => return Some(task),
            Closed::Link(_) => catalog.steps().link_read(),
        }
    }
}

fn marks(catalog: &mut Catalog) -> HashMap<PathBuf, Mark> {
    let paths: Vec<PathBuf> = catalog.files().iter().map(|(path, _)| path.to_path_buf()).collect();
    paths.into_iter().filter_map(|path| Some((path.clone(), catalog.decided().mark(&path)?))).collect()
}

#[track_caller]
fn check(catalog: &mut Catalog, claims: &[Task], now: Instant, wall_ns: i64, (groups, waits): (bool, bool)) {
    let marks = marks(catalog);
    for seals in [true, false] {
        let task = if seals { claim_seal(catalog, now) } else { catalog.steps().claim_step(now, wall_ns).0 };
        if let Some(task) = &task {
            catalog.steps().done(task);
        }
        let found = task.map(|Task { path, step, .. }| match step {
            Step::Seal => (0, path, None),
            Step::Sync => panic!("{} waits for others", path.display()),
            Step::Release { .. } => (1, path, None),
            Step::Compare { .. } => (2, path, None),
            Step::Archive { newer, .. } => (3, path, Some(newer.0)),
        });
        let scan = Scan { catalog, claims, marks: &marks, groups, waits };
        let expected = scan
            .next(now, seals)
            .map(|(urgency, path, newer)| (urgency, path.to_path_buf(), newer.map(Path::to_path_buf)));
        assert_eq!(found, expected);
    }
    check_together(catalog, claims, now);
    let has_unsealed = catalog.steps().has_unsealed();
    let ((queued, why), oldest) = (catalog.steps().queued(), catalog.progress().2);
    let decisions: HashMap<PathBuf, Decision> = catalog
        .files()
        .iter()
        .map(|(path, _)| path.to_path_buf())
        .collect::<Vec<_>>()
        .into_iter()
        .filter_map(|path| Some((path.clone(), catalog.decided().decision(&path)?)))
        .collect();
    let scan = Scan { catalog, claims, marks: &marks, groups, waits };
    let tasks = scan.tasks();
    assert_eq!(queued, tasks.len());
    let opened = tasks.iter().map(|(_, path, _)| catalog.get(path).unwrap().opened);
    let claimed = catalog.claims.opened();
    assert_eq!(oldest, opened.chain(claimed).min());
    assert_eq!(why.is_some(), tasks.iter().any(|(_, path, _)| catalog.get(path).unwrap().failed.is_some()));
    let unsealed = |(_, entry): (_, &Entry)| match entry.state {
        State::Closed => entry.turn.at.is_none() && !Scan::given_up(entry),
        State::Durable(_) => !Scan::given_up(entry),
        _ => false,
    };
    assert_eq!(has_unsealed, catalog.files().iter().any(unsealed));
    let mut lineages: Vec<u64> = Vec::new();
    for (path, entry) in catalog.files().iter() {
        if let State::Sealed(sealed) | State::Archived(sealed, _) = &entry.state {
            lineages.push(sealed.lineage);
            assert_eq!(decisions[path].is_history, scan.history(entry).is_some(), "{}", path.display());
        }
    }
    lineages.sort_unstable();
    lineages.dedup();
    assert!(catalog.files().lineages().into_iter().eq(lineages));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]
    #[test]
    fn the_index_says_what_a_scan_says(notes in prop::collection::vec(note(), 1..80), groups in any::<bool>()) {
        let start = Instant::now();
        let mut now = start;
        let mut catalog = catalog(if groups { LONG } else { Duration::ZERO });
        let mut claims: Vec<Task> = Vec::new();
        for file in FILES {
            found(&mut catalog, file, State::Closed);
        }
        for note in &notes {
            if let Note::Later(seconds) = note {
                now += Duration::from_secs(*seconds);
            }
            match note {
                Note::Claim(0) => claims.extend(claim_seal(&mut catalog, now)),
                Note::Claim(1) => claims.extend(catalog.steps().claim_together(now).0.unwrap_or_default()),
                Note::Claim(_) => claims.extend(catalog.steps().claim_step(now, 0).0),
                Note::Synced(at, log) if !claims.is_empty() => {
                    catalog.made_durable(&claims[at % claims.len()], now, *log);
                }
                Note::Done(at) if !claims.is_empty() => catalog.steps().done(&claims.swap_remove(at % claims.len())),
                note => make(&mut catalog, note, (start, now)),
            }
            check(&mut catalog, &claims, now, 0, (groups, groups));
        }
        // In the end nothing is waited for.
        check(&mut catalog, &claims, now, i64::MAX, (groups, false));
        claims.drain(..).for_each(|claim| catalog.steps().done(&claim));
        prop_assert!(!catalog.steps().is_busy());
    }
}

/// What changes a file beside the steps of threads, and does not undo its state most often.
fn change() -> impl Strategy<Value = Note> {
    let file = 0..FILES.len();
    prop_oneof![
        2 => note(),
        1 => file.clone().prop_map(Note::Archive),
        1 => file.clone().prop_map(Note::Stay),
        1 => (file.clone(), any::<bool>()).prop_map(|(f, b)| Note::Busy(f, b)),
        1 => (file.clone(), prop::option::of(0..20u64)).prop_map(|(f, r)| Note::Fail(f, r)),
        1 => (file.clone(), any::<bool>()).prop_map(|(f, h)| Note::Hold(f, h)),
        1 => file.clone().prop_map(Note::Unsound),
        1 => (file, 0..TARGETS.len(), 0..3i64).prop_map(|(f, t, at)| Note::Says(f, t, at)),
        1 => Just(Note::Retry),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]
    /// Threads take all steps that are left by one decision, while the other catalog decides after each. Each step must be
    /// one that is possible by the newest decision, too, and there must be one if that one has some. Two states with the same
    /// bytes lose nothing when the states between them are gone, and only a new decision minds that.
    #[test]
    fn a_decision_that_stands_offers_what_a_new_one_would(
        states in prop::collection::vec((0..2u64, 0..9i64, 0..9u64, 0..9u64), FILES.len()),
        notes in prop::collection::vec((change(), 0..3usize), 1..40), groups in any::<bool>(), twins in any::<bool>()
    ) {
        let start = Instant::now();
        let (mut now, settle) = (start, if groups { LONG } else { Duration::ZERO });
        let (mut standing, mut fresh) = (catalog(settle), catalog(settle));
        // No number of steps makes it decide again.
        standing.files.part = 0;
        for file in FILES {
            [&mut standing, &mut fresh].into_iter().for_each(|catalog| found(catalog, file, State::Closed));
        }
        let seal = |(file, of): (usize, &(u64, i64, u64, u64))| (Note::Seal(file, of.0, of.1, of.2, of.3), 0);
        let seals: Vec<(Note, usize)> = states.iter().enumerate().map(seal).collect();
        for (number, (note, steps)) in seals.iter().chain(&notes).enumerate() {
            let note = &match *note {
                Note::Seal(f, l, m, _, s) if !twins => Note::Seal(f, l, m, 1000 + number as u64, s),
                Note::Durable(f, l, m, _) if !twins => Note::Durable(f, l, m, 1000 + number as u64),
                ref note => note.clone(),
            };
            if let Note::Later(seconds) = note {
                now += Duration::from_secs(*seconds);
            }
            for catalog in [&mut standing, &mut fresh] {
                make(catalog, note, (start, now));
                // Links are read first.
                claim_seal(catalog, now).iter().for_each(|task| catalog.steps().done(task));
            }
            for _ in 0..*steps {
                let task = standing.steps().claim_step(now, 0).0;
                let marks = marks(&mut fresh);
                prop_assert_eq!(self::marks(&mut standing), marks.clone());
                let _ = fresh.steps().claim_step(now, 0).0.map(|task| fresh.steps().done(&task));
                let scan = Scan { catalog: &fresh, claims: &[], marks: &marks, groups, waits: groups };
                let is_next = scan.next(now, false).is_some();
                prop_assert!(task.is_some() == is_next || twins && !is_next, "{:?}", task);
                let Some(task) = task else { break };
                standing.steps().done(&task);
                let state = match (&task.step, fresh.get(&task.path).unwrap().state.clone()) {
                    (Step::Release { .. }, State::Archived(_, object)) => State::Released(object),
                    (Step::Compare { sealed }, _) => State::Sealed(Arc::clone(sealed)),
                    (Step::Archive { sealed, newer }, _) => {
                        prop_assert!(fresh.get(&newer.0).is_some_and(Entry::counts_as_newer));
                        State::Archived(Arc::clone(sealed), Id([1; 16]))
                    }
                    (step, state) => panic!("{step:?} of {state:?}"),
                };
                let is_possible = scan.tasks().iter().any(|(_, path, _)| *path == task.path);
                prop_assert!(is_possible || twins, "{:?}", task);
                [&mut standing, &mut fresh].into_iter().for_each(|catalog| {
                    catalog.advance(&task.path, task.version, state.clone());
                });
            }
        }
    }
}

#[test]
fn a_backlog_is_decided_about_a_few_times() {
    let mut catalog = catalog(LONG);
    let files = 2000;
    for step in 0..files {
        found(&mut catalog, state(step), State::Sealed(sealed_at(vec![step], 1, step as i64, step)));
    }
    let (mut steps, now) = (0, Instant::now());
    while let Some(task) = catalog.steps().claim_step(now, 0).0 {
        catalog.steps().done(&task);
        let state = match task.step {
            Step::Archive { sealed, .. } => State::Archived(sealed, Id([1; 16])),
            _ => State::Released(Id([1; 16])),
        };
        catalog.advance(&task.path, task.version, state);
        steps += 1;
    }
    assert_eq!(steps, 2 * (files - 1));
    let decisions = catalog.files.decisions;
    assert!(decisions <= 2 * 64 + 3, "{decisions} decisions");
}

#[test]
fn another_profile_undoes_what_was_archived_for_the_old_one() {
    let mut catalog = catalog(LONG);
    let name = |n: usize| PathBuf::from(format!("run/step_{n}"));
    let id = Id([1; 16]);
    let states = [
        State::Archived(sealed(1, 1, 1), id),
        State::Archived(Arc::new(Sealed { copy: true, ..Sealed::clone(&sealed(1, 2, 2)) }), id),
        State::Released(id),
        State::Sealed(sealed(1, 4, 4)),
    ];
    states.into_iter().enumerate().for_each(|(n, state)| found(&mut catalog, name(n), state));
    let versions = |catalog: &Catalog| [0, 1, 2, 3].map(|n| catalog.get(&name(n)).unwrap().version);
    let before = versions(&catalog);
    catalog.profile_changed(Path::new("elsewhere"));
    assert_eq!(versions(&catalog), before);
    catalog.profile_changed(Path::new("run"));
    let after = versions(&catalog);
    assert_eq!([0, 1, 2, 3].map(|n| after[n] == before[n]), [false, true, true, false]);
    assert!(matches!(catalog.get(&name(0)).unwrap().state, State::Sealed(_)));
    assert!(matches!(catalog.get(&name(1)).unwrap().state, State::Archived(..)));
}

/// A file that was alone in its run when it was read shares its checkpoint with the files that come later.
#[test]
fn a_lone_file_that_was_read_is_of_one_checkpoint_with_the_next() {
    let mut catalog = catalog(LONG);
    let [first, second, next] = ["run/checkpoint-1/a", "run/checkpoint-1/b", "run/checkpoint-2/a"].map(Path::new);
    found(&mut catalog, first, State::Sealed(sealed(1, 1, 1)));
    catalog.closed(first, None);
    found(&mut catalog, second, State::Sealed(sealed(2, 2, 2)));
    found(&mut catalog, next, State::Sealed(sealed(1, 3, 3)));
    let step = catalog.steps().claim_step(Instant::now(), 0).0.map(|task| task.path);
    assert!(step.is_none(), "a file goes before the rest of its checkpoint: {step:?}");
}

#[test]
fn the_highest_step_stays_beside_the_newest_until_a_higher_one_is_there() {
    let mut catalog = catalog(Duration::ZERO);
    let name = |step: u64| PathBuf::from(format!("run/step_{step}.pt"));
    let found = |catalog: &mut Catalog, step: u64, modified_ns: i64| {
        found(catalog, name(step), State::Sealed(sealed_at(vec![step], 1, modified_ns, step)));
    };
    let history = |catalog: &mut Catalog, step: u64| catalog.decided().decision(&name(step)).unwrap().is_history;
    // Resumed from step 60.
    [(60, 1), (120, 2), (140, 3), (64, 4)].into_iter().for_each(|(step, at)| found(&mut catalog, step, at));
    assert_eq!([60, 120, 140, 64].map(|step| history(&mut catalog, step)), [true, true, false, false]);
    found(&mut catalog, 68, 5);
    assert_eq!([64, 140, 68].map(|step| history(&mut catalog, step)), [true, false, false]);
    // The run has caught up, then its last state goes.
    found(&mut catalog, 144, 6);
    assert_eq!([140, 68, 144].map(|step| history(&mut catalog, step)), [true, true, false]);
    catalog.removed(&name(144));
    assert_eq!([140, 68].map(|step| history(&mut catalog, step)), [false, false]);
}

/// A, B, and A again: while B is on its way too, the older A may go, since the newest state has its bytes.
#[test]
fn a_state_with_the_newest_ones_bytes_goes_before_those_between() {
    let mut catalog = catalog(Duration::ZERO);
    let name = |n: usize| PathBuf::from(format!("run/step_{n}"));
    let may_go = |catalog: &mut Catalog, n: usize| catalog.decided().decision(&name(n)).unwrap().may_go;
    let (first, between, last) = (sealed(1, 1, 1), sealed(1, 2, 2), sealed(1, 3, 1));
    found(&mut catalog, name(1), State::Archived(Arc::clone(&first), Id([1; 16])));
    found(&mut catalog, name(2), State::Archived(Arc::clone(&between), Id([2; 16])));
    assert!(!may_go(&mut catalog, 1), "nothing newer stays");
    found(&mut catalog, name(3), State::Sealed(last));
    assert!(may_go(&mut catalog, 1) && may_go(&mut catalog, 2));
    // A copy of the newest state is no history.
    catalog.removed(&name(2));
    assert!(!may_go(&mut catalog, 1));
}

/// A thread still compares the file's former content: nothing is archived until the file is sealed, too.
#[test]
fn a_file_that_is_closed_during_a_step_counts_as_closed() {
    let mut catalog = catalog(Duration::ZERO);
    let name = |n: usize| PathBuf::from(format!("run/step_{n}"));
    found(&mut catalog, name(1), State::Sealed(sealed(1, 1, 1)));
    found(&mut catalog, name(2), State::Sealed(sealed(1, 2, 2)));
    found(&mut catalog, name(3), State::Durable(sealed(1, 3, 3)));
    let now = Instant::now();
    let task = catalog.steps().claim_step(now, 0).0.unwrap();
    assert!(matches!(task.step, Step::Compare { .. }));
    catalog.opened_for_writing(&name(3), Instant::now());
    catalog.closed(&name(3), Some((1 << 20, now)));
    assert!(catalog.steps().claim_step(now, 0).0.is_none() && catalog.steps().may_learn());
    catalog.steps().done(&task);
    assert!(matches!(claim_seal(&mut catalog, now).unwrap().step, Step::Seal));
}

/// Files wait for each other, but none for longer than a moment, and none that may be a checkpoint.
#[track_caller]
fn check_together(catalog: &mut Catalog, claims: &[Task], now: Instant) {
    let waits = |entry: &Entry| entry.failed.as_ref().is_some_and(|f| f.retry.is_none_or(|at| at > now));
    let claimed = |entry: &Entry| claims.iter().any(|claim| claim.sequence == entry.sequence);
    let joins = |entry: &Entry| entry.turn.at.is_some() && matches!(entry.state, State::Staged | State::Closed);
    let offered = |(_, entry): &(&Path, &Entry)| joins(entry) && !waits(entry) && !claimed(entry);
    let mut expected: Vec<PathBuf> =
        catalog.files().iter().filter(offered).map(|(path, _)| path.to_path_buf()).collect();
    let first = catalog.files().iter().filter(offered).filter_map(|(_, entry)| entry.turn.at).min();
    if first.is_none_or(|at| at > now) {
        expected.clear();
    }
    let latest = now.max(Instant::now()) + MOMENT;
    assert!(catalog.files().iter().filter(offered).all(|(_, entry)| entry.turn.at <= Some(latest)));
    let (tasks, again) = catalog.steps().claim_together(now);
    let tasks = tasks.unwrap_or_default();
    tasks.iter().for_each(|task| catalog.steps().done(task));
    assert!(first.is_none() || !tasks.is_empty() || again.is_some(), "nobody would look again");
    let mut found: Vec<PathBuf> = tasks.into_iter().map(|task| task.path).collect();
    found.sort_unstable();
    assert_eq!(found, expected);
}

/// A log is closed a thousand times a second: each close takes the turn of the first close that is not durable.
#[test]
fn a_file_that_is_written_again_and_again_does_not_wait_longer() {
    let mut catalog = catalog(Duration::ZERO);
    let (log, start) = (Path::new("run/log.txt"), Instant::now());
    let at = |millis: u64| start + Duration::from_millis(millis);
    let together = |catalog: &mut Catalog, millis: u64| {
        catalog.steps().claim_together(at(millis)).0.map(|mut tasks| tasks.remove(0))
    };
    for millis in 0..250 {
        assert!(together(&mut catalog, millis).is_none());
        catalog.opened_for_writing(log, Instant::now());
        catalog.closed(log, Some((100, at(millis))));
        assert!(
            !catalog.steps().has_unsealed()
                && !catalog.steps().may_learn()
                && catalog.steps().has_unsealed_since(u64::MAX)
        );
    }
    // It is open just when its turn comes.
    catalog.opened_for_writing(log, Instant::now());
    let task = together(&mut catalog, 250).unwrap();
    assert!(matches!(task.step, Step::Sync));
    // It is closed while it is being made durable: that is another turn, from when this one began.
    catalog.closed(log, Some((100, at(251))));
    catalog.made_durable(&task, at(250), None);
    catalog.steps().done(&task);
    assert!(together(&mut catalog, 499).is_none());
    let task = together(&mut catalog, 500).unwrap();
    assert!(matches!(task.step, Step::Seal));
    catalog.steps().done(&task);
    // A large file waits for nobody, but if it was no checkpoint and is written again at once.
    let mut close = |millis: u64, len: u64| {
        catalog.opened_for_writing(log, Instant::now());
        catalog.closed(log, Some((len, at(millis))));
        claim_seal(&mut catalog, at(millis)).inspect(|task| {
            catalog.made_durable(task, at(millis), Some(true));
            catalog.steps().done(task);
        })
    };
    assert!(close(600, 1 << 20).is_some());
    assert!(close(700, 1 << 20).is_none() && close(700, 1 << 30).is_some());
    assert!(close(1000, 1 << 20).is_some());
}

/// A file that may name the best of a run is looked at as soon as it is closed.
#[test]
fn a_file_that_may_speak_waits_for_nobody() {
    let mut catalog = catalog(Duration::ZERO);
    let now = Instant::now();
    for name in ["run/checkpoint-1/trainer_state.json", "run/last.ckpt"] {
        catalog.opened_for_writing(Path::new("new"), Instant::now());
        catalog.closed(Path::new("new"), Some((10, now)));
        assert!(claim_seal(&mut catalog, now).is_none() && !catalog.steps().may_learn());
        catalog.renamed(Path::new("new"), Path::new(name));
        assert!(catalog.steps().may_learn());
        let task = claim_seal(&mut catalog, now).unwrap();
        catalog.steps().done(&task);
        catalog.removed(Path::new(name));
        catalog.opened_for_writing(Path::new(name), Instant::now());
        catalog.closed(Path::new(name), Some((10, now)));
        let task = claim_seal(&mut catalog, now).unwrap();
        catalog.steps().done(&task);
        catalog.removed(Path::new(name));
    }
}

fn state(step: u64) -> PathBuf {
    PathBuf::from(format!("run/checkpoint-{step}/trainer_state.json"))
}

/// The files of a run of checkpoints that are marked.
fn named(catalog: &mut Catalog) -> Vec<String> {
    let mut named: Vec<_> = marks(catalog).into_keys().map(|path| path.to_str().unwrap().to_string()).collect();
    named.sort_unstable();
    named
}

fn with_files(names: &[&str]) -> Catalog {
    let mut catalog = catalog(LONG);
    names.iter().for_each(|name| found(&mut catalog, name, State::Sealed(sealed(0, 1, 1))));
    (90..93).for_each(|step| found(&mut catalog, state(step), State::Resident(ResidentReason::Small)));
    catalog
}

#[test]
fn the_newest_statement_of_a_run_counts() {
    let mut catalog =
        with_files(&["run/checkpoint-10/a", "run/checkpoint-91/a", "other/checkpoint-91/a", "run/trainer_state.json"]);
    says(&mut catalog, &state(90), Some(&["/mnt/elsewhere/run/checkpoint-10"]), 1);
    assert_eq!(named(&mut catalog), ["run/checkpoint-10/a"]);
    says(&mut catalog, &state(91), Some(&["checkpoint-91"]), 2);
    let best = ["run/checkpoint-91/a", "run/checkpoint-91/trainer_state.json"];
    assert_eq!(named(&mut catalog), best);
    let by = catalog.decided().named_by(Path::new(best[0]));
    assert_eq!(by.as_deref(), Some(&*state(91)));
    // An older statement that is read later changes nothing. One that names no file does.
    says(&mut catalog, &state(92), Some(&["run/checkpoint-10"]), 1);
    assert_eq!(named(&mut catalog), best);
    let last = Path::new("run/trainer_state.json");
    says(&mut catalog, last, Some(&[]), 3);
    assert_eq!(named(&mut catalog), [""; 0]);
    says(&mut catalog, last, None, 3);
    assert_eq!(named(&mut catalog), best);
}

#[test]
fn a_run_keeps_its_best_when_the_statement_goes() {
    let mut catalog = with_files(&["run/checkpoint-10/a", "run/checkpoint-20/a"]);
    let (first, second) = (["run/checkpoint-10/a"], ["run/checkpoint-20/a"]);
    says(&mut catalog, &state(90), Some(&["checkpoint-10"]), 1);
    says(&mut catalog, &state(91), Some(&["checkpoint-20"]), 2);
    catalog.removed(&state(91));
    assert_eq!(named(&mut catalog), first);
    catalog.removed(&state(90));
    assert_eq!(named(&mut catalog), first, "the last one stays");
    catalog.renamed(Path::new("run"), Path::new("kept/run"));
    assert_eq!(named(&mut catalog), ["kept/run/checkpoint-10/a"], "under each name of the run");
    catalog.renamed(Path::new("kept/run"), Path::new("run"));
    says(&mut catalog, &state(92), Some(&["checkpoint-20"]), 1);
    assert_eq!(named(&mut catalog), second);
    // While a program writes the file again, it counts.
    catalog.opened_for_writing(&state(92), Instant::now());
    assert_eq!(named(&mut catalog), second);
}

#[test]
fn a_statement_in_the_trash_is_one_that_went() {
    let mut catalog = with_files(&["run/checkpoint-10/a", "run/checkpoint-20/a"]);
    let trashed = |step| Path::new(TRASH).join("0/2026-11-28_15-26").join(state(step));
    says(&mut catalog, &state(90), Some(&["checkpoint-10"]), 1);
    says(&mut catalog, &state(91), Some(&["checkpoint-20"]), 2);
    catalog.renamed(&state(91), &trashed(91));
    assert_eq!(named(&mut catalog), ["run/checkpoint-10/a"]);
    catalog.renamed(&state(90), &trashed(90));
    assert_eq!(named(&mut catalog), ["run/checkpoint-10/a"], "the last one stays");
    catalog.removed(&trashed(90));
    assert_eq!(named(&mut catalog), ["run/checkpoint-10/a"]);
}

#[test]
fn statements_and_links_go_with_their_directory() {
    let mut catalog = with_files(&["run/checkpoint-10/a", "run/step_3.pt"]);
    says(&mut catalog, &state(90), Some(&["run/checkpoint-10"]), 1);
    catalog.link_read(Path::new("run/best.pt"), Some("run/step_3.pt".into()));
    assert_eq!(named(&mut catalog), ["run/checkpoint-10/a", "run/step_3.pt"]);
    catalog.renamed(Path::new("run"), Path::new("kept/run2"));
    assert_eq!(named(&mut catalog), ["kept/run2/checkpoint-10/a"]);
    // The link is read again under both names.
    let links = std::iter::from_fn(|| match catalog.steps().claim_closed(Instant::now()).0 {
        Some(Closed::Link(path)) => Some(path),
        _ => None,
    });
    assert_eq!(links.collect::<Vec<_>>(), ["kept/run2", "kept/run2/best.pt", "run/best.pt"].map(PathBuf::from));
}

#[test]
fn a_mirror_hears_of_a_file_that_is_named_the_best_since() {
    let mut catalog = with_files(&["run/step_1.pt", "run/step_2.pt"]);
    catalog.decided().touched().take();
    let best = Path::new("run/step_2.pt");
    for target in [Some(best.to_path_buf()), None] {
        assert_eq!(catalog.decided().mark(best).is_some(), target.is_none());
        catalog.decided().touched().take();
        catalog.link_read(Path::new("run/best.pt"), target);
        assert!(catalog.decided().decision(best).is_some());
        let touched: Vec<_> = catalog.decided().touched().take().into_iter().collect();
        assert_eq!(touched, [Arc::from(best)]);
    }
}

#[test]
fn files_in_one_directory_are_one_series_by_their_names() {
    let names = ["a/epoch=0-step=20.ckpt", "a/epoch=1-step=40.ckpt", "a/epoch=2-step=60.ckpt", "a/last.ckpt"];
    let mut catalog = with_files(&names);
    let [zero, one, two, last] = names.map(Path::new);
    says(&mut catalog, zero, Some(&["/x/epoch=0-step=20.ckpt"]), 1);
    says(&mut catalog, one, Some(&["/x/epoch=1-step=40.ckpt"]), 2);
    says(&mut catalog, last, Some(&["/x/epoch=0-step=20.ckpt"]), 1);
    assert_eq!(named(&mut catalog), names[..2]);
    says(&mut catalog, last, Some(&["/x/epoch=1-step=40.ckpt"]), 3);
    assert_eq!(named(&mut catalog), names[1..2]);
    // A path outside cannot be meant.
    says(&mut catalog, last, Some(&["/x/.."]), 4);
    says(&mut catalog, two, Some(&[""]), 4);
    assert_eq!(named(&mut catalog), [""; 0]);
}

/// An index and two files with tensors, of two saves.
#[test]
fn a_save_counts_once_it_is_finished() {
    let mut catalog = catalog(Duration::ZERO);
    let names = ["x_1/.metadata", "x_1/__0_0.distcp", "x_1/__1_0.distcp"].map(PathBuf::from);
    let siblings =
        Arc::new(Siblings { index: names[0].clone(), files: names[1..].iter().map(|n| (n.clone(), 8)).collect() });
    let mut seal = |file: usize, (modified_ns, born_ns, len): (i64, i64, u64)| {
        let stamp = Stamp { len, modified_ns, born_ns };
        let state = match file {
            0 => State::Resident(ResidentReason::Small),
            _ => {
                let siblings = Some(Arc::clone(&siblings));
                State::Sealed(Arc::new(Sealed { siblings, ..Sealed::clone(&sealed(file as u64, modified_ns, 1)) }))
            }
        };
        catalog.found(&names[file], state, (stamp, None), None);
        let unfinished = |name: &PathBuf| Some(catalog.decided().decision(name)?.is_unfinished);
        names[1..].iter().filter_map(unfinished).collect::<Vec<_>>()
    };
    assert_eq!(seal(1, (5, 5, 8)), [true]);
    assert_eq!(seal(2, (5, 5, 8)), [true, true], "the index is missing");
    assert_eq!(seal(0, (6, 6, 8)), [false, false]);
    assert_eq!(seal(2, (7, 5, 8)), [true, true], "one was written over");
    assert_eq!(seal(2, (7, 7, 8)), [true, true], "one is of a later save");
    assert_eq!(seal(1, (7, 7, 8)), [false, false], "a copy that got the index first");
    assert_eq!(seal(1, (7, 7, 7)), [true, true], "one is too short");
}

/// It would wait for the year to pass again.
#[test]
fn a_clock_that_is_set_back_holds_nothing_up() {
    const SECOND: i64 = 1_000_000_000;
    const YEAR: i64 = 365 * 24 * 3600 * SECOND;
    let mut catalog = catalog(Duration::from_secs(600));
    let (now, wall) = (Instant::now(), crate::clock::wall_ns());
    // The first one's second file gets no newer state.
    for (time, path, lineage) in
        [(1, "checkpoint-1/a", 1), (2, "checkpoint-1/b", 0), (3, "checkpoint-2/a", 1), (4, "checkpoint-2/c", 3)]
    {
        found(&mut catalog, path, State::Sealed(sealed(lineage, wall + YEAR + time, time as u64)));
    }
    let mut claim = |wall: i64| catalog.steps().claim_step(now, wall).0.map(|task| task.path);
    assert_eq!(claim(wall + SECOND), None);
    assert_eq!(claim(wall - YEAR), None, "ten minutes are not over");
    assert_eq!(claim(wall - YEAR + 590 * SECOND), None);
    assert_eq!(claim(wall - YEAR + 601 * SECOND).unwrap(), Path::new("checkpoint-1/a"));
}

#[test]
fn below_the_reserve_only_a_wait_with_a_promise_is_left() {
    let wall = crate::clock::wall_ns();
    // In the first directory `b` gets no newer state. Nobody needs a file of lineage 0; one of lineage 1 is a whole state.
    for (of_b, is_promised) in [(0, false), (1, true)] {
        let mut catalog = catalog(Duration::from_secs(600));
        for (time, path, lineage) in
            [(1, "checkpoint-1/a", 5), (2, "checkpoint-1/b", of_b), (3, "checkpoint-2/a", 5), (4, "checkpoint-2/c", 3)]
        {
            found(&mut catalog, path, State::Sealed(sealed(lineage, wall + time, time as u64)));
        }
        let claim = |catalog: &mut Catalog| {
            let (task, _) = catalog.steps().claim_step(Instant::now(), wall + 1_000_000_000);
            task.inspect(|task| catalog.steps().done(task)).map(|task| task.path)
        };
        assert_eq!(claim(&mut catalog), None, "it waits for its checkpoint");
        catalog.decided().hurry(true);
        assert_eq!(claim(&mut catalog).is_none(), is_promised);
        catalog.decided().hurry(false);
        assert_eq!(claim(&mut catalog), None, "there is room again");
    }
}

#[test]
fn small_files_are_not_decided_about_before_somebody_asks() {
    let mut catalog = catalog(LONG);
    let names: Vec<PathBuf> = (0..300).map(|at| format!("log-{at}.json").into()).collect();
    for name in &names {
        found(&mut catalog, name, State::Resident(ResidentReason::Small));
    }
    assert_eq!(super::files::void(&catalog.files), 1, "nothing is to be archived");
    assert!(catalog.steps().claim_step(Instant::now(), 0).0.is_none());
    assert_eq!(super::files::void(&catalog.files), 1, "nothing is to be archived");
    assert!(catalog.decided().decision(&names[7]).is_some());
    assert_eq!(super::files::void(&catalog.files), 0, "somebody asked");
    // A state beside them has its steps at once.
    found(&mut catalog, "step_1.pt", State::Sealed(sealed(1, 1, 1)));
    found(&mut catalog, "step_2.pt", State::Sealed(sealed(1, 2, 2)));
    assert_eq!(catalog.steps().claim_step(Instant::now(), 0).0.unwrap().path, Path::new("step_1.pt"));
}
