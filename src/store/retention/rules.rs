//! `[[retention]]` in `stepfs.toml`: parses the rules, and refuses nonsense.

use std::path::Path;

use globset::GlobMatcher;
use serde::{Deserialize, Serialize};

use crate::store::profile;

/// A rule as written.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(in crate::store) struct RuleText {
    glob: String,
    keep_last: Option<u64>,
    keep_every: Option<u64>,
    keep_for: Option<String>,
    keep_checkpoint_max: Option<u64>,
}

/// A rule: the checkpoints that it matches, and the ones that it keeps. A checkpoint stays if any `keep_*` keeps it.
#[derive(Clone, Debug)]
pub struct Rule {
    /// As written.
    pub glob: String,
    /// Keeps this many of the newest complete ones of each series; at least 1.
    pub keep_last: Option<u64>,
    /// Keeps those whose step is a multiple of this; at least 1.
    pub keep_every: Option<u64>,
    /// Keeps those younger than this, in nanoseconds and as written.
    pub keep_for: Option<(u64, String)>,
    /// ElasticDL's: keeps this many of the newest valid version directories; 0 keeps all.
    pub keep_checkpoint_max: Option<u64>,
    matcher: GlobMatcher,
    /// It ends in a slash: for directories only.
    directories: bool,
    /// Its last part has no literal text: `*`, `**`.
    wild: bool,
}

impl Rule {
    /// A rule that matches every checkpoint, and keeps all.
    ///
    /// # Errors
    /// None but a defect.
    pub fn all() -> Result<Rule, String> {
        rule(&RuleText {
            glob: "**".into(),
            keep_last: Some(u64::MAX),
            keep_every: None,
            keep_for: None,
            keep_checkpoint_max: None,
        })
    }

    /// True if it matches this path inside the tree.
    pub fn matches(&self, path: &Path, directory: bool) -> bool {
        (directory || !self.directories) && self.matcher.is_match(path)
    }

    /// True if it would match any directory name, `exp1` as well as `checkpoint-1`.
    pub fn is_wild(&self) -> bool {
        self.wild
    }
}

/// Checks the rules.
///
/// # Errors
/// A rule is wrong; the message for its author names it.
pub(in crate::store) fn parse(texts: Vec<RuleText>) -> Result<Vec<Rule>, String> {
    texts.into_iter().map(|text| rule(&text).map_err(|why| format!("retention rule {:?}: {why}", text.glob))).collect()
}

fn rule(text: &RuleText) -> Result<Rule, String> {
    let glob = text.glob.trim_end_matches('/');
    if glob.is_empty() {
        return Err("a glob is needed, such as \"run/checkpoint-*\"".into());
    }
    if glob.starts_with('/') || glob.starts_with("./") || glob.split('/').any(|part| part == "..") {
        return Err("a glob matches the path inside the mount: no `/` or `./` before it, no `..`".into());
    }
    let matcher = profile::glob(glob).map_err(|error| error.to_string())?;
    let RuleText { keep_last, keep_every, keep_for, keep_checkpoint_max, .. } = text;
    if keep_last.is_none() && keep_every.is_none() && keep_for.is_none() && keep_checkpoint_max.is_none() {
        return Err("it keeps nothing; give keep_last, keep_every, keep_for or keep_checkpoint_max".into());
    }
    if *keep_last == Some(0) {
        return Err("keep_last = 0 is impossible, since the newest complete checkpoint always stays; write 1".into());
    }
    if *keep_every == Some(0) {
        return Err("keep_every = 0: no step is a multiple of 0".into());
    }
    let keep_for = keep_for.as_ref().map(|text| duration(text).map(|span| (span, text.trim().to_string())));
    Ok(Rule {
        glob: text.glob.clone(),
        keep_last: *keep_last,
        keep_every: *keep_every,
        keep_for: keep_for.transpose()?,
        keep_checkpoint_max: *keep_checkpoint_max,
        matcher,
        directories: glob.len() < text.glob.len(),
        wild: glob.rsplit('/').next().is_some_and(|part| !part.chars().any(char::is_alphanumeric)),
    })
}

/// A span of time such as `7d`, in nanoseconds.
///
/// # Errors
/// It is none; says so.
pub fn duration(text: &str) -> Result<u64, String> {
    let wrong = || format!("keep_for = {text:?}: write a whole number and s, m, h, d or w, such as \"7d\"");
    let trimmed = text.trim();
    let digits = trimmed.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let seconds: u64 = match &trimmed[digits.len()..] {
        "s" => 1,
        "m" => 60,
        "h" => 3600,
        "d" => 86_400,
        "w" => 7 * 86_400,
        _ => return Err(wrong()),
    };
    // `parse` would accept a plus sign.
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(wrong());
    }
    let long = || format!("keep_for = {text:?} is longer than 292 years");
    let count: u64 = digits.parse().map_err(|_| long())?;
    let span = count.checked_mul(seconds).and_then(|seconds| seconds.checked_mul(1_000_000_000));
    // Ages are differences of times of 63 bits.
    span.filter(|span| i64::try_from(*span).is_ok()).ok_or_else(long)
}

#[cfg(test)]
mod tests;
