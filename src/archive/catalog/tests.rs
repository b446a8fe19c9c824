//! The decisions and the choice among them against a scan of all entries.

use std::collections::{BTreeMap, HashMap};
use std::time::Instant;

use proptest::prelude::*;

use super::queue::tests::check_together;
use super::*;
use crate::archive::FileId;
use crate::archive::decide::rank;
use crate::archive::resident::ResidentReason;
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
        copy: false,
    })
}

pub(super) fn no_objects() -> Objects {
    let dir = tempfile::tempdir().unwrap();
    Objects::load(dir.path(), |_, _| {}).unwrap()
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

fn make(catalog: &mut Catalog, note: &Note, (start, now): (Instant, Instant), objects: &Objects) {
    let path = |at: &usize| Path::new(FILES[*at]);
    // Files of two runs are of no lineage together.
    let of = |at: &usize, lineage: u64| lineage + if FILES[*at].starts_with("exp") { 3 } else { 0 };
    let version = |catalog: &Catalog, at: &usize| catalog.get(path(at)).map_or(0, |entry| entry.version);
    match note {
        Note::Open(f) => catalog.opened_for_writing(path(f), objects),
        Note::Close(f, len) => catalog.closed(path(f), len.map(|len| (len, now)), objects),
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
        Note::Busy(f, busy) => catalog.set_busy(path(f), version(catalog, f), *busy),
        Note::Fail(f, retry) => {
            let retry = retry.map(|seconds| start + Duration::from_secs(seconds));
            catalog.set_failed(path(f), version(catalog, f), Failed { why: f.to_string(), retry, is_passing: false });
        }
        Note::Hold(f, hold) => {
            catalog.edit(path(f), version(catalog, f), |entry| entry.held = hold.then_some(Held::Pinned));
        }
        Note::Remove(f) => catalog.removed(path(f), objects),
        Note::Rename(a, b) if a != b => catalog.renamed(path(a), path(b), objects),
        Note::RenameDirectory(a, b) if a != b => {
            catalog.renamed(Path::new(DIRECTORIES[*a]), Path::new(DIRECTORIES[*b]), objects);
        }
        Note::Exchange(a, b) if a != b => catalog.exchanged(path(a), path(b), objects),
        Note::Link(a, b) if a != b => catalog.linked(path(a), path(b), objects),
        Note::Profile(f) => catalog.profile_changed(path(f), objects),
        Note::Says(f, target, at) => {
            let says =
                Says::Best(Some(TARGETS[*target].to_string()).filter(|name| !name.is_empty()).into_iter().collect());
            catalog.says(path(f), Some((says, *at)));
        }
        Note::SaysNothing(f) => drop(catalog.says(path(f), None)),
        Note::HoldBest(f) if catalog.named_best_by(path(f)).is_some() => {
            catalog.hold(path(f), version(catalog, f), Some(Held::Best));
        }
        Note::Retry => catalog.retry(),
        _ => {}
    }
}

/// The catalog's answers, by a scan of everything.
struct Scan<'a> {
    catalog: &'a Catalog,
    claims: &'a [Task],
    groups: bool,
    /// They are waited for, not only those with an essential file.
    waits: bool,
}

impl Scan<'_> {
    /// The state after one that is neither the newest of its lineage nor the highest.
    fn history(&self, entry: &Entry) -> Option<&Path> {
        let (State::Sealed(sealed) | State::Archived(sealed, _)) = &entry.state else { return None };
        let of_lineage = |other: &Entry| match &other.state {
            State::Sealed(of) => of.lineage == sealed.lineage && (of.len, of.sample) != (sealed.len, sealed.sample),
            _ => false,
        };
        fn height(entry: &Entry) -> (&[u64], i64, u64) {
            let (modified_ns, steps, sequence) = rank(entry);
            (steps, modified_ns, sequence)
        }
        let others = || self.catalog.entries().filter(|(_, other)| of_lineage(other));
        let newer = others().filter(|(_, other)| rank(other) > rank(entry));
        let newer = newer.min_by(|(_, a), (_, b)| rank(a).cmp(&rank(b)));
        newer.filter(|_| others().any(|(_, other)| height(other) > height(entry))).map(|(path, _)| path)
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
        for (path, _) in self.catalog.entries().filter(|(_, entry)| entry.state.counts_as_file()) {
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
        let mut files = self.catalog.entries().filter(|(path, _)| self.group(path).as_ref() == Some(&group));
        files.all(|(_, entry)| {
            let stays = matches!(entry.state, State::Resident(_) | State::Released(_));
            let counts = !stays && !Self::given_up(entry) && entry.held.is_none();
            let is_archived = matches!(entry.state, State::Archived(..));
            let is_essential = entry.state.part() != Some(Part::Other) && !is_archived;
            !counts || self.history(entry).is_some() || !waits && !is_essential
        })
    }

    /// All steps, also those under way: urgency, path, and the newer state's path.
    fn tasks(&self) -> Vec<(u8, &Path, Option<&Path>)> {
        let mut tasks = Vec::new();
        for (path, entry) in self.catalog.entries().filter(|(_, entry)| !Self::given_up(entry)) {
            let free = !entry.busy && entry.held.is_none() && self.is_open(path);
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
    while catalog.claim_link().is_some() {
        catalog.link_read();
    }
    catalog.claim_closed(now).0.map(|closed| match closed {
        Closed::File(task) => task,
        Closed::Link(path) => panic!("{} was looked at", path.display()),
    })
}

#[track_caller]
fn check(catalog: &mut Catalog, claims: &[Task], now: Instant, wall_ns: i64, (groups, waits): (bool, bool)) {
    for seals in [true, false] {
        let task = if seals { claim_seal(catalog, now) } else { catalog.claim_step(now, wall_ns).0 };
        if let Some(task) = &task {
            catalog.done(task);
        }
        let found = task.map(|Task { path, step, .. }| match step {
            Step::Seal => (0, path, None),
            Step::Sync => panic!("{} waits for others", path.display()),
            Step::Release { .. } => (1, path, None),
            Step::Compare { .. } => (2, path, None),
            Step::Archive { newer, .. } => (3, path, Some(newer.0)),
        });
        let scan = Scan { catalog, claims, groups, waits };
        let expected = scan
            .next(now, seals)
            .map(|(urgency, path, newer)| (urgency, path.to_path_buf(), newer.map(Path::to_path_buf)));
        assert_eq!(found, expected);
    }
    check_together(catalog, claims, now);
    let ((queued, why), oldest) = (catalog.queued(), catalog.progress().2);
    let decisions: HashMap<PathBuf, Decision> = catalog
        .entries()
        .map(|(path, _)| path.to_path_buf())
        .collect::<Vec<_>>()
        .into_iter()
        .filter_map(|path| Some((path.clone(), catalog.decision(&path)?)))
        .collect();
    let scan = Scan { catalog, claims, groups, waits };
    let tasks = scan.tasks();
    assert_eq!(queued, tasks.len());
    let opened = tasks.iter().map(|(_, path, _)| catalog.get(path).unwrap().opened);
    assert_eq!(oldest, opened.chain(catalog.claims.opened()).min());
    assert_eq!(why.is_some(), tasks.iter().any(|(_, path, _)| catalog.get(path).unwrap().failed.is_some()));
    let unsealed = |(_, entry): (_, &Entry)| match entry.state {
        State::Closed => entry.turn.at.is_none() && !Scan::given_up(entry),
        State::Durable(_) => !Scan::given_up(entry),
        _ => false,
    };
    assert_eq!(catalog.has_unsealed(), catalog.entries().any(unsealed));
    for (path, entry) in catalog.entries().filter(|(_, entry)| entry.held == Some(Held::Best)) {
        assert!(catalog.named_best_by(path).is_some(), "{} is held for nothing: {entry:?}", path.display());
    }
    let mut lineages: Vec<u64> = Vec::new();
    for (path, entry) in catalog.entries() {
        if let State::Sealed(sealed) | State::Archived(sealed, _) = &entry.state {
            lineages.push(sealed.lineage);
            assert_eq!(decisions[path].is_history, scan.history(entry).is_some(), "{}", path.display());
        }
    }
    lineages.sort_unstable();
    lineages.dedup();
    assert!(catalog.lineages().into_iter().eq(lineages));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]
    #[test]
    fn the_index_says_what_a_scan_says(notes in prop::collection::vec(note(), 1..80), groups in any::<bool>()) {
        let objects = no_objects();
        let start = Instant::now();
        let mut now = start;
        let mut catalog = Catalog::new(if groups { LONG } else { Duration::ZERO });
        let mut claims: Vec<Task> = Vec::new();
        for file in FILES {
            catalog.found(PathBuf::from(file), State::Closed);
        }
        for note in &notes {
            if let Note::Later(seconds) = note {
                now += Duration::from_secs(*seconds);
            }
            match note {
                Note::Claim(0) => claims.extend(claim_seal(&mut catalog, now)),
                Note::Claim(1) => claims.extend(catalog.claim_together(now).0.unwrap_or_default()),
                Note::Claim(_) => claims.extend(catalog.claim_step(now, 0).0),
                Note::Synced(at, log) if !claims.is_empty() => {
                    catalog.made_durable(&claims[at % claims.len()], now, *log);
                }
                Note::Done(at) if !claims.is_empty() => catalog.done(&claims.swap_remove(at % claims.len())),
                note => make(&mut catalog, note, (start, now), &objects),
            }
            check(&mut catalog, &claims, now, 0, (groups, groups));
        }
        // In the end nothing is waited for.
        check(&mut catalog, &claims, now, i64::MAX, (groups, false));
        claims.drain(..).for_each(|claim| catalog.done(&claim));
        prop_assert!(!catalog.is_busy());
    }
}

#[test]
fn another_profile_undoes_what_was_archived_for_the_old_one() {
    let (mut catalog, objects) = (Catalog::new(LONG), no_objects());
    let name = |n: usize| PathBuf::from(format!("run/step_{n}"));
    let id = Id([1; 16]);
    let states = [
        State::Archived(sealed(1, 1, 1), id),
        State::Archived(Arc::new(Sealed { copy: true, ..Sealed::clone(&sealed(1, 2, 2)) }), id),
        State::Released(id),
        State::Sealed(sealed(1, 4, 4)),
    ];
    states.into_iter().enumerate().for_each(|(n, state)| catalog.found(name(n), state));
    let versions = |catalog: &Catalog| [0, 1, 2, 3].map(|n| catalog.get(&name(n)).unwrap().version);
    let before = versions(&catalog);
    catalog.profile_changed(Path::new("elsewhere"), &objects);
    assert_eq!(versions(&catalog), before);
    catalog.profile_changed(Path::new("run"), &objects);
    let after = versions(&catalog);
    assert_eq!([0, 1, 2, 3].map(|n| after[n] == before[n]), [false, true, true, false]);
    assert!(matches!(catalog.get(&name(0)).unwrap().state, State::Sealed(_)));
    assert!(matches!(catalog.get(&name(1)).unwrap().state, State::Archived(..)));
}

/// A file that was alone in its run when it was read shares its checkpoint with the files that come later.
#[test]
fn a_lone_file_that_was_read_is_of_one_checkpoint_with_the_next() {
    let (mut catalog, objects) = (Catalog::new(LONG), no_objects());
    let [first, second, next] = ["run/checkpoint-1/a", "run/checkpoint-1/b", "run/checkpoint-2/a"].map(Path::new);
    catalog.found(first.into(), State::Sealed(sealed(1, 1, 1)));
    catalog.closed(first, None, &objects);
    catalog.found(second.into(), State::Sealed(sealed(2, 2, 2)));
    catalog.found(next.into(), State::Sealed(sealed(1, 3, 3)));
    let step = catalog.claim_step(Instant::now(), 0).0.map(|task| task.path);
    assert!(step.is_none(), "a file goes before the rest of its checkpoint: {step:?}");
}

#[test]
fn the_highest_step_stays_beside_the_newest_until_a_higher_one_is_there() {
    let (mut catalog, objects) = (Catalog::new(Duration::ZERO), no_objects());
    let name = |step: u64| PathBuf::from(format!("run/step_{step}.pt"));
    let found = |catalog: &mut Catalog, step: u64, modified_ns: i64| {
        catalog.found(name(step), State::Sealed(sealed_at(vec![step], 1, modified_ns, step)));
    };
    let history = |catalog: &mut Catalog, step: u64| catalog.decision(&name(step)).unwrap().is_history;
    // Resumed from step 60.
    [(60, 1), (120, 2), (140, 3), (64, 4)].into_iter().for_each(|(step, at)| found(&mut catalog, step, at));
    assert_eq!([60, 120, 140, 64].map(|step| history(&mut catalog, step)), [true, true, false, false]);
    found(&mut catalog, 68, 5);
    assert_eq!([64, 140, 68].map(|step| history(&mut catalog, step)), [true, false, false]);
    // The run has caught up, then its last state goes.
    found(&mut catalog, 144, 6);
    assert_eq!([140, 68, 144].map(|step| history(&mut catalog, step)), [true, true, false]);
    catalog.removed(&name(144), &objects);
    assert_eq!([140, 68].map(|step| history(&mut catalog, step)), [false, false]);
}

/// A, B, and A again: while B is on its way too, the older A may go, since the newest state has its bytes.
#[test]
fn a_state_with_the_newest_ones_bytes_goes_before_those_between() {
    let (mut catalog, objects) = (Catalog::new(Duration::ZERO), no_objects());
    let name = |n: usize| PathBuf::from(format!("run/step_{n}"));
    let may_go = |catalog: &mut Catalog, n: usize| catalog.decision(&name(n)).unwrap().may_go;
    let (first, between, last) = (sealed(1, 1, 1), sealed(1, 2, 2), sealed(1, 3, 1));
    catalog.found(name(1), State::Archived(Arc::clone(&first), Id([1; 16])));
    catalog.found(name(2), State::Archived(Arc::clone(&between), Id([2; 16])));
    assert!(!may_go(&mut catalog, 1), "nothing newer stays");
    catalog.found(name(3), State::Sealed(last));
    assert!(may_go(&mut catalog, 1) && may_go(&mut catalog, 2));
    // A copy of the newest state is no history.
    catalog.removed(&name(2), &objects);
    assert!(!may_go(&mut catalog, 1));
}

/// A thread still compares the file's former content: nothing is archived until the file is sealed, too.
#[test]
fn a_file_that_is_closed_during_a_step_counts_as_closed() {
    let (mut catalog, objects) = (Catalog::new(Duration::ZERO), no_objects());
    let name = |n: usize| PathBuf::from(format!("run/step_{n}"));
    catalog.found(name(1), State::Sealed(sealed(1, 1, 1)));
    catalog.found(name(2), State::Sealed(sealed(1, 2, 2)));
    catalog.found(name(3), State::Durable(sealed(1, 3, 3)));
    let now = Instant::now();
    let task = catalog.claim_step(now, 0).0.unwrap();
    assert!(matches!(task.step, Step::Compare { .. }));
    catalog.opened_for_writing(&name(3), &objects);
    catalog.closed(&name(3), Some((1 << 20, now)), &objects);
    assert!(catalog.claim_step(now, 0).0.is_none() && catalog.may_learn());
    catalog.done(&task);
    assert!(matches!(claim_seal(&mut catalog, now).unwrap().step, Step::Seal));
}
