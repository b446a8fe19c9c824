//! One frame of `stepfs top`, as lines of text.

use std::time::Duration;

use crate::archive::{Problem, Run, Save, Status};
use crate::clock::wall_ns;

use super::super::color::Look;
use super::super::format::{name, percent, rate, size, span, table, tail, time};
use super::super::status::{Mount, free, mirror_words, reads, room_words};

/// A line: texts, each with its look.
pub(super) type Line = Vec<(Look, String)>;

/// Rows of a list of saves or runs, beside its head.
const MOST_ROWS: usize = 8;
/// Rows of runs that the saves leave room for.
const FEWEST_RUNS: usize = 3;
/// Columns of a list behind the name, and the shortest column for a name.
const COLUMNS: usize = 46;
const NAME: usize = 12;

/// The frame of these mounts, for a screen of so many columns and rows. Without a screen it is as long as it needs to be.
pub(super) fn of(mounts: &[&Mount], screen: Option<(usize, usize)>) -> Vec<Line> {
    let (columns, rows) = screen.unwrap_or((usize::MAX, usize::MAX));
    let now = wall_ns() / 1_000_000_000;
    let end = if screen.is_some() { "   q ends it" } else { "" };
    let mut lines = vec![vec![(Look::Plain, format!("{}   {}{end}", crate::version(), time(now)))]];
    if mounts.is_empty() {
        lines.push(plain("no store is mounted; `stepfs mount STORE DIR` mounts one".into()));
    }
    let each = rows.saturating_sub(1) / mounts.len().max(1);
    for mount in mounts {
        lines.extend(block(mount, columns, each, now));
    }
    if lines.len() > rows {
        lines.truncate(rows.saturating_sub(1));
        lines.push(plain("there is more; name one mount, or enlarge the terminal".into()));
    }
    lines
}

fn plain(text: String) -> Line {
    vec![(Look::Plain, text)]
}

/// The lines of a mount. Lists are cut, so that all lines fit into `rows` where they can.
fn block(mount: &Mount, columns: usize, rows: usize, now: i64) -> Vec<Line> {
    let status = &mount.status;
    let (point, store) = (name(&mount.mount.to_string_lossy()), name(&mount.store.to_string_lossy()));
    let mut lines = vec![Vec::new(), vec![(Look::Head, point), (Look::Plain, format!("   {store}"))]];
    for (at, Problem { says, mend, .. }) in status.problems.iter().enumerate() {
        lines.extend(wrapped(&name(says), columns).map(|text| vec![(Look::Bad, text)]));
        if !mend.is_empty() && status.problems.get(at + 1).is_none_or(|next| next.mend != *mend) {
            lines.extend(wrapped(&format!("  {}", name(mend)), columns).map(plain));
        }
    }
    if status.daemon.is_none() {
        if status.problems.is_empty() {
            lines.push(plain("asking its daemon".into()));
        }
        return lines;
    }
    if status.problems.is_empty() {
        lines.push(vec![(Look::Good, "nothing is wrong".into())]);
    }
    lines.extend(facts(status).map(|(label, text)| vec![(Look::Head, format!("{label:7}")), (Look::Plain, text)]));
    // A list has an empty line and a head.
    let left = rows.saturating_sub(lines.len());
    let fit = |count: usize, left: usize| count.min(MOST_ROWS).min(left.saturating_sub(2));
    let taken = |rows: usize| if rows > 0 { rows + 2 } else { 0 };
    let spared = taken(status.runs.len().min(FEWEST_RUNS).min(left.saturating_sub(2 * 3) / 2));
    let saves = fit(status.saves.len(), left - spared);
    let runs = fit(status.runs.len(), left - taken(saves));
    let most = columns.saturating_sub(COLUMNS).max(NAME);
    let save = |save: &Save| {
        let speed = save.bytes_per_second().map_or("-".into(), rate);
        [
            shown(&save.path, most),
            ago(now, save.closed),
            size(save.bytes),
            span(Duration::from_millis(save.milliseconds)),
            speed,
        ]
    };
    let run = |run: &Run| {
        let step = run.step.map_or("-".into(), |step| step.to_string());
        let path = if run.path.is_empty() { "." } else { &run.path };
        [shown(path, most), ago(now, run.modified), step, run.files.to_string(), String::new()]
    };
    lines.extend(list(["last saves", "closed", "size", "took", "speed"], status.saves[..saves].iter().map(save)));
    lines.extend(list(["runs", "saved", "step", "files", ""], status.runs[..runs].iter().map(run)));
    lines
}

/// The facts of a store, each with its label.
fn facts(status: &Status) -> impl Iterator<Item = (&'static str, String)> {
    let share = percent(status.stored_bytes, status.logical_bytes);
    let profile = if status.profile.is_empty() { String::new() } else { format!(", {}", status.profile) };
    let sizes = format!("{} kept as {} ({share})", size(status.logical_bytes), size(status.stored_bytes));
    let oldest = status
        .backlog_seconds
        .map_or(String::new(), |seconds| format!(", the oldest waits for {}", span(Duration::from_secs(seconds))));
    let queue = match (status.queued, status.settling) {
        (0, 0) => "nothing to do".into(),
        (0, settling) => format!("{settling} wait for the rest of their checkpoint"),
        (queued, _) => format!("{queued} to do{oldest}"),
    };
    [
        Some(("size", sizes + &profile)),
        Some(("files", format!("{}, {} of them released", status.files, status.released))),
        Some(("queue", queue)),
        status.room.as_ref().map(|room| ("room", room_words(room))),
        (status.free_bytes > 0).then(|| ("free", free(status))),
        (status.reads.opened > 0).then(|| ("reads", reads(status))),
        status.mirror.as_ref().map(|mirror| ("mirror", mirror_words(mirror))),
    ]
    .into_iter()
    .flatten()
}

/// A list with its head, after an empty line; nothing without rows.
fn list(head: [&str; 5], rows: impl Iterator<Item = [String; 5]>) -> Vec<Line> {
    let rows: Vec<Vec<String>> = std::iter::once(head.map(String::from)).chain(rows).map(Vec::from).collect();
    if rows.len() == 1 {
        return Vec::new();
    }
    let text = table(&rows, &[false, true, true, true, true]);
    let looks = std::iter::once(Look::Head).chain(std::iter::repeat(Look::Plain));
    std::iter::once(Vec::new()).chain(looks.zip(text.lines()).map(|(look, line)| vec![(look, line.into())])).collect()
}

/// The end of a path, without control characters.
fn shown(path: &str, most: usize) -> String {
    tail(&name(path), most)
}

fn ago(now: i64, then: i64) -> String {
    format!("{} ago", span(Duration::from_secs(now.saturating_sub(then).max(0) as u64)))
}

/// A text in lines of at most so many characters, where words end.
fn wrapped(text: &str, columns: usize) -> impl Iterator<Item = String> {
    let mut lines = vec![String::new()];
    for word in text.split_inclusive(' ') {
        let line = lines.last_mut().expect("there is always one");
        match line.chars().count() + word.trim_end().chars().count() > columns && !line.trim().is_empty() {
            true => lines.push(word.into()),
            false => line.push_str(word),
        }
    }
    lines.into_iter()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(mounts: &[&Mount], screen: Option<(usize, usize)>) -> Vec<String> {
        of(mounts, screen).into_iter().map(|line| line.into_iter().map(|(_, text)| text).collect()).collect()
    }

    fn busy() -> Mount {
        let save = |at: u64| Save {
            path: format!("{}/checkpoint-{at}", "a-long-name".repeat(9)),
            files: 2,
            bytes: 1 << 40,
            milliseconds: 1000 * at,
            closed: 1_700_000_000,
        };
        let run = |at: u64| Run {
            path: format!("run-{at}"),
            files: 900,
            step: Some(at),
            modified: 1_700_000_000,
            ..Run::default()
        };
        let status = Status {
            daemon: Some(1),
            queued: 7,
            backlog_seconds: Some(90),
            saves: (0..8).map(save).collect(),
            runs: (0..8).map(run).collect(),
            ..Status::default()
        };
        Mount::new("/ckpts".into(), "/store".into(), status)
    }

    #[test]
    fn a_frame_fits_the_screen() {
        let mount = busy();
        let frame = text(&[&mount], Some((80, 24)));
        assert!(frame.len() <= 24 && frame.iter().all(|line| line.chars().count() <= 80), "{frame:#?}");
        for words in ["nothing is wrong", "7 to do, the oldest waits for 90 s", "checkpoint-7", "1.10 TB/s", "run-2"] {
            assert!(frame.iter().any(|line| line.contains(words)), "{words} in {frame:#?}");
        }
        for (columns, rows) in [(0, 0), (1, 1), (20, 5), (80, 10), (200, 100)] {
            for mounts in [vec![], vec![&mount], vec![&mount; 9]] {
                assert!(of(&mounts, Some((columns, rows))).len() <= rows.max(1));
            }
        }
        assert!(text(&[&mount; 9], Some((80, 24))).last().is_some_and(|line| line.starts_with("there is more")));
    }

    #[test]
    fn problems_come_first_and_whole() {
        let mut mount = busy();
        let says = "the daemon has not answered; its log may say why, ".repeat(4);
        mount.status.problems.push(Problem::new("silent", says.trim(), "look at \u{1b}[2J the log"));
        let frame = text(&[&mount], Some((60, 40)));
        assert!(
            frame[3].starts_with("the daemon has not answered") && frame.iter().all(|line| line.chars().count() <= 61)
        );
        assert_eq!(frame[3..7].concat(), says.trim());
        assert_eq!(frame[7], "  look at \\u{1b}[2J the log", "names cannot steer a terminal");
    }
}
