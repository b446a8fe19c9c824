//! The output of `stepfs tune`.

use std::path::Path;

use serde::Serialize;

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

/// A run's result.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) files: Vec<String>,
    /// All of them in hexadecimal, if one is not UTF-8.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) files_bytes: Vec<String>,
    pub(super) file_bytes: u64,
    pub(super) eval: Option<String>,
    pub(super) exact_score: Option<f64>,
    pub(super) tolerance: f64,
    /// The tolerance is a difference of scores, not a share.
    #[serde(skip)]
    pub(super) absolute: bool,
    /// The profile to use.
    pub(super) chosen: String,
    pub(super) candidates: Vec<Candidate>,
}

/// The smallest good candidate; among equal sizes the better one. The first is `exact`, which is always good.
pub(super) fn smallest(candidates: &[Candidate]) -> &Candidate {
    let better = |a: &Candidate, b: &Candidate| {
        b.good && a.bytes.cmp(&b.bytes).then(a.degradation.total_cmp(&b.degradation)).is_gt()
    };
    candidates.iter().fold(&candidates[0], |best, next| if better(best, next) { next } else { best })
}

impl Report {
    /// The choice, then all candidates.
    pub(super) fn words(&self, file: &Path) -> String {
        let (tolerance, scored) = (self.tolerance, self.exact_score.is_some());
        let good = match (scored, self.absolute) {
            (true, true) => format!("at most {tolerance} worse"),
            (true, false) => format!("at most {}% worse", 100.0 * tolerance),
            (false, _) => format!("an error of at most {tolerance} of the update"),
        };
        let of_score = if scored { [">score", ">worse"] } else { [">", ">"] };
        let head = ["profile", ">bytes", ">share", ">error", ""].into_iter().chain(of_score);
        let rows = self.candidates.iter().map(|of| {
            let (share, good) = (percent(of.bytes, self.file_bytes), if of.good { "ok" } else { "no" });
            let about = [of.profile.clone(), size(of.bytes), share, format!("{:.4}", of.error), good.into()];
            let score = of.score.map(|score| [format!("{score:.6}"), format!("{:.5}", of.degradation)]);
            about.into_iter().chain(score.into_iter().flatten()).collect()
        });
        let table = table(&head.collect::<Vec<_>>(), &rows.collect::<Vec<Vec<_>>>());
        let score = self.exact_score.map_or(String::new(), |score| format!(", score {score}"));
        let (file, whole) = (name(file), size(self.file_bytes));
        format!("Use {}\n\n{file}: {whole}{score}\nGood enough: {good}\n\n{table}", self.chosen)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(profile: &str, bytes: u64, degradation: f64) -> Candidate {
        let good = degradation <= 0.01;
        Candidate {
            profile: profile.into(),
            bytes,
            series_bytes: vec![bytes],
            error: 0.0,
            score: None,
            degradation,
            good,
        }
    }

    #[test]
    fn the_smallest_that_is_good_enough_is_chosen() {
        let chosen = |own: u64, bytes: u64, worse: f64| {
            let all = [
                candidate("exact", 900, 0.0),
                candidate("balanced", own, 0.001),
                candidate("compact", 1, f64::NAN),
                candidate("inshrinkerator-12bins", bytes, worse),
            ];
            smallest(&all).profile.clone()
        };
        assert_eq!(chosen(100, 200, 0.005), "balanced");
        assert_eq!(chosen(300, 200, 0.005), "inshrinkerator-12bins");
        assert_eq!(chosen(300, 200, 0.02), "balanced");
        assert_eq!(chosen(300, 300, 0.0), "inshrinkerator-12bins");
        assert_eq!(chosen(1000, 200, f64::NAN), "exact");
    }
}
