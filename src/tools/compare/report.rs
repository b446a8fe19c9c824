//! The measurements, for people and for programs.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use codec::Dtype;
use formats::Role;
use serde::Serialize;

use crate::store::names_bytes;
use crate::terminal::format::{percent, size, table};
use crate::tools::series::{Scale, Series};
use crate::tools::values::Size;

/// The word for all bytes of files and objects outside of tensors: names, lengths, and small tensors, which a store
/// keeps among them.
const SKELETON: &str = "skeleton";

/// A comparison.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Report {
    /// The files, oldest first.
    files: Vec<String>,
    /// All of them in hexadecimal, if one is not UTF-8.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    files_bytes: Vec<String>,
    /// Parameters of the newest.
    parameters: u64,
    /// Root mean square of the parameters, over all files.
    weights_rms: f64,
    /// Root mean square of their updates from each file to the next.
    update_rms: f64,
    /// One for each codec, in the order asked for.
    codecs: Vec<Kept>,
}

/// A codec's results.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Kept {
    /// The codec's name.
    name: String,
    /// A line about it.
    about: &'static str,
    /// Bytes that each file takes. Under a profile: the length of its object, and its stub.
    bytes: Vec<u64>,
    /// Their sum.
    total: u64,
    /// Bytes of the files as they were written.
    raw: Vec<u64>,
    /// Bits that all of the files take, for each parameter of the model.
    bits_per_parameter: f64,
    /// By role of the tensors; other bytes are `skeleton`. Together they are `total`. Empty if the codec does not
    /// know tensors.
    roles: BTreeMap<&'static str, RoleKept>,
    /// The parameters' distance from the original.
    error: Errors,
    /// 10^6 bytes of files that a core encodes in a second of processor time. A profile: from the file to its object,
    /// with planning, reading back, decoding and comparing, all threads together; others: encoding alone.
    encode_mb_s: f64,
    /// The same for decoding any one file, with nothing at hand: all objects that it takes are decoded for it.
    decode_mb_s: f64,
    /// Objects that are read for one file.
    chain: Chain,
}

/// Errors of the parameters of all files, as a share of something.
#[derive(Clone, Copy, Debug, Serialize)]
struct Errors {
    /// Of the root mean square of the updates.
    of_update: Relative,
    /// Of the root mean square of the parameters.
    of_weights: Relative,
}

/// An error by its root mean square and its largest.
#[derive(Clone, Copy, Debug, Serialize)]
struct Relative {
    /// Root mean square.
    rms: f64,
    /// The largest of any parameter in any file.
    max: f64,
}

/// Objects that are read for one file; 0 for one that stays as it was written.
#[derive(Clone, Copy, Debug, Serialize)]
struct Chain {
    /// Mean over the files.
    mean: f64,
    /// The most.
    max: u64,
}

/// The size of one role's tensors.
#[derive(Clone, Copy, Debug, Default, Serialize)]
struct RoleKept {
    /// Bytes kept.
    bytes: u64,
    /// Bytes in the files.
    raw: u64,
    /// Bits for each of the role's own numbers; none where there are no numbers.
    bits_per_parameter: Option<f64>,
    #[serde(skip)]
    elements: u64,
}

impl RoleKept {
    fn add(&mut self, bytes: u64, raw: u64, elements: u64) {
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
    roles: BTreeMap<&'static str, RoleKept>,
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

    /// Adds a file of `raw` bytes that takes `bytes`, with its tensors: bytes of each that are kept, and of the file.
    pub(super) fn add_roles(
        &mut self,
        mut bytes: u64,
        mut raw: u64,
        tensors: impl Iterator<Item = (Role, Dtype, u64, u64)>,
    ) {
        for (role, dtype, kept, whole) in tensors {
            self.roles.entry(role.name()).or_default().add(kept, whole, whole / dtype.size() as u64);
            (bytes, raw) = (bytes - kept, raw - whole);
        }
        self.roles.entry(SKELETON).or_default().add(bytes, raw, 0);
    }

    /// `name` and `about`: the codec's.
    pub(super) fn report(self, name: String, about: &'static str, series: &Series, scale: &Scale) -> Kept {
        let total = self.bytes.iter().sum();
        let files = series.states.len() as f64;
        let parameters: u64 = series.states.iter().map(|state| series.parameters(state)).sum();
        let speed = |time: Duration| series.bytes() as f64 / time.as_secs_f64() / 1e6;
        let relative = |to: &Size| Relative { rms: share(self.error.rms(), to), max: share(self.error.max, to) };
        Kept {
            name,
            about,
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

/// Tables for people.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&words(self))
    }
}

fn words(report: &Report) -> String {
    let raw: u64 = report.codecs.first().map_or(0, |kept| kept.raw.iter().sum());
    let files = report.files.len();
    let mut out = format!(
        "{files} checkpoints, {}; {} parameters of rms {}, updates of rms {}\n\n",
        size(raw),
        report.parameters,
        number(report.weights_rms),
        number(report.update_rms),
    );
    let mut rows = Vec::new();
    for kept in &report.codecs {
        rows.push(vec![
            kept.name.clone(),
            size(kept.total),
            percent(kept.total, raw),
            size(kept.total / files.max(1) as u64),
            number(kept.bits_per_parameter),
            format!("{:.0}", kept.encode_mb_s),
            format!("{:.0}", kept.decode_mb_s),
            format!("{:.1}", kept.chain.mean),
            kept.chain.max.to_string(),
        ]);
    }
    let head = ["all", "of raw", "each", "bits/parameter", "encode MB/s", "decode MB/s", "objects read", "most"];
    out += &of_codecs(head, &rows);
    out += "MB/s: 10^6 bytes per second of one core's processor time. Encoding includes planning, reading back and\n\
            comparing. Decoding starts with empty caches, so it reads all objects of a file: on average, at most.\n";
    out +=
        "\nErrors of the parameters, relative to the rms of the update between two checkpoints and of the parameters\n";
    let mut rows = Vec::new();
    for kept in &report.codecs {
        let Errors { of_update, of_weights } = kept.error;
        let each = [of_update.rms, of_update.max, of_weights.rms, of_weights.max].map(number);
        rows.push(std::iter::once(kept.name.clone()).chain(each).collect());
    }
    out += &of_codecs(["rms/update", "largest/update", "rms/weights", "largest/weights"], &rows);
    out += "\nBits per number, by role (-: the codec has no roles)\n";
    out += &roles(report);
    out
}

fn roles(report: &Report) -> String {
    let of_all = report.codecs.iter().flat_map(|kept| kept.roles.iter());
    let names: BTreeSet<&str> =
        of_all.filter(|(_, kept)| kept.bits_per_parameter.is_some()).map(|(name, _)| *name).collect();
    let mut rows = Vec::new();
    for kept in &report.codecs {
        let bits =
            |name: &&str| kept.roles.get(*name).and_then(|role| role.bits_per_parameter).map_or("-".into(), number);
        let rest: u64 =
            kept.roles.values().filter(|role| role.bits_per_parameter.is_none()).map(|role| role.bytes).sum();
        let rest = if kept.roles.is_empty() { "-".to_string() } else { size(rest) };
        rows.push(std::iter::once(kept.name.clone()).chain(names.iter().map(bits)).chain([rest]).collect());
    }
    let head = names.iter().map(|name| name.replace('_', " "));
    of_codecs(head.chain(["all else, bytes".to_string()]), &rows)
}

/// A table with a row for each codec, and with columns of numbers.
fn of_codecs(columns: impl IntoIterator<Item: fmt::Display>, rows: &[Vec<String>]) -> String {
    let columns = columns.into_iter().map(|name| format!(">{name}"));
    table(&std::iter::once("codec".to_string()).chain(columns).collect::<Vec<_>>(), rows)
}

/// Three digits, for any magnitude.
fn number(value: f64) -> String {
    match value.abs() {
        0.0 => "0".into(),
        v if !v.is_finite() => "-".into(),
        v if v < 1e-3 => format!("{value:.1e}"),
        v if v < 0.1 => format!("{value:.4}"),
        v if v < 10.0 => format!("{value:.2}"),
        v if v < 100.0 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}
