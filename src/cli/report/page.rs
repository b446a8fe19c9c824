//! The page: HTML in which every name is escaped, since `maud` escapes all that is no markup.

use std::path::Path;

use maud::{DOCTYPE, Markup, PreEscaped, html};

use crate::archive::{Part, room};
use crate::cli::format::{name, percent, size, time, utc};
use crate::cli::latest::{newest_first, stated_best};
use crate::cli::listing::{Checkpoint, Entry, in_updates};
use crate::cli::view::{less_each_day, room_words};
use crate::store::step_pattern;

use super::chart::{Axis, Chart, Lane, Line, Numbers};
use super::{By, Heat, Report, heat};

const STYLE: &str = include_str!("style.css");
/// No browser loads or runs anything for the page, even if a name could become markup.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'";
const SECOND_NS: i64 = 1_000_000_000;

pub(super) fn page(report: &Report) -> Markup {
    let title = format!("{}: stepfs report", name(report.run()));
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta http-equiv="Content-Security-Policy" content=(POLICY);
                title { (title) }
                style { (PreEscaped(STYLE)) }
            }
            body {
                (report.head())
                main {
                    div.charts {
                        (report.sizes())
                        (report.timeline())
                        (report.errors())
                        (report.losses())
                    }
                    (report.heat.figure(report.by))
                    (report.table())
                }
                footer {
                    p { "Made by " (crate::version()) " at " (iso(report.now_ns)) ". Times in charts and tables are local." }
                }
            }
        }
    }
}

/// A time for programs, in UTC.
fn iso(ns: i64) -> String {
    utc((ns / SECOND_NS).max(0) as u64)
}

fn bytes(count: u64) -> Markup {
    html! { data value=(count) { (size(count)) } }
}

fn when(ns: i64) -> String {
    time(ns / SECOND_NS)
}

impl Report<'_> {
    /// The last part of the run's place.
    fn run(&self) -> String {
        let last = self.name.trim_end_matches('/').rsplit(['/', ':']).next();
        match last {
            None | Some("." | "..") => {
                let absolute = std::fs::canonicalize(self.name).unwrap_or_default();
                absolute.file_name().unwrap_or_default().to_string_lossy().into_owned()
            }
            Some(last) => last.into(),
        }
    }

    /// A path below the run.
    fn path(&self, checkpoint: &Checkpoint) -> String {
        let run = self.survey.local.as_ref().map_or(Path::new(""), |local| &local.path);
        let below = checkpoint.path.strip_prefix(run).unwrap_or(&checkpoint.path);
        let slash = if checkpoint.is_directory { "/" } else { "" };
        let shown = if below == Path::new("") { &*checkpoint.path } else { below };
        format!("{}{slash}", name(shown))
    }

    /// A checkpoint for a tooltip.
    fn told(&self, checkpoint: &Checkpoint) -> String {
        format!("{}, {}: {}", self.path(checkpoint), when(checkpoint.modified_ns), checkpoint.fidelity.words())
    }

    /// The bytes that programs see, and those in the store, of all files.
    fn totals(&self) -> (u64, u64) {
        self.all.iter().fold((0, 0), |(a, b), of| (a + of.logical_bytes(), b + of.stored_bytes()))
    }

    fn head(&self) -> Markup {
        let (plain, stored) = self.totals();
        let newest = newest_first(self.all).0.into_iter().find(|state| state.is_state());
        let best = stated_best(self.all);
        let is_mounted = self.survey.local.as_ref().is_some_and(|local| local.mount.is_some());
        let bad: Vec<&&Checkpoint> = self.states.iter().filter(|state| state.fidelity.is_bad()).collect();
        let tile =
            |of: &Checkpoint| html! { (self.path(of)) small { (when(of.modified_ns)) ", " (of.fidelity.words()) } };
        html! {
            header {
                h1 { (name(self.run())) }
                p { (name(self.name)) ", on " (when(self.now_ns)) }
                dl {
                    div { dt { "Checkpoints" } dd id="count" { (self.states.len()) } }
                    div {
                        @if self.survey.local.is_none() { dt { "Size" } dd { (bytes(plain)) } }
                        @else { dt { "Stored" } dd { (bytes(stored)) small { (percent(stored, plain)) " of " (bytes(plain)) } } }
                    }
                    div { dt { "Newest whole" } dd id="newest" { @match newest { Some(newest) => (tile(newest)), None => "none" } } }
                    div {
                        dt { "Best" }
                        dd id="best" {
                            @match best[..] {
                                [] if is_mounted => { "-" small { "no file, link or name tells it" } }
                                [] => { "-" small { "only a mount tells it: `stepfs mount` the run, and report there" } }
                                [best] => (tile(best)),
                                ref several => { (several.len()) small { "of several runs" } }
                            }
                        }
                    }
                    div { dt { "Problems" } dd id="problems" class=[(!bad.is_empty()).then_some("bad")] { (bad.len()) } }
                }
                @if !bad.is_empty() {
                    ul.problems id="problem-list" {
                        @for state in &bad {
                            li {
                                strong.bad { (state.fidelity.words()) } " " (self.path(state))
                                @for why in state.entries.iter().filter_map(|entry| entry.cut_short.as_ref().or(entry.damage.as_ref())).take(1) {
                                    ": " (name(why))
                                }
                            }
                        }
                    }
                }
            }
        }
    }

    /// The horizontal axis of these places.
    fn axis(&self, places: impl IntoIterator<Item = f64>) -> Axis {
        match self.by {
            By::Step => Axis::of(places, Numbers::Whole, false).named("step"),
            By::Time(first) => since(Axis::of(places, Numbers::Seconds, false), first),
        }
    }

    fn sizes(&self) -> Markup {
        let mut all: Vec<&Checkpoint> = self.all.iter().collect();
        all.sort_by_key(|of| of.modified_ns);
        let first = all.first().map_or(0, |of| of.modified_ns);
        let line = |name: &str, bytes: fn(&Checkpoint) -> u64| {
            let mut sum = 0;
            let point = |of: &&Checkpoint| {
                sum += bytes(of);
                let text = format!("{}: {} {name}", self.path(of), size(sum));
                ((of.modified_ns - first) as f64 / 1e9, sum as f64, text)
            };
            Line { name: name.into(), points: all.iter().map(point).collect(), is_joined: true }
        };
        let mut lines = vec![line("as plain files", |of| of.logical_bytes())];
        let (plain, stored) = self.totals();
        let mut text = format!("All files together take {}", size(plain));
        if self.survey.local.is_some() {
            lines.insert(0, line("in the store", |of| of.stored_bytes()));
            text = format!("All files together take {} in the store, and {} as plain files", size(stored), size(plain));
        }
        text += &format!(". {}", self.forecast().unwrap_or_default());
        let points = || lines.iter().flat_map(|line| &line.points);
        let x = since(Axis::of(points().map(|point| point.0), Numbers::Seconds, false), first);
        let y = Axis::of(points().map(|point| point.1).chain([0.0]), Numbers::Bytes, true);
        Chart { id: "sizes", title: "Size over time", text, x: &x }.lines(&y, &lines)
    }

    /// The free room on the disk, and how many checkpoints it is for, by the rule of `stepfs status`.
    fn forecast(&self) -> Option<String> {
        let free = self.survey.free?;
        let part = |entry: &&Entry| Part {
            path: entry.at.to_path_buf(),
            run: step_pattern::run(&entry.at).into(),
            modified_ns: entry.modified_ns,
            logical: entry.logical_bytes,
            stored: entry.stored_bytes,
            shrinks: false,
        };
        let mut parts: Vec<Part> = self.states.iter().flat_map(|state| &state.entries).map(part).collect();
        let room = room(&mut parts, free, &[], self.now_ns / SECOND_NS)?;
        let (free, pace) = (size(free), less_each_day(&room));
        Some(format!("The disk has {free} free{pace}. Room: {}.", room_words(&room)))
    }

    fn timeline(&self) -> Markup {
        type Is = fn(&Checkpoint) -> bool;
        let kinds: [(&str, Is); 5] = [
            ("exact", |of| of.fidelity.is_exact()),
            ("lossy", |of| !of.fidelity.is_exact() && !of.fidelity.is_bad()),
            ("best", |of| of.fidelity.is_best),
            ("pinned", |of| of.fidelity.pinned),
            ("cut short, damaged, unfinished or not finite", |of| of.fidelity.is_bad()),
        ];
        let lane = |(shape, (name, is)): (usize, (&'static str, Is))| {
            let of = self.states.iter().filter(|state| is(state));
            Lane { name, shape, points: of.map(|state| (self.by.at(state), self.told(state))).collect() }
        };
        let lanes: Vec<Lane> = kinds.into_iter().enumerate().map(lane).filter(|lane| !lane.points.is_empty()).collect();
        let counts: Vec<String> = lanes.iter().map(|lane| format!("{} {}", lane.points.len(), lane.name)).collect();
        let text = format!("Each checkpoint has a mark: {}.", counts.join(", "));
        let x = self.axis(self.states.iter().map(|state| self.by.at(state)));
        Chart { id: "timeline", title: "Checkpoints", text, x: &x }.lanes(&lanes)
    }

    fn errors(&self) -> Markup {
        let point = |state: &&Checkpoint| {
            let error = state.fidelity.error()?;
            Some((self.by.at(state), error, self.told(state)))
        };
        let points: Vec<_> = self.states.iter().filter_map(point).collect();
        let Some(most) = points.iter().map(|point| point.1).max_by(f64::total_cmp) else { return html! {} };
        let text = format!(
            "The largest error of a weight in each lossy checkpoint: at most {}. 1 is as far as training moved that weight's \
             tensor, in root mean square, to the next checkpoint.",
            in_updates(most)
        );
        let x = self.axis(self.states.iter().map(|state| self.by.at(state)));
        let y = Axis::of([0.0, most], Numbers::Any, true).named("updates");
        Chart { id: "errors", title: "Errors of lossy checkpoints", text, x: &x }
            .lines(&y, &[Line { name: String::new(), points, is_joined: false }])
    }

    fn losses(&self) -> Markup {
        if self.losses.is_empty() {
            return html! {};
        }
        let values = || self.losses.iter().flat_map(|line| &line.points);
        let names: Vec<&str> = self.losses.iter().map(|line| line.name.as_str()).collect();
        let x = self.axis(values().map(|point| point.0));
        let y = Axis::of(values().map(|point| point.1), Numbers::Any, true);
        Chart { id: "losses", title: "Loss", text: format!("The checkpoints hold it: {}.", names.join(", ")), x: &x }
            .lines(&y, &self.losses)
    }

    fn table(&self) -> Markup {
        html! {
            figure.wide id="table" {
                h2 { "All checkpoints and files" }
                div.scroll tabindex="0" role="region" aria-label="Table of all checkpoints" {
                    table {
                        thead {
                            tr {
                                th.number scope="col" { "step" } th scope="col" { "time" } th.number scope="col" { "size" }
                                th.number scope="col" { "stored" } th scope="col" { "faithful" } th scope="col" { "path" }
                            }
                        }
                        tbody {
                            @for of in self.all {
                                tr {
                                    td.number { @if let Some(step) = of.step { (step) } }
                                    td { time datetime=(iso(of.modified_ns)) { (when(of.modified_ns)) } }
                                    td.number { (bytes(of.logical_bytes())) }
                                    td.number { (bytes(of.stored_bytes())) }
                                    td class=[of.fidelity.is_bad().then_some("bad")] { (of.fidelity.words()) }
                                    td { (self.path(of)) }
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

/// An axis of seconds after a time.
fn since(axis: Axis, first_ns: i64) -> Axis {
    let name = format!("{} since {}", axis.name, when(first_ns));
    axis.named(name)
}

impl Heat<'_> {
    fn figure(&self, by: By) -> Markup {
        if self.updates.pairs.is_empty() && self.updates.unread.is_empty() {
            return html! {};
        }
        let of = |at: usize| match by {
            By::Step => self.states[at].step.map(|step| step.to_string()).unwrap_or_default(),
            By::Time(_) => (at + 1).to_string(),
        };
        let columns: Vec<(String, String)> = self.updates.pairs.iter().map(|(a, b)| (of(*a), of(*b))).collect();
        let mut text = String::from(
            "The norm of each weight's change from one checkpoint to the next, divided by its norm before. A column is named \
             after the later checkpoint.",
        );
        if self.states.len() < self.of {
            text += &format!(" Only {} of {} checkpoints are compared, evenly spaced.", self.states.len(), self.of);
        }
        if self.others > 0 {
            text += &format!(" {} checkpoints of other series are left out.", self.others);
        }
        if self.updates.left_out > 0 {
            text += &format!(
                " The {} largest weights are shown, without {} others.",
                self.updates.rows.len(),
                self.updates.left_out
            );
        }
        html! {
            figure.wide id="updates" {
                figcaption { h2 { "Size of the updates" } p { (text) } }
                @for (at, why) in &self.updates.unread {
                    p.note { "Not read: " (name(&*self.states[*at].path)) ": " (name(why)) }
                }
                @if !columns.is_empty() { (heat::map(&self.updates.rows, &columns)) }
            }
        }
    }
}
