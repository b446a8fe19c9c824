//! What a user says of a mirror, and what a user learns of it.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// How a store uses its mirror.
#[derive(Clone, Debug)]
pub struct Settings {
    /// `file:///DIRECTORY` or `s3://BUCKET/PREFIX`.
    pub url: String,
    /// How long states stay that were true once.
    pub keep: Duration,
    /// Bytes a second.
    pub bandwidth: Option<f64>,
}

/// What `stepfs status` shows of a mirror.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// Its URL.
    pub url: String,
    /// Files that are not there yet, of those that can be.
    pub files: u64,
    /// Bytes of them, as programs see them.
    pub bytes: u64,
    /// How long the oldest of them has waited.
    pub lag_seconds: Option<u64>,
    /// The present change.
    pub changes: u64,
    /// The mirror has all changes up to this one.
    pub done: u64,
    /// The same for the files that do not fail.
    pub others: u64,
    /// Why it does not go on at the moment.
    pub failing: Option<String>,
    /// Some of the files that fail, each with the reason.
    pub failed: Vec<String>,
}
