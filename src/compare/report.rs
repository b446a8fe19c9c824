//! The measurements, for people and for programs.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;

use crate::store::names_bytes;

use super::series::Scale;
use super::values::Size;
use super::{Codec, Series};

/// The word for all bytes of files and objects outside of tensors: names, lengths, and small tensors, which a store
/// keeps among them.
pub(super) const SKELETON: &str = "skeleton";

/// A comparison.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The files, oldest first.
    pub files: Vec<String>,
    /// All of them in hexadecimal, if one is not UTF-8.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub files_bytes: Vec<String>,
    /// Parameters of the newest.
    pub parameters: u64,
    /// Root mean square of the parameters, over all files.
    pub weights_rms: f64,
    /// Root mean square of their updates from each file to the next.
    pub update_rms: f64,
    /// One for each codec, in the order asked for.
    pub codecs: Vec<Kept>,
}

/// A codec's results.
#[derive(Clone, Debug, Serialize)]
pub struct Kept {
    /// The codec's name.
    pub name: String,
    /// A line about it.
    pub about: &'static str,
    /// Bytes that each file takes. In a store: the length of its object, and its stub.
    pub bytes: Vec<u64>,
    /// Their sum.
    pub total: u64,
    /// Bytes of the files as they were written.
    pub raw: Vec<u64>,
    /// Bits that all of the files take, for each parameter of the model.
    pub bits_per_parameter: f64,
    /// By role of the tensors; other bytes are `skeleton`. Together they are `total`. Empty if the codec does not
    /// know tensors.
    pub roles: BTreeMap<&'static str, RoleKept>,
    /// The parameters' distance from the original.
    pub error: Errors,
    /// 10^6 bytes of files that a core encodes in a second of processor time. A store: from the file to its released
    /// stub, with planning, reading back, decoding and comparing, all threads together; others: encoding alone.
    pub encode_mb_s: f64,
    /// The same for decoding any one file, with nothing at hand: all objects that it takes are decoded for it.
    pub decode_mb_s: f64,
    /// Objects that are read for one file.
    pub chain: Chain,
}

/// Errors of the parameters of all files, as a share of something.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Errors {
    /// Of the root mean square of the updates.
    pub of_update: Relative,
    /// Of the root mean square of the parameters.
    pub of_weights: Relative,
}

/// An error by its root mean square and its largest.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Relative {
    /// Root mean square.
    pub rms: f64,
    /// The largest of any parameter in any file.
    pub max: f64,
}

/// Objects that are read for one file; 0 for one that stays as it was written.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Chain {
    /// Mean over the files.
    pub mean: f64,
    /// The most.
    pub max: u64,
}

/// The size of one role's tensors.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct RoleKept {
    /// Bytes kept.
    pub bytes: u64,
    /// Bytes in the files.
    pub raw: u64,
    /// Bits for each of the role's own numbers; none where there are no numbers.
    pub bits_per_parameter: Option<f64>,
    #[serde(skip)]
    elements: u64,
}

impl RoleKept {
    pub(super) fn add(&mut self, bytes: u64, raw: u64, elements: u64) {
        self.bytes += bytes;
        self.raw += raw;
        self.elements += elements;
        self.bits_per_parameter = (self.elements > 0).then(|| 8.0 * self.bytes as f64 / self.elements as f64);
    }
}

/// The measurements of a codec, file after file.
#[derive(Default)]
pub(super) struct Measured {
    bytes: Vec<u64>,
    chains: Vec<u64>,
    error: Size,
    pub(super) roles: BTreeMap<&'static str, RoleKept>,
    /// Processor time for all files.
    pub(super) encode: Duration,
    pub(super) decode: Duration,
}

impl Measured {
    /// Adds a file: bytes that it takes, errors of its parameters, objects that are read for it.
    pub(super) fn add(&mut self, bytes: u64, error: Size, chain: u64) {
        self.bytes.push(bytes);
        self.chains.push(chain);
        self.error.merge(&error);
    }

    pub(super) fn report(self, codec: Codec, series: &Series, scale: &Scale) -> Kept {
        let total = self.bytes.iter().sum();
        let files = series.states.len() as f64;
        let parameters: u64 = series.states.iter().map(|state| series.parameters(state)).sum();
        let speed = |time: Duration| series.bytes() as f64 / time.as_secs_f64() / 1e6;
        let relative = |to: &Size| Relative { rms: share(self.error.rms(), to), max: share(self.error.max, to) };
        Kept {
            name: codec.to_string(),
            about: codec.about(),
            total,
            raw: series.states.iter().map(|state| state.len).collect(),
            bits_per_parameter: 8.0 * total as f64 / parameters as f64,
            error: Errors { of_update: relative(&scale.update), of_weights: relative(&scale.weights) },
            encode_mb_s: speed(self.encode),
            decode_mb_s: speed(self.decode),
            chain: Chain {
                mean: self.chains.iter().sum::<u64>() as f64 / files,
                max: self.chains.iter().copied().max().unwrap_or_default(),
            },
            bytes: self.bytes,
            roles: self.roles,
        }
    }
}

/// An error as a share. No error is 0, even if nothing moved.
fn share(error: f64, of: &Size) -> f64 {
    if error == 0.0 { 0.0 } else { error / of.rms() }
}

impl Report {
    pub(super) fn new(series: &Series, scale: &Scale, codecs: Vec<Kept>) -> Report {
        Report {
            files: series.states.iter().map(|state| state.path.to_string_lossy().into_owned()).collect(),
            files_bytes: names_bytes(series.states.iter().map(|state| state.path.as_path())),
            parameters: series.states.last().map_or(0, |state| series.parameters(state)),
            weights_rms: scale.weights.rms(),
            update_rms: scale.update.rms(),
            codecs,
        }
    }
}

impl Kept {
    /// Bytes of all files as they were written.
    pub fn raw_total(&self) -> u64 {
        self.raw.iter().sum()
    }
}
