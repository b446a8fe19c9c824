//! The output of `stepfs tune`.

use std::io::{self, Write};
use std::path::PathBuf;

use anyhow::Result;
use indicatif::ProgressBar;
use serde::Serialize;

use crate::store::{Profile, names_bytes};
use crate::terminal::format::{name, percent, progress, size};

use super::trial::Trial;

/// A profile that was tried.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Candidate {
    pub(super) profile: String,
    /// Size of the last file's object.
    pub(super) bytes: u64,
    /// Sizes of all objects, in order.
    pub(super) series_bytes: Vec<u64>,
    /// Root mean square error of the weights, relative to that of their last update.
    pub(super) error: f64,
    /// The score that CMD printed. `None` without CMD; in JSON also if the score is not finite.
    pub(super) score: Option<f64>,
    /// How much worse that score is than the exact file's; without CMD the error.
    pub(super) degradation: f64,
    /// Within the tolerance.
    pub(super) good: bool,
}

impl Candidate {
    fn is_own(&self) -> bool {
        Profile::ALL.iter().any(|own| own.name() == self.profile)
    }
}

/// A run's result.
#[derive(Debug)]
pub(super) struct Report {
    pub(super) file_bytes: u64,
    pub(super) eval: Option<String>,
    pub(super) exact_score: Option<f64>,
    pub(super) tolerance: f64,
    pub(super) inshrinkerator_only: bool,
    pub(super) candidates: Vec<Candidate>,
    /// All candidates, as a table.
    pub(super) table: Vec<String>,
}

/// The result as JSON.
#[derive(Serialize)]
struct Json<'a> {
    files: Vec<String>,
    /// All of them in hexadecimal, if one is not UTF-8.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    files_bytes: Vec<String>,
    file_bytes: u64,
    eval: &'a Option<String>,
    exact_score: Option<f64>,
    tolerance: f64,
    candidates: &'a [Candidate],
    best_own: Option<&'a str>,
    best_inshrinkerator: Option<&'a str>,
    chosen: Option<&'a str>,
}

/// Prints a line for people.
pub(super) fn say(line: &str) -> Result<()> {
    Ok(writeln!(io::stdout(), "{line}")?)
}

impl Report {
    /// The smallest good candidate; among equal sizes the better one.
    fn best(&self, own: bool) -> Option<&Candidate> {
        let good = self.candidates.iter().filter(|candidate| candidate.good && candidate.is_own() == own);
        good.min_by(|a, b| a.bytes.cmp(&b.bytes).then(a.degradation.total_cmp(&b.degradation)))
    }

    /// The profile to use.
    pub(super) fn chosen(&self) -> Option<&Candidate> {
        let (own, theirs) = (self.best(true).filter(|_| !self.inshrinkerator_only), self.best(false));
        match (own, theirs) {
            (Some(own), Some(theirs)) if theirs.bytes < own.bytes => Some(theirs),
            (own, theirs) => own.or(theirs),
        }
    }

    pub(super) fn print_json(&self, files: &[PathBuf]) -> Result<()> {
        let profile = |candidate: Option<&'_ Candidate>| candidate.map(|candidate| candidate.profile.clone());
        let (own, theirs, chosen) = (profile(self.best(true)), profile(self.best(false)), profile(self.chosen()));
        let json = Json {
            files: files.iter().map(|file| file.to_string_lossy().into_owned()).collect(),
            files_bytes: names_bytes(files.iter().map(PathBuf::as_path)),
            file_bytes: self.file_bytes,
            eval: &self.eval,
            exact_score: self.exact_score,
            tolerance: self.tolerance,
            candidates: &self.candidates,
            best_own: own.as_deref(),
            best_inshrinkerator: theirs.as_deref(),
            chosen: chosen.as_deref(),
        };
        say(&serde_json::to_string_pretty(&json)?)
    }

    /// Prints the verdict, then all candidates.
    pub(super) fn print(&self) -> Result<()> {
        let blank = [String::new()];
        self.verdict().iter().chain(&blank).chain(&self.table).try_for_each(|line| say(line))
    }

    /// The result in words.
    fn verdict(&self) -> Vec<String> {
        let tried = self.candidates.iter().filter(|candidate| !candidate.is_own()).count();
        let what = |candidate: &Candidate| {
            let share = percent(candidate.bytes, self.file_bytes);
            format!("{}: {} ({share}), {}", candidate.profile, size(candidate.bytes), self.cost(candidate))
        };
        let (own, theirs) = (self.best(true), self.best(false));
        let mut lines = vec![match self.chosen() {
            Some(chosen) => format!("Use {}", what(chosen)),
            None => "No profile is good enough".into(),
        }];
        lines.push(match theirs {
            Some(theirs) => format!("Inshrinkerator's best of {tried} configurations is {}", what(theirs)),
            None => format!("None of the {tried} configurations of Inshrinkerator that were tried is good enough"),
        });
        lines.extend(own.map(|own| format!("The best of stepfs's own profiles is {}", what(own))));
        if let (Some(own), Some(theirs)) = (own, theirs) {
            let better = own.degradation <= theirs.degradation;
            lines.push(match (own.bytes <= theirs.bytes, better) {
                (true, true) => format!("{} takes less room, and is at least as good", own.profile),
                (true, false) => format!("{} takes less room; {} is better", own.profile, theirs.profile),
                (false, true) => format!("{} takes less room; {} is better", theirs.profile, own.profile),
                (false, false) => format!("{} takes less room, and is better", theirs.profile),
            });
        }
        lines
    }

    fn cost(&self, candidate: &Candidate) -> String {
        match (self.exact_score, candidate.score) {
            (Some(exact), Some(score)) => format!("score {score} instead of {exact}"),
            _ => format!("error {:.3} of the update", candidate.error),
        }
    }
}

/// One line per candidate. Shows them as they come: on standard error if standard output is JSON, else beside a bar.
pub(super) struct Table {
    json: bool,
    pub(super) lines: Vec<String>,
    bar: ProgressBar,
    file: String,
    file_bytes: u64,
    scored: bool,
}

/// Longer than the names of most configurations.
const NAME_COLUMNS: usize = 44;

impl Table {
    pub(super) fn new(json: bool, trial: &Trial, scored: bool) -> Table {
        let file = name(&trial.last().display().to_string());
        Table { json, lines: Vec::new(), bar: progress(0, false), file, file_bytes: trial.last_bytes(), scored }
    }

    fn print(&mut self, line: &str) -> Result<()> {
        if self.json {
            writeln!(io::stderr(), "{}", line.trim_end())?;
        }
        self.lines.push(line.trim_end().into());
        Ok(())
    }

    pub(super) fn begin(&mut self, exact_score: Option<f64>, tolerance: f64, absolute: bool) -> Result<()> {
        let score = exact_score.map_or(String::new(), |score| format!(", score {score}"));
        self.print(&format!("{}: {}{score}", self.file, size(self.file_bytes)))?;
        let of = match (self.scored, absolute) {
            (true, true) => format!("at most {tolerance} worse"),
            (true, false) => format!("at most {}% worse", 100.0 * tolerance),
            (false, _) => format!("an error of at most {tolerance} of the update"),
        };
        self.print(&format!("Good enough: {of}\n"))?;
        let score = if self.scored { format!("{:>14}  {:>9}", "score", "worse") } else { String::new() };
        self.print(&format!("{:NAME_COLUMNS$}  {:>9}  {:>6}  {:>9}  {score}", "profile", "bytes", "share", "error"))
    }

    pub(super) fn row(&mut self, candidate: &Candidate) -> Result<()> {
        self.bar.set_message(candidate.profile.clone());
        self.bar.inc_length(1);
        self.bar.inc(1);
        let (share, error) = (percent(candidate.bytes, self.file_bytes), candidate.error);
        let score = match candidate.score {
            Some(score) => format!("{score:>14.6}  {:>9.5}", candidate.degradation),
            None => String::new(),
        };
        let good = if candidate.good { "ok" } else { "no" };
        let (profile, bytes) = (&candidate.profile, size(candidate.bytes));
        self.print(&format!("{profile:NAME_COLUMNS$}  {bytes:>9}  {share:>6}  {error:>9.4}  {score}  {good}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(profile: &str, bytes: u64, degradation: f64) -> Candidate {
        let score = Some(1.0 + degradation);
        let good = degradation <= 0.01;
        Candidate { profile: profile.into(), bytes, series_bytes: vec![bytes], error: 0.0, score, degradation, good }
    }

    fn report(candidates: Vec<Candidate>, inshrinkerator_only: bool) -> Report {
        let (exact_score, tolerance) = (Some(1.0), 0.01);
        Report {
            file_bytes: 1000,
            eval: None,
            exact_score,
            tolerance,
            inshrinkerator_only,
            candidates,
            table: Vec::new(),
        }
    }

    #[test]
    fn the_smallest_that_is_good_enough_is_chosen() {
        let theirs = "inshrinkerator-12bins";
        let all = |own: u64, bytes: u64, worse: f64| {
            let nan = candidate("compact", 1, f64::NAN);
            vec![candidate("exact", 900, 0.0), candidate("balanced", own, 0.001), nan, candidate(theirs, bytes, worse)]
        };
        let chosen = |candidates, only| report(candidates, only).chosen().map(|chosen| chosen.profile.clone());
        assert_eq!(chosen(all(100, 200, 0.005), false).unwrap(), "balanced");
        assert_eq!(chosen(all(100, 200, 0.005), true).unwrap(), theirs);
        assert_eq!(chosen(all(300, 200, 0.005), false).unwrap(), theirs);
        assert_eq!(chosen(all(300, 200, 0.02), false).unwrap(), "balanced");
        assert_eq!(chosen(all(300, 200, f64::NAN), true), None);
    }

    #[test]
    fn it_says_who_is_smaller_and_who_is_better() {
        let last = |own: (u64, f64), theirs: (u64, f64)| {
            let candidates =
                vec![candidate("balanced", own.0, own.1), candidate("inshrinkerator-3", theirs.0, theirs.1)];
            report(candidates, false).verdict().pop().unwrap()
        };
        assert_eq!(last((1, 0.0), (2, 0.001)), "balanced takes less room, and is at least as good");
        assert_eq!(last((1, 0.002), (2, 0.001)), "balanced takes less room; inshrinkerator-3 is better");
        assert_eq!(last((3, 0.0), (2, 0.001)), "inshrinkerator-3 takes less room; balanced is better");
        assert_eq!(last((3, 0.002), (2, 0.001)), "inshrinkerator-3 takes less room, and is better");
        let none = report(vec![candidate("balanced", 1, 0.0), candidate("inshrinkerator-3", 2, 1.0)], false).verdict();
        assert!(none[1].starts_with("None of the 1 configurations"), "{none:?}");
    }
}
