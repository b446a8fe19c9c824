//! A mount in lines of text, for `stepfs status` and `stepfs top`.

use std::path::PathBuf;
use std::time::Duration;

use serde::Serialize;

use crate::archive::{Problem, Room, Run, Save, Serving, Status};
use crate::clock::wall_ns;
use crate::fs::Mounted;
use crate::store::{Named, TRASH};

use super::color::{Look, paint};
use super::format::{count, name, percent, rate, size, span, table, tail, time};
use super::source::mounted_at;

/// A store and its mount.
#[derive(Serialize)]
pub(super) struct Mount {
    /// Empty if the path led through none.
    #[serde(flatten)]
    pub(super) mount: Named,
    #[serde(flatten)]
    pub(super) store: Named,
    #[serde(flatten)]
    pub(super) status: Status,
}

impl Mount {
    pub(super) fn new(mount: PathBuf, store: PathBuf, status: Status) -> Mount {
        Mount { mount: Named("mount", mount), store: Named("store", store), status }
    }

    /// A mount without an answer.
    pub(super) fn silent(of: &Mounted, why: String) -> Mount {
        let status = Status { problems: vec![Problem::new("silent", why, "")], ..Status::default() };
        Mount::new(of.point.clone(), of.store.clone(), status)
    }

    /// True if its daemon does not answer.
    pub(super) fn is_silent(&self) -> bool {
        !self.mount.as_os_str().is_empty() && self.status.daemon.is_none()
    }
}

/// A line: texts, each with its look.
pub(super) type Line = Vec<(Look, String)>;

/// Columns of a label.
const LABEL: usize = 11;
/// Rows of a list of saves or runs, beside its head.
const MOST_ROWS: usize = 8;
/// Rows of runs that the saves leave room for.
const FEWEST_RUNS: usize = 3;
/// The most columns of the path of the last save: a line of a screen has room for its label, too.
const PATH: usize = 48;
/// Columns of a list behind the name, and the shortest column for a name.
const COLUMNS: usize = 46;
const NAME: usize = 12;

/// A line for standard output.
pub(super) fn painted(line: &Line) -> String {
    line.iter().map(|(look, text)| paint(*look, text)).collect::<String>().trim_end().into()
}

/// A store and its mount in lines of at most so many columns: the problems, then a line or two for each fact.
pub(super) fn lines(mount: &Mount, columns: usize) -> Vec<Line> {
    let problems = &mount.status.problems;
    let mut lines = vec![vec![match problems.len() {
        0 if mount.is_silent() => (Look::Plain, "asking its daemon".into()),
        0 => (Look::Good, "nothing is wrong".into()),
        number => (Look::Bad, count(number, "problem")),
    }]];
    for (place, Problem { says, mend, .. }) in problems.iter().enumerate() {
        lines.extend(beside((Look::Plain, "  ".into()), Look::Bad, &name(says), columns));
        // Problems of one kind have the same next step.
        if !mend.is_empty() && problems.get(place + 1).is_none_or(|next| next.mend != *mend) {
            lines.extend(beside((Look::Plain, "    ".into()), Look::Plain, &name(mend), columns));
        }
    }
    for (label, text) in facts(mount) {
        lines.extend(beside((Look::Head, format!("{label:LABEL$}")), Look::Plain, &text, columns));
    }
    lines
}

/// A text beside its label, in lines of at most so many columns, where words end.
fn beside(label: (Look, String), look: Look, text: &str, columns: usize) -> Vec<Line> {
    let indent = (Look::Plain, " ".repeat(label.1.len()));
    let columns = columns.saturating_sub(indent.1.len());
    let mut texts = vec![String::new()];
    for word in text.split_inclusive(' ') {
        let last = texts.len() - 1;
        let is_full = texts[last].chars().count() + word.trim_end().chars().count() > columns;
        if is_full && !texts[last].is_empty() { texts.push(word.into()) } else { texts[last].push_str(word) }
    }
    let labels = std::iter::once(label).chain(std::iter::repeat(indent));
    labels.zip(texts).map(|(label, text)| vec![label, (look, text)]).collect()
}

/// The facts of a store and its mount, each with its label.
fn facts(Mount { mount, store, status, .. }: &Mount) -> Vec<(&'static str, String)> {
    let (point, own) = (name(&**mount), crate::version());
    let mut facts = vec![("store", name(&**store))];
    match status.daemon {
        Some(pid) => facts.push(("mounted", format!("{point} by process {pid}"))),
        None if point.is_empty() => facts.push((
            "mounted",
            match mounted_at(store) {
                Some(Mounted { point, .. }) => format!("{0}; `stepfs status {0}` says more", point.display()),
                None => "no, as far as this user sees".into(),
            },
        )),
        None => {
            facts.push(("mounted", format!("{point}, which does not answer")));
            return facts;
        }
    }
    if status.daemon.is_some() && status.version != own {
        let daemon = if status.version.is_empty() { "an older stepfs" } else { &status.version };
        facts.push(("", format!("which is {daemon}; this is {own}, and the next mount runs it")));
    }
    facts.extend(status.shared.iter().map(|role| ("shared", role.clone())));
    facts.extend(status.serving.iter().map(|serving| ("served", served(serving))));
    facts.push(("files", format!("{}, {} of them released", status.files, status.released)));
    let share = percent(status.stored_bytes, status.logical_bytes);
    facts.push(("size", format!("{} stored as {} ({share})", size(status.logical_bytes), size(status.stored_bytes))));
    facts.push(("", format!("{} resident, {} in objects", size(status.resident_bytes), size(status.object_bytes))));
    if status.unnamed_bytes > 0 {
        let unnamed = size(status.unnamed_bytes);
        facts.push(("", format!("{unnamed} of that for removed states, which others are differences to")));
    }
    if status.trash_files > 0 {
        let (files, bytes, trash) = (status.trash_files, size(status.trash_bytes), mount.join(TRASH));
        let trash = name(trash);
        facts.push(("trash", format!("{files} removed files, {bytes}; `rm -r {trash}` frees their room")));
    }
    if status.free_bytes > 0 {
        let pace = status.room.as_ref().map(less_each_day).unwrap_or_default();
        facts.push(("free", format!("{} on its disk{pace}", size(status.free_bytes))));
    }
    facts.extend(status.room.iter().map(|room| ("room", room_words(room))));
    facts.extend(status.saves.first().map(|save| {
        let rate = save.bytes_per_second().map_or(String::new(), |bytes| format!(", {}", rate(bytes)));
        let took = span(Duration::from_millis(save.milliseconds));
        ("last save", format!("{}, {} in {took}{rate}", tail(&name(&save.path), PATH), size(save.bytes)))
    }));
    let waits = &status.waits;
    if waits.waiting + waits.waited > 0 {
        let seconds = |ms: u64| Duration::from_millis(ms).as_secs_f64();
        let (waited, longest, total) = (waits.waited, seconds(waits.longest_ms), seconds(waits.total_ms));
        let all = format!("{} did, {longest:.1} s at most, {total:.1} s in all", count(waited as usize, "file"));
        facts.push(("waits", format!("{} for room now; {all}", waits.waiting)));
    }
    let reads = &status.reads;
    if reads.opened > 0 {
        let failed = if reads.failed > 0 { format!(", {} could not be read", reads.failed) } else { String::new() };
        let decoded = size(reads.decoded_bytes);
        facts.push(("reads", format!("{} of released files, {decoded} decoded{failed}", reads.opened)));
    }
    facts.push(("queue", queue(status)));
    facts.extend(status.mirror.iter().map(|mirror| {
        let lag = match mirror.lag_seconds {
            Some(lag) => format!("{} files ({}) are not there yet, one for {lag} s", mirror.files, size(mirror.bytes)),
            None if mirror.done == mirror.changes => "it has everything".into(),
            None => "the last changes are on their way".into(),
        };
        ("mirror", format!("{}, {lag}", mirror.url))
    }));
    facts.extend(status.restored.iter().map(|lineage| {
        let expected = lineage.expected_restores.map_or(String::new(), |count| format!(", {count} expected"));
        let is_moved = lineage.profile != lineage.asked;
        let moved = if is_moved { format!(" instead of {}", lineage.asked) } else { String::new() };
        let then = format!("its next states are {}{moved}", lineage.profile);
        ("restored", format!("{} and its lineage: {}{expected}; {then}", name(&lineage.path), lineage.restores))
    }));
    facts
}

/// Who reads and writes resident files. The figures are those of docs/PERFORMANCE.md.
fn served(serving: &Serving) -> String {
    match serving {
        Serving::Kernel => "by the kernel, at the speed of the disk".into(),
        Serving::Helper => "by the kernel, with the helper stepfs-passthrough, at the speed of the disk".into(),
        Serving::Daemon(why) => {
            format!("by the daemon: writes take 2 to 20 times as long as on the disk. {}", name(why))
        }
    }
}

/// How fast the room goes; empty if no checkpoints come.
pub(super) fn less_each_day(room: &Room) -> String {
    room.bytes_per_day.map_or(String::new(), |bytes| format!(", {} less each day", size(bytes)))
}

/// How many checkpoints there is room for, and until when.
pub(super) fn room_words(room: &Room) -> String {
    const YEAR: i64 = 365 * 86_400;
    let full = room.full.map_or(String::new(), |full| match full.saturating_sub(wall_ns() / 1_000_000_000) {
        left if left > YEAR => ", for more than a year at this pace".into(),
        // The hour is no use for a day that is far off.
        left if left > 2 * 86_400 => format!(", full on {} at this pace", time(full).get(..6).unwrap_or_default()),
        _ => format!(", full on {} at this pace", time(full)),
    });
    match room.checkpoints {
        None => "it hardly grows: as many checkpoints go as come".into(),
        Some(0) => "not for another checkpoint".into(),
        Some(1) => format!("about one more checkpoint{full}"),
        Some(count) => {
            // More digits than the pace has.
            let last = 10_u64.pow(count.ilog10().saturating_sub(1));
            format!("about {} more checkpoints{full}", count / last * last)
        }
    }
}

/// The steps that are left, and what they wait for.
fn queue(status: &Status) -> String {
    let oldest = status.backlog_seconds.filter(|seconds| *seconds > 0);
    let parts = [
        Some(format!("{} to do", status.queued)),
        oldest.map(|seconds| format!("the oldest waits for {}", span(Duration::from_secs(seconds)))),
        (status.busy > 0).then(|| format!("{} wait for a handle to be closed", status.busy)),
        (status.settling > 0).then(|| format!("{} wait for the rest of their checkpoint", status.settling)),
    ];
    parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

/// The last saves and the newest runs, on a screen with so many columns and rows left.
pub(super) fn lists(status: &Status, columns: usize, rows: usize) -> Vec<Line> {
    let now = wall_ns() / 1_000_000_000;
    // A list has an empty line and a head.
    let fit = |count: usize, left: usize| count.min(MOST_ROWS).min(left.saturating_sub(2));
    let taken = |rows: usize| if rows > 0 { rows + 2 } else { 0 };
    let spared = taken(status.runs.len().min(FEWEST_RUNS).min(rows.saturating_sub(2 * 3) / 2));
    let saves = fit(status.saves.len(), rows - spared);
    let runs = fit(status.runs.len(), rows - taken(saves));
    let shown = |path: &str| tail(&name(path), columns.saturating_sub(COLUMNS).max(NAME));
    let ago = |then: i64| format!("{} ago", span(Duration::from_secs(now.saturating_sub(then).max(0) as u64)));
    let save = |save: &Save| {
        let took = span(Duration::from_millis(save.milliseconds));
        let speed = save.bytes_per_second().map_or("-".into(), rate);
        [shown(&save.path), ago(save.closed), size(save.bytes), took, speed]
    };
    let run = |run: &Run| {
        let step = run.step.map_or("-".into(), |step| step.to_string());
        let path = if run.path.is_empty() { "." } else { &run.path };
        [shown(path), ago(run.modified), step, run.files.to_string(), String::new()]
    };
    let mut lines =
        list(&["last saves", ">closed", ">size", ">took", ">speed"], status.saves[..saves].iter().map(save));
    lines.extend(list(&["runs", ">saved", ">step", ">files", ">"], status.runs[..runs].iter().map(run)));
    lines
}

/// A list with its head, after an empty line; nothing without rows.
fn list(head: &[&str], rows: impl Iterator<Item = [String; 5]>) -> Vec<Line> {
    let rows: Vec<Vec<String>> = rows.map(Vec::from).collect();
    if rows.is_empty() {
        return Vec::new();
    }
    let text = table(head, &rows);
    let looks = std::iter::once(Look::Head).chain(std::iter::repeat(Look::Plain));
    std::iter::once(Vec::new()).chain(looks.zip(text.lines()).map(|(look, line)| vec![(look, line.into())])).collect()
}
