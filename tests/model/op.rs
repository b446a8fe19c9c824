//! Single operations of programs and people on files.
//!
//! Paths come from a short table, so that operations meet the same files again and again. Directories come and go,
//! links lead to files, handles and mappings stay open.

use proptest::prelude::*;

use super::sys::Stamp;

/// Handles that operations may hold; two more are for operations of several calls.
pub(crate) const SLOTS: usize = 3;
pub(crate) const ALL_SLOTS: usize = SLOTS + 2;
/// Mappings that operations may hold.
pub(crate) const MAPS: usize = 2;

/// The places of operations. The directories `s` and `t` always exist: series of checkpoints are saved there.
pub(crate) const PATHS: [&str; 22] = [
    "a", "b", "c", "a/a", "a/b", "b/a", "b/b", "c/c", "a/b/c", "b/a/a", "s", "t", "s/tmp", "s/step_1.safetensors",
    "s/step_2.safetensors", "s/step_3.safetensors", "s/step_4.safetensors", "t/step-1.txt", "t/step-2.txt",
    "t/step-3.txt", "last.safetensors", "s/a",
];
/// Steps of a series that have a name in the table; after the last the first is written again.
pub(crate) const STEPS: u8 = 4;

/// The targets of symbolic links.
pub(crate) const TARGETS: [&str; 8] = ["a", "b/b", "../a", "c", "none", "s/step_1.safetensors", ".", "../s"];

/// Index into [`PATHS`].
pub(crate) type At = u8;
/// Index of a handle.
pub(crate) type Slot = u8;

/// The bytes to write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Data {
    /// This many bytes of a pattern.
    Pattern(u32, u8),
    /// A state of training: a file of safetensors.
    State(u8),
    /// Text that compresses.
    Text(u8),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Series {
    /// Weights in training: older ones are quantized.
    States,
    /// Text: older ones are kept without loss.
    Texts,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Plain,
    NoReplace,
    Exchange,
}

/// One operation. [`Op::calls`] splits those of several calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    Open(Slot, At, i32, u32),
    Close(Slot),
    Read(Slot, u32),
    Pread(Slot, u32, u32),
    Write(Slot, Data),
    Pwrite(Slot, u32, Data),
    Seek(Slot, i64, i32),
    Ftruncate(Slot, u32),
    Truncate(At, u32),
    Fallocate(Slot, i32, u32, u32),
    Fsync(Slot, bool),
    Fstat(Slot),
    Flock(Slot, i32),
    CopyRange(Slot, u32, Slot, u32, u32),
    /// Maps, reads, and unmaps.
    MapRead(Slot, u32, u32),
    /// Maps, stores, syncs, and unmaps.
    MapWrite(Slot, u32, Data),
    /// A mapping that stays, whatever happens to the handle and the name.
    MapHold(u8, Slot),
    MapStore(u8, u32, Data),
    MapLoad(u8, u32, u32),
    MapDrop(u8),
    Rename(At, At, Mode),
    Link(At, At),
    Symlink(u8, At),
    Readlink(At),
    Unlink(At),
    Mkdir(At, u32),
    Rmdir(At),
    Mknod(At, u32),
    List(At),
    Lstat(At),
    Chmod(At, u32),
    Chown(At, u32, u32),
    Utimens(At, Stamp, Stamp),
    SetXattr(At, u8, u16, i32),
    GetXattr(At, u8),
    ListXattr(At),
    RemoveXattr(At, u8),
    /// The next of a series, in place or renamed over.
    Save(Series, bool),
    /// Reads one file and writes another, as `cp`.
    Copy(At, At),
    /// Everything possible is archived and released.
    Sync,
    Release(At),
    Recall(At),
    Pin(At),
    Unpin(At),
    Gc,
    /// Everything is closed, and the store mounted anew.
    Remount,
}

/// Names of extended attributes.
pub(crate) const XATTRS: [&str; 4] = ["user.a", "user.b", "trusted.c", "user.stepfs_is_not_ours"];

impl Op {
    /// Its calls; for most operations itself. `step` counts the files of each series.
    pub(crate) fn calls(&self, steps: &mut [u8; 2]) -> Vec<Op> {
        let (from, to) = (SLOTS as Slot, SLOTS as Slot + 1);
        let create = libc::O_WRONLY | libc::O_CREAT | libc::O_TRUNC;
        match *self {
            Op::Save(series, beside) => {
                let (which, first) = match series {
                    Series::States => (0, "s/step_1.safetensors"),
                    Series::Texts => (1, "t/step-1.txt"),
                };
                let number = steps[which];
                steps[which] = steps[which].wrapping_add(1);
                let (data, names) = match series {
                    Series::States => (Data::State(number), STEPS),
                    Series::Texts => (Data::Text(number), 3),
                };
                let at = index(first) + number % names;
                let target = if beside { index("s/tmp") } else { at };
                let mut calls = vec![Op::Open(to, target, create, 0o644), Op::Write(to, data), Op::Close(to)];
                if beside {
                    calls.insert(2, Op::Fsync(to, false));
                    calls.push(Op::Rename(target, at, Mode::Plain));
                }
                calls
            }
            Op::Copy(source, target) => vec![
                Op::Open(from, source, libc::O_RDONLY, 0),
                Op::Open(to, target, create, 0o640),
                Op::CopyRange(from, 0, to, 0, 1 << 20),
                Op::Close(from),
                Op::Close(to),
            ],
            _ => vec![self.clone()],
        }
    }
}

pub(crate) fn index(path: &str) -> At {
    PATHS.iter().position(|known| *known == path).expect("in the table") as At
}

fn at() -> impl Strategy<Value = At> {
    let steps = index("s/step_1.safetensors");
    prop_oneof![3 => 0..PATHS.len() as u8, 1 => steps..steps + STEPS]
}

fn slot() -> impl Strategy<Value = Slot> {
    0..SLOTS as u8
}

/// Offsets and lengths: around small files, around pages, and around the 64 KiB below which nothing is released.
fn offset() -> impl Strategy<Value = u32> {
    prop_oneof![4 => 0..300u32, 2 => 4000..8300u32, 2 => 60_000..75_000u32, 1 => Just(0), 1 => 90_000..200_000u32]
}

fn data() -> impl Strategy<Value = Data> {
    prop_oneof![
        8 => (prop_oneof![3 => 0..200u32, 2 => 4000..9000u32, 1 => 60_000..70_000u32], any::<u8>())
            .prop_map(|(len, seed)| Data::Pattern(len, seed)),
        1 => (0..4u8).prop_map(Data::State),
        1 => (0..4u8).prop_map(Data::Text),
    ]
}

fn open_flags() -> impl Strategy<Value = i32> {
    let access = prop_oneof![1 => Just(libc::O_RDONLY), 1 => Just(libc::O_WRONLY), 2 => Just(libc::O_RDWR)];
    let creation = prop_oneof![
        4 => Just(0),
        7 => Just(libc::O_CREAT),
        1 => Just(libc::O_CREAT | libc::O_EXCL),
        1 => Just(libc::O_TRUNC),
        1 => Just(libc::O_CREAT | libc::O_TRUNC),
    ];
    let rest = prop_oneof![
        6 => Just(0),
        2 => Just(libc::O_APPEND),
        1 => Just(libc::O_NOFOLLOW),
        1 => Just(libc::O_DIRECTORY),
        1 => Just(libc::O_DSYNC),
    ];
    (access, creation, rest).prop_map(|(access, creation, rest)| access | creation | rest)
}

fn stamp() -> impl Strategy<Value = Stamp> {
    prop_oneof![
        Just(Stamp::Omit),
        Just(Stamp::Now),
        (-5_000_000_000i64..5_000_000_000, 0..1_000_000_000u32).prop_map(|(s, n)| Stamp::At(s, n)),
    ]
}

fn permissions() -> impl Strategy<Value = u32> {
    prop_oneof![
        Just(0o644),
        Just(0o600),
        Just(0o755),
        Just(0o4755),
        Just(0o2755),
        Just(0o2644),
        Just(0o1777),
        0..0o10000u32
    ]
}

fn on_handles() -> impl Strategy<Value = Op> {
    let whence = prop_oneof![
        Just(libc::SEEK_SET),
        Just(libc::SEEK_CUR),
        Just(libc::SEEK_END),
        Just(libc::SEEK_DATA),
        Just(libc::SEEK_HOLE)
    ];
    let fallocate = prop_oneof![
        Just(0),
        Just(libc::FALLOC_FL_KEEP_SIZE),
        Just(libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE),
        Just(libc::FALLOC_FL_ZERO_RANGE),
        Just(libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE),
    ];
    let lock = prop_oneof![Just(libc::LOCK_SH), Just(libc::LOCK_EX), Just(libc::LOCK_UN)];
    prop_oneof![
        14 => (slot(), at(), open_flags(), Just(0o666)).prop_map(|(s, p, f, m)| Op::Open(s, p, f, m)),
        4 => slot().prop_map(Op::Close),
        3 => (slot(), offset()).prop_map(|(s, len)| Op::Read(s, len)),
        2 => (slot(), offset(), offset()).prop_map(|(s, len, at)| Op::Pread(s, len, at)),
        5 => (slot(), data()).prop_map(|(s, d)| Op::Write(s, d)),
        4 => (slot(), offset(), data()).prop_map(|(s, at, d)| Op::Pwrite(s, at, d)),
        2 => (slot(), -100i64..80_000, whence).prop_map(|(s, at, w)| Op::Seek(s, at, w)),
        2 => (slot(), offset()).prop_map(|(s, len)| Op::Ftruncate(s, len)),
        3 => (slot(), fallocate, offset(), offset()).prop_map(|(s, m, at, len)| Op::Fallocate(s, m, at, len)),
        1 => (slot(), any::<bool>()).prop_map(|(s, d)| Op::Fsync(s, d)),
        1 => slot().prop_map(Op::Fstat),
        1 => (slot(), lock).prop_map(|(s, how)| Op::Flock(s, how)),
        2 => (slot(), offset(), slot(), offset(), offset()).prop_map(|(s, a, t, b, len)| Op::CopyRange(s, a, t, b, len)),
        1 => (slot(), offset(), offset()).prop_map(|(s, at, len)| Op::MapRead(s, at, len)),
        2 => (slot(), offset(), data()).prop_map(|(s, at, d)| Op::MapWrite(s, at, d)),
        2 => (0..MAPS as u8, slot()).prop_map(|(m, s)| Op::MapHold(m, s)),
        2 => (0..MAPS as u8, offset(), data()).prop_map(|(m, at, d)| Op::MapStore(m, at, d)),
        1 => (0..MAPS as u8, offset(), offset()).prop_map(|(m, at, len)| Op::MapLoad(m, at, len)),
        1 => (0..MAPS as u8).prop_map(Op::MapDrop),
    ]
}

fn on_names() -> impl Strategy<Value = Op> {
    let how = prop_oneof![4 => Just(Mode::Plain), 1 => Just(Mode::NoReplace), 2 => Just(Mode::Exchange)];
    let special = prop_oneof![
        Just(libc::S_IFIFO | 0o644),
        Just(libc::S_IFSOCK | 0o600),
        Just(libc::S_IFREG | 0o640),
        Just(0o604)
    ];
    let flags = prop_oneof![2 => Just(0), 1 => Just(libc::XATTR_CREATE), 1 => Just(libc::XATTR_REPLACE)];
    let name = || 0..XATTRS.len() as u8;
    prop_oneof![
        6 => (at(), at(), how).prop_map(|(a, b, how)| Op::Rename(a, b, how)),
        3 => (at(), at()).prop_map(|(a, b)| Op::Link(a, b)),
        2 => (0..TARGETS.len() as u8, at()).prop_map(|(target, p)| Op::Symlink(target, p)),
        1 => at().prop_map(Op::Readlink),
        4 => at().prop_map(Op::Unlink),
        5 => (at(), permissions()).prop_map(|(p, mode)| Op::Mkdir(p, mode)),
        2 => at().prop_map(Op::Rmdir),
        1 => (at(), special).prop_map(|(p, mode)| Op::Mknod(p, mode)),
        1 => at().prop_map(Op::List),
        1 => at().prop_map(Op::Lstat),
        2 => (at(), offset()).prop_map(|(p, len)| Op::Truncate(p, len)),
        2 => (at(), permissions()).prop_map(|(p, mode)| Op::Chmod(p, mode)),
        2 => (at(), prop_oneof![Just(u32::MAX), 0..3u32], prop_oneof![Just(u32::MAX), 0..3u32])
            .prop_map(|(p, uid, gid)| Op::Chown(p, uid, gid)),
        2 => (at(), stamp(), stamp()).prop_map(|(p, a, m)| Op::Utimens(p, a, m)),
        3 => (at(), name(), 0..300u16, flags).prop_map(|(p, n, len, flags)| Op::SetXattr(p, n, len, flags)),
        1 => (at(), name()).prop_map(|(p, n)| Op::GetXattr(p, n)),
        1 => at().prop_map(Op::ListXattr),
        1 => (at(), name()).prop_map(|(p, n)| Op::RemoveXattr(p, n)),
        2 => (at(), at()).prop_map(|(a, b)| Op::Copy(a, b)),
    ]
}

fn on_checkpoints(remounts: bool) -> impl Strategy<Value = Op> {
    let series = || prop_oneof![2 => Just(Series::States), 1 => Just(Series::Texts)];
    prop_oneof![
        10 => (series(), any::<bool>()).prop_map(|(series, beside)| Op::Save(series, beside)),
        5 => Just(Op::Sync),
        2 => at().prop_map(Op::Release),
        3 => at().prop_map(Op::Recall),
        1 => at().prop_map(Op::Pin),
        1 => at().prop_map(Op::Unpin),
        1 => Just(Op::Gc),
        1 => Just(if remounts { Op::Remount } else { Op::Sync }),
    ]
}

/// The interval between comparisons of the whole tree. A comparison is itself an operation, so some histories do it
/// seldom.
pub(crate) const CADENCES: [usize; 3] = [1, 4, usize::MAX];

/// The initial content of a history: without it most generated operations would fail for want of a file.
fn furniture() -> impl Strategy<Value = Vec<Op>> {
    let create = libc::O_RDWR | libc::O_CREAT;
    let all = vec![
        Op::Mkdir(index("a"), 0o755),
        Op::Mkdir(index("b"), 0o2775),
        Op::Mkdir(index("a/b"), 0o755),
        Op::Open(0, index("a/a"), create, 0o666),
        Op::Write(0, Data::Pattern(5000, 1)),
        Op::Open(1, index("b/b"), create, 0o600),
        Op::Write(1, Data::Pattern(66_000, 2)),
        Op::Open(2, index("c"), create, 0o644),
        Op::Write(2, Data::State(0)),
        Op::Link(index("a/a"), index("b/a")),
        Op::Symlink(1, index("a/b/c")),
        Op::SetXattr(index("a/a"), 0, 20, 0),
    ];
    let count = all.len();
    proptest::sample::subsequence(all, 0..=count)
}

/// Operations of one history, and the interval of whole comparisons. About a third of them have checkpoints in them,
/// which cost a hundred times as much as other operations.
pub(crate) fn histories(remounts: bool) -> impl Strategy<Value = (usize, Vec<Op>)> {
    let files = prop_oneof![4 => on_handles(), 3 => on_names()].boxed();
    let all = prop_oneof![5 => on_handles(), 4 => on_names(), 3 => on_checkpoints(remounts)].boxed();
    let cadence = prop_oneof![2 => Just(CADENCES[0]), 1 => Just(CADENCES[1]), 1 => Just(CADENCES[2])];
    // Released files are there from the beginning, because sixty operations make few of them.
    let saved = vec![
        Op::Save(Series::States, false),
        Op::Save(Series::Texts, true),
        Op::Save(Series::States, true),
        Op::Save(Series::Texts, false),
        Op::Sync,
    ];
    let among_checkpoints = (proptest::sample::subsequence(saved, 0..=5), proptest::collection::vec(all, 1..60));
    let operations = prop_oneof![
        2 => proptest::collection::vec(files, 1..60),
        1 => among_checkpoints.prop_map(|(mut before, operations)| {
            before.extend(operations);
            before
        }),
    ];
    (cadence, furniture(), operations).prop_map(|(cadence, mut before, operations)| {
        before.extend(operations);
        (cadence, before)
    })
}
