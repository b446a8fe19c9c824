//! The output of `stepfs tune`.

use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::{Value, json};

use crate::store::{Profile, names_bytes};
use crate::terminal::format::{name, percent, size, table};

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
    /// The tolerance is a difference of scores, not a share.
    pub(super) absolute: bool,
    pub(super) inshrinkerator_only: bool,
    pub(super) candidates: Vec<Candidate>,
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

    pub(super) fn json(&self, files: &[PathBuf]) -> Value {
        let profile = |candidate: Option<&'_ Candidate>| candidate.map(|candidate| candidate.profile.clone());
        let mut json = json!({
            "files": files.iter().map(|file| file.to_string_lossy()).collect::<Vec<_>>(),
            "file_bytes": self.file_bytes,
            "eval": self.eval,
            "exact_score": self.exact_score,
            "tolerance": self.tolerance,
            "candidates": self.candidates,
            "best_own": profile(self.best(true)),
            "best_inshrinkerator": profile(self.best(false)),
            "chosen": profile(self.chosen()),
        });
        // All of them in hexadecimal, if one is not UTF-8.
        let bytes = names_bytes(files.iter().map(PathBuf::as_path));
        if !bytes.is_empty() {
            json["files_bytes"] = bytes.into();
        }
        json
    }

    /// The verdict, then all candidates.
    pub(super) fn words(&self, file: &Path) -> String {
        let (tolerance, scored) = (self.tolerance, self.exact_score.is_some());
        let good = match (scored, self.absolute) {
            (true, true) => format!("at most {tolerance} worse"),
            (true, false) => format!("at most {}% worse", 100.0 * tolerance),
            (false, _) => format!("an error of at most {tolerance} of the update"),
        };
        let of_score = if scored { ["score", "worse"] } else { ["", ""] };
        let head = ["profile", "bytes", "share", "error", ""].into_iter().chain(of_score);
        let mut rows = vec![head.map(String::from).collect()];
        rows.extend(self.candidates.iter().map(|of| {
            let (share, good) = (percent(of.bytes, self.file_bytes), if of.good { "ok" } else { "no" });
            let about = [of.profile.clone(), size(of.bytes), share, format!("{:.4}", of.error), good.into()];
            let score = of.score.map(|score| [format!("{score:.6}"), format!("{:.5}", of.degradation)]);
            about.into_iter().chain(score.into_iter().flatten()).collect()
        }));
        let table = table(&rows, &[false, true, true, true, false, true, true]);
        let score = self.exact_score.map_or(String::new(), |score| format!(", score {score}"));
        let (file, whole) = (name(&file.display().to_string()), size(self.file_bytes));
        format!("{}\n\n{file}: {whole}{score}\nGood enough: {good}\n\n{table}", self.verdict().join("\n"))
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
            absolute: false,
            inshrinkerator_only,
            candidates,
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
