//! `stepfs top`: a screen that follows mounts.

use std::io::{self, IsTerminal, Read};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ratatui::DefaultTerminal;
use ratatui::style::{Color, Style};
use ratatui::text::{Line, Span, Text};

use crate::archive::Status;
use crate::clock::wall_ns;
use crate::fs::{Mounted, all_mounts, mount_of};

use super::color::{self, Look};
use super::format::time;
use super::source::Local;
use super::status::Question;
use super::view::{self, Mount};
use super::{Exit, FAILED, interrupted};

/// Watch mounts on a live screen: the last saves, the backlog, the room, and the newest step of each run.
///
/// It begins with the problems. A save takes from the first open for writing to the last close. The program may compute
/// meanwhile, so its writes may be faster than the speed shown. q, Esc or Ctrl-C ends it.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  \
stepfs top                   all mounts\n  \
stepfs status -v /ckpts      the same as text, for a log or a mail")]
pub(super) struct Args {
    /// A mount, or a path in one. Without it: all mounts that you may ask.
    dir: Option<PathBuf>,
    /// How often to ask the daemons.
    #[arg(long, value_name = "SECONDS", default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    interval: u64,
}

/// A daemon works at most this part of the time for a screen: it looks at the size of every file for an answer.
const PART: u32 = 20;
/// How long a key may wait for its effect, and how often ages are counted anew.
const TICK: Duration = Duration::from_millis(200);

pub(super) fn run(args: Args) -> Result<()> {
    let mut watch = Watch::of(args.dir.as_deref(), Duration::from_secs(args.interval))?;
    if !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        bail!("there is no terminal for a screen; `stepfs status -v` prints the same as text");
    }
    let ended = interrupted()?;
    // It also restores the terminal when a panic unwinds.
    let terminal = ratatui::try_init().context("the terminal cannot show a screen");
    let done = terminal.and_then(|mut terminal| {
        let done = follow(&mut watch, &mut terminal, &ended);
        // It would panic where standard error has gone with the terminal.
        if terminal.show_cursor().is_err() {
            std::mem::forget(terminal);
        }
        done
    });
    // It may be the terminal that went.
    let _ = ratatui::try_restore();
    done
}

/// Shows frames until a key or a signal ends that, or the terminal goes.
fn follow(watch: &mut Watch, terminal: &mut DefaultTerminal, ended: &AtomicBool) -> Result<()> {
    let keys = keys();
    while !ended.load(Ordering::Relaxed) {
        watch.look();
        let mounts = watch.mounts();
        terminal.draw(|screen| {
            let area = screen.area();
            let lines = frame(&mounts, area.width.into(), area.height.into());
            screen.render_widget(Text::from(lines.into_iter().map(styled).collect::<Vec<_>>()), area);
        })?;
        match keys.recv_timeout(TICK) {
            Ok(keys) if is_end(&keys) => return Ok(()),
            Err(RecvTimeoutError::Disconnected) => break,
            _ => {}
        }
    }
    Err(Exit(FAILED).into())
}

/// The frame of these mounts, for a screen of so many columns and rows.
fn frame(mounts: &[&Mount], columns: usize, rows: usize) -> Vec<view::Line> {
    let plain = |text: String| vec![(Look::Plain, text)];
    let now = time(wall_ns() / 1_000_000_000);
    let mut lines = vec![plain(format!("{}   {now}   q ends it", crate::version()))];
    if mounts.is_empty() {
        lines.push(plain("no store is mounted; `stepfs mount STORE DIR` mounts one".into()));
    }
    let each = rows.saturating_sub(1) / mounts.len().max(1);
    for mount in mounts {
        let shown = view::lines(mount, columns);
        let left = each.saturating_sub(shown.len() + 1);
        lines.push(Vec::new());
        lines.extend(shown);
        lines.extend(view::lists(&mount.status, columns, left));
    }
    if lines.len() > rows {
        lines.truncate(rows.saturating_sub(1));
        lines.push(plain("there is more; name one mount, or enlarge the terminal".into()));
    }
    lines
}

/// The keys that are pressed, until the terminal goes. crossterm has events for them, but reads for ever from a terminal
/// that is gone.
fn keys() -> Receiver<Vec<u8>> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let mut keys = [0; 256];
        loop {
            match io::stdin().lock().read(&mut keys) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(count @ 1..) if sender.send(keys[..count].to_vec()).is_ok() => {}
                _ => return,
            }
        }
    });
    receiver
}

/// Whether these are q, Esc or Ctrl-C. Arrows and others send Esc and more.
fn is_end(keys: &[u8]) -> bool {
    keys == [0x1b] || keys[0] != 0x1b && keys.iter().any(|key| [b'q', 3].contains(key))
}

/// A line of the screen, in the colours of [`paint`].
fn styled(line: view::Line) -> Line<'static> {
    let style = |look| match look {
        _ if !color::is_on() => Style::new(),
        Look::Plain => Style::new(),
        Look::Bad => Style::new().fg(Color::Red).bold(),
        Look::Good => Style::new().fg(Color::Green),
        Look::Head => Style::new().bold(),
    };
    line.into_iter().map(|(look, text)| Span::styled(text, style(look))).collect()
}

/// The mounts that a screen follows.
struct Watch {
    /// Follow this one only.
    only: Option<PathBuf>,
    interval: Duration,
    followed: Vec<Followed>,
    /// When the mounts were listed.
    listed: Option<Instant>,
}

/// A mount, and the last answer of its daemon.
struct Followed {
    mounted: Mounted,
    last: Mount,
    /// Asked, and not answered yet. A daemon that hangs is asked once: each question is a process that it holds.
    question: Option<Question>,
    /// When it is asked again.
    next: Instant,
}

impl Watch {
    /// Of the mount that holds `dir`, or of all.
    fn of(dir: Option<&Path>, interval: Duration) -> Result<Watch> {
        // Not through the file system: it may not answer.
        let point = |dir: &Path| match std::path::absolute(dir).ok().and_then(|dir| mount_of(&dir)) {
            Some(mounted) => Ok(mounted.point),
            None => Local::in_mount(dir).map(|(mount, _)| mount.root),
        };
        Ok(Watch { only: dir.map(point).transpose()?, interval, followed: Vec::new(), listed: None })
    }

    fn mounts(&self) -> Vec<&Mount> {
        self.followed.iter().map(|followed| &followed.last).collect()
    }

    /// Takes the answers that came, and asks again where it is time. Waits for nothing.
    fn look(&mut self) {
        if self.listed.is_none_or(|at| at.elapsed() >= self.interval) {
            self.listed = Some(Instant::now());
            self.list();
        }
        self.followed.iter_mut().for_each(|followed| followed.look(self.interval));
    }

    /// Finds the mounts that came and went.
    fn list(&mut self) {
        let is_followed = |mounted: &Mounted| match &self.only {
            Some(point) => mounted.point == *point,
            None => mounted.may_be_asked(),
        };
        let found: Vec<Mounted> = all_mounts().into_iter().filter(is_followed).collect();
        self.followed.retain(|of| found.contains(&of.mounted));
        for mounted in found {
            if self.followed.iter().all(|of| of.mounted != mounted) {
                self.followed.push(Followed::of(mounted));
            }
        }
    }
}

impl Followed {
    fn of(mounted: Mounted) -> Followed {
        let last = Mount::new(mounted.point.clone(), mounted.store.clone(), Status::default());
        Followed { mounted, last, question: None, next: Instant::now() }
    }

    fn look(&mut self, interval: Duration) {
        match &self.question {
            None if self.next <= Instant::now() => self.question = Some(Question::ask(self.mounted.clone())),
            None => {}
            Some(question) => match question.wait(Duration::ZERO) {
                Some(answer) => {
                    let took = question.asked.elapsed();
                    self.next = question.asked + interval.max(took * PART);
                    (self.last, self.question) = (answer, None);
                }
                None if question.has_waited() => self.last = question.unanswered(),
                None => {}
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::archive::{Problem, Run, Save};

    fn text(mounts: &[&Mount], columns: usize, rows: usize) -> Vec<String> {
        frame(mounts, columns, rows).into_iter().map(|line| line.into_iter().map(|(_, text)| text).collect()).collect()
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
            version: crate::version().into(),
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
        let frame = text(&[&mount], 80, 24);
        assert!(frame.len() <= 24 && frame.iter().all(|line| line.chars().count() <= 80), "{frame:#?}");
        for words in ["nothing is wrong", "7 to do, the oldest waits for 90 s", "checkpoint-4", "1.10 TB/s", "run-2"] {
            assert!(frame.iter().any(|line| line.contains(words)), "{words} in {frame:#?}");
        }
        for (columns, rows) in [(0, 0), (1, 1), (20, 5), (80, 10), (200, 100)] {
            for mounts in [vec![], vec![&mount], vec![&mount; 9]] {
                assert!(super::frame(&mounts, columns, rows).len() <= rows.max(1));
            }
        }
        assert!(text(&[&mount; 9], 80, 24).last().is_some_and(|line| line.starts_with("there is more")));
    }

    #[test]
    fn problems_come_first_and_whole() {
        let mut mount = busy();
        let says = "the daemon has not answered; its log may say why, ".repeat(4);
        mount.status.problems.push(Problem::new("silent", says.trim(), "look at \u{1b}[2J the log"));
        let frame = text(&[&mount], 60, 40);
        assert!(frame[2] == "1 problem" && frame.iter().all(|line| line.chars().count() <= 61), "{frame:#?}");
        assert_eq!(frame[3..7].iter().map(|line| &line[2..]).collect::<String>(), says.trim());
        assert_eq!(frame[7], "    look at \\u{1b}[2J the log", "names cannot steer a terminal");
    }
}
