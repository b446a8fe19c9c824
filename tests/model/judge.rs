//! Checkpoints of an invented training, and whether other bytes can be their released form.

use safetensors::SafeTensors;

use super::op::Data;
use super::series::{Dtype, Random, Tensor, safetensors, train};

/// For a file without a known bound (it was recalled before anybody looked). The walk moves a weight by 1e-3 a step,
/// and by fewer than 100 steps between two states that meet in a history. A larger error is not rounding.
const LOOSE_BOUND: f64 = 5e-2;

/// One training run of any length.
pub(crate) struct Run {
    salt: u64,
    random: Random,
    model: Vec<Tensor>,
    states: Vec<Vec<u8>>,
}

impl Run {
    /// Runs with different salts have nothing in common but the names of their tensors.
    pub(crate) fn new(salt: u64) -> Run {
        Run { salt, random: Random(salt), model: Vec::new(), states: Vec::new() }
    }

    pub(crate) fn state(&mut self, number: u8) -> Vec<u8> {
        if self.model.is_empty() {
            // A matrix of 64 KiB, a vector, and integers that must not be touched: the least size that is ever
            // released.
            self.model = vec![
                Tensor::new("w.weight", Dtype::F32, &[128, 128], &mut self.random),
                Tensor::new("w.bias", Dtype::F32, &[512], &mut self.random),
                Tensor::new("ids", Dtype::I64, &[64], &mut self.random),
            ];
        }
        while self.states.len() <= usize::from(number) {
            train(&mut self.model, 1e-3, &mut self.random);
            self.states.push(safetensors(&self.model));
        }
        self.states[usize::from(number)].clone()
    }

    /// The bytes that an operation writes.
    pub(crate) fn bytes(&mut self, data: Data) -> Vec<u8> {
        match data {
            Data::Pattern(len, seed) => pattern(len as usize, seed),
            Data::State(number) => self.state(number),
            Data::Text(number) => {
                let salt = self.salt;
                let lines = (0..).flat_map(|i: u32| format!("line {i} of {number} in {salt}\n").into_bytes());
                lines.take(70_001).collect()
            }
        }
    }
}

pub(crate) fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| ((i as u32).wrapping_mul(2_654_435_761) >> 24) as u8 ^ seed).collect()
}

/// Smaller files are never released (docs/SEMANTICS.md).
pub(crate) const LEAST_RELEASED: usize = 64 * 1024;

/// Whether this is large enough to be released.
pub(crate) fn may_be_released(bytes: &[u8]) -> bool {
    bytes.len() >= LEAST_RELEASED
}

/// Why `read` cannot be the released form of `written` after a cut to `cut` bytes; none if it can. `bounds` are those
/// of the tensors by their path, if the file is released now.
pub(crate) fn not_released_from(
    written: &[u8],
    read: &[u8],
    cut: Option<usize>,
    bounds: Option<&[(String, f64)]>,
) -> Option<String> {
    if read.len() != written.len() {
        return Some(format!("{} bytes were written, {} are read", written.len(), read.len()));
    }
    let whole;
    let (written, read, end) = match cut {
        // Without a whole header nothing could have been lost. Any value may stand for the missing part.
        Some(cut) => {
            let Some(len) = full_len(written).filter(|len| *len >= cut) else {
                return Some("no checkpoint, and not as written".into());
            };
            let fill = |bytes: &[u8]| {
                let mut bytes = bytes[..cut].to_vec();
                bytes.resize(len, 0);
                bytes
            };
            if written[cut..] != read[cut..] {
                return Some(format!("the bytes after the first {cut} are not as written"));
            }
            whole = (fill(written), fill(read));
            (&whole.0[..], &whole.1[..], cut)
        }
        None => (written, read, written.len()),
    };
    let (Ok(was), Ok(is)) = (SafeTensors::deserialize(written), SafeTensors::deserialize(read)) else {
        return Some("no checkpoint, and not as written".into());
    };
    if was.len() != is.len() || was.names().into_iter().any(|name| is.tensor(name).is_err()) {
        return Some("other tensors".into());
    }
    for (name, tensor) in was.tensors() {
        let other = is.tensor(&name).expect("the same names");
        let (a, b) = (tensor.data(), other.data());
        if a == b {
            continue;
        }
        if tensor.dtype() != Dtype::F32 || name == "ids" {
            return Some(format!("{name} must be bit-exact"));
        }
        let bound = match bounds {
            Some(bounds) => {
                bounds.iter().find(|(path, _)| path == &name || path.ends_with(&name)).map_or(0.0, |(_, bound)| *bound)
            }
            None => LOOSE_BOUND,
        };
        let value = |bytes: &[u8]| f64::from(f32::from_le_bytes(bytes.try_into().expect("four bytes")));
        let begin = a.as_ptr() as usize - written.as_ptr() as usize;
        for (i, (a, b)) in a.chunks_exact(4).zip(b.chunks_exact(4)).enumerate() {
            let complete = begin + i * 4 + 4 <= end;
            let error = (value(a) - value(b)).abs();
            if complete && a != b && (error > bound || error.is_nan()) {
                return Some(format!("{name}[{i}] is off by {error}, with a bound of {bound}"));
            }
        }
    }
    let begin = 8 + header_len(written)?;
    (written[..begin] != read[..begin]).then(|| "another header".into())
}

fn header_len(bytes: &[u8]) -> Option<usize> {
    usize::try_from(u64::from_le_bytes(bytes.get(..8)?.try_into().ok()?)).ok()
}

/// The length of the checkpoint that begins with these bytes.
fn full_len(bytes: &[u8]) -> Option<usize> {
    let begin = 8 + header_len(bytes)?;
    let header: serde_json::Value = serde_json::from_slice(bytes.get(8..begin)?).ok()?;
    let end = header.as_object()?.values().filter_map(|tensor| tensor["data_offsets"][1].as_u64()).max()?;
    Some(begin + end as usize)
}

#[test]
fn the_judge_finds_what_is_wrong() {
    let written = Run::new(1).state(2);
    let judge = |change: &dyn Fn(&mut Vec<u8>), cut| {
        let mut read = written.clone();
        change(&mut read);
        let written = match cut {
            Some(cut) => written[..cut].to_vec(),
            None => written.clone(),
        };
        read.truncate(written.len());
        not_released_from(&written, &read, cut, None)
    };
    assert_eq!(judge(&|_| {}, None), None);
    assert_eq!(full_len(&written), Some(written.len()));
    let float = |at: usize| move |bytes: &mut Vec<u8>| bytes[at..at + 4].copy_from_slice(&9f32.to_le_bytes());
    let (weights, ids) = (written.len() - 64 * 1024, 8 + header_len(&written).unwrap());
    assert!(judge(&float(weights + 400), None).unwrap().contains("off by"));
    assert!(judge(&float(ids), None).unwrap().contains("bit-exact"));
    assert!(judge(&|bytes| bytes[9] ^= 1, None).is_some());
    assert_eq!(judge(&|bytes| bytes[weights + 400] ^= 1, None), None);
    assert_eq!(judge(&float(weights + 400), Some(weights + 402)), None, "half an element says nothing");
    assert!(judge(&float(weights + 400), Some(weights + 404)).is_some());
}
