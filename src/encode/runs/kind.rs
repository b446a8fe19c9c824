//! What bytes of an unknown format are, by a sample: elements of some width, and where the first one begins.
//!
//! Floats have an exponent that takes few values, and so the bytes of one place are cheap. Text and records repeat
//! instead. A wrong answer costs space and nothing else.

use codec::Dtype;
use codec::hash::xxh3_64;
use codec::lattice::values;

/// Bytes of a sample: enough for the frequencies of each byte place, and few beside a block.
pub(super) const SAMPLE_BYTES: usize = 4096;
/// Planes count as smaller than zstd's fastest level from this difference on, in shares of the bytes. zstd sees more
/// than the sample later.
const MARGIN: f64 = 0.02;
/// A wider element must save this share more than a narrower one: it has fewer samples, which look more alike.
const WIDER_SAVES: f64 = 0.04;
/// The share of elements that must look like numbers of a model for a type to be believed.
const PLAUSIBLE: f64 = 0.9;
/// Magnitudes that numbers of a model have, as powers of two: second moments are small, and little is large.
const EXPONENTS: std::ops::Range<i32> = -60..30;
/// Bits of the highest byte: bfloat16 has only its sign and its exponent there, half precision has mantissa too.
const MOST_BITS_OF_BF16: f64 = 3.8;
/// Widest element.
const WIDEST: usize = 8;

/// A type, and the place of its elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Kind {
    pub(super) dtype: Dtype,
    /// Offset of each element in the file, modulo its size.
    pub(super) phase: usize,
}

impl Kind {
    /// Bytes without elements that are known.
    pub(super) const BYTES: Kind = Kind { dtype: Dtype::U8, phase: 0 };
}

/// The kind of the bytes of a sample at `offset`, and the share of themselves that they would take.
pub(super) fn kind(sample: &[u8], offset: u64) -> (Kind, f64) {
    let packed = zstd::bulk::compress(sample, 1).map_or(sample.len(), |packed| packed.len());
    let bytes = (packed as f64 / sample.len().max(1) as f64).min(1.0);
    let places = Places::of(sample);
    let mut best = (1, places.share(1));
    for width in [2, 4, 8] {
        let share = places.share(width);
        if share < best.1 * (1.0 - WIDER_SAVES) {
            best = (width, share);
        }
    }
    let (width, share) = best;
    if width == 1 || share > bytes - MARGIN {
        return (Kind::BYTES, bytes);
    }
    let (dtype, first) = elements(sample, &places, width);
    (Kind { dtype, phase: (first + offset as usize % width) % width }, share)
}

/// The type of elements of this width, and the offset of the first one in the sample.
fn elements(sample: &[u8], places: &Places, width: usize) -> (Dtype, usize) {
    let (float, other) = match width {
        2 => (Dtype::Bf16, Dtype::F16),
        4 => (Dtype::F32, Dtype::U32),
        _ => (Dtype::F64, Dtype::U64),
    };
    let plausible = (0..width).map(|first| (plausible(float, &sample[first.min(sample.len())..]), first));
    let best = plausible.max_by(|a, b| a.0.total_cmp(&b.0));
    let is_half = width == 2 && places.bits(width, places.cheapest(width)) > MOST_BITS_OF_BF16;
    match best {
        Some((share, first)) if share >= PLAUSIBLE && !is_half => (float, first),
        // The highest byte takes the fewest values.
        _ => (other, (places.cheapest(width) + 1) % width),
    }
}

/// The share of the elements that are 0 or of a usual magnitude.
fn plausible(dtype: Dtype, bytes: &[u8]) -> f64 {
    let is_usual = |x: &&f64| **x == 0.0 || EXPONENTS.contains(&((x.to_bits() >> 52 & 0x7ff) as i32 - 1023));
    let values = values(dtype, bytes);
    values.iter().filter(is_usual).count() as f64 / values.len().max(1) as f64
}

/// How often each byte occurs at each place of a widest element.
struct Places([[u32; 256]; WIDEST]);

impl Places {
    fn of(sample: &[u8]) -> Places {
        let mut places = [[0; 256]; WIDEST];
        for element in sample.chunks_exact(WIDEST) {
            places.iter_mut().zip(element).for_each(|(place, &byte)| place[usize::from(byte)] += 1);
        }
        Places(places)
    }

    /// Bits of a byte at a place of elements of this width.
    fn bits(&self, width: usize, place: usize) -> f64 {
        let mut counts = [0u32; 256];
        for of in self.0.iter().skip(place).step_by(width) {
            counts.iter_mut().zip(of).for_each(|(count, other)| *count += other);
        }
        let total: u32 = counts.iter().sum();
        if total == 0 {
            return 8.0;
        }
        let total = f64::from(total);
        let used = counts.iter().filter(|&&count| count > 0);
        let entropy: f64 =
            used.clone().map(|&count| f64::from(count) / total * (total / f64::from(count)).log2()).sum();
        // Miller and Madow: few samples look more alike than they are.
        let missing = (used.count() as f64 - 1.0) / (2.0 * total * std::f64::consts::LN_2);
        (entropy + missing).min(8.0)
    }

    /// The share that planes of this width take.
    fn share(&self, width: usize) -> f64 {
        (0..width).map(|place| self.bits(width, place)).sum::<f64>() / (8 * width) as f64
    }

    /// The place with the fewest bits.
    fn cheapest(&self, width: usize) -> usize {
        let all = (0..width).map(|place| (self.bits(width, place), place));
        all.min_by(|a, b| a.0.total_cmp(&b.0)).map_or(0, |(_, place)| place)
    }
}

/// A name for a new run, which its later states inherit.
pub(super) fn name(file: u64, start: u64) -> String {
    let hash = xxh3_64(&[file.to_le_bytes(), start.to_le_bytes()].concat());
    format!("{:010x}", hash & 0xff_ffff_ffff)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers about normal, of this variance.
    fn values(count: usize, scale: f64) -> Vec<f64> {
        let mut seed = 7u64;
        let mut uniform = || {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 11) as f64 / (1u64 << 53) as f64
        };
        (0..count).map(|_| scale * ((0..12).map(|_| uniform()).sum::<f64>() - 6.0)).collect()
    }

    fn bytes_of(dtype: Dtype, scale: f64) -> Vec<u8> {
        let values = values(SAMPLE_BYTES, scale);
        let each = |value: &f64| match dtype {
            Dtype::F32 => (*value as f32).to_le_bytes().to_vec(),
            Dtype::Bf16 => half::bf16::from_f64(*value).to_le_bytes().to_vec(),
            Dtype::F16 => half::f16::from_f64(*value).to_le_bytes().to_vec(),
            _ => value.to_le_bytes().to_vec(),
        };
        values.iter().flat_map(each).collect()
    }

    #[test]
    fn floats_are_found_at_every_phase() {
        for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16, Dtype::F64] {
            for scale in [1e-12, 1e-2, 30.0] {
                if dtype == Dtype::F16 && scale < 1e-3 {
                    continue;
                }
                let all = bytes_of(dtype, scale);
                for cut in 0..dtype.size() {
                    let sample = &all[cut..cut + SAMPLE_BYTES];
                    // As if the first element began at byte 1000 of the file.
                    let (kind, share) = kind(sample, 1000 + cut as u64);
                    assert_eq!(kind, Kind { dtype, phase: 1000 % dtype.size() }, "{dtype:?} {scale} {cut}");
                    assert!(share < 0.95, "{dtype:?}: {share}");
                }
            }
        }
    }

    #[test]
    fn floats_with_short_mantissas_are_found() {
        for cut in 0..4 {
            let floats = values(SAMPLE_BYTES, 0.02);
            let all: Vec<u8> =
                floats.iter().flat_map(|value| half::bf16::from_f64(*value).to_f32().to_le_bytes()).collect();
            let (kind, share) = kind(&all[cut..cut + SAMPLE_BYTES], cut as u64);
            assert_eq!(kind, Kind { dtype: Dtype::F32, phase: 0 }, "{cut}");
            assert!(share < 0.5, "{share}");
        }
    }

    #[test]
    fn text_records_and_noise_are_bytes() {
        let noise: Vec<u8> = (0..512u64).flat_map(|at| xxh3_64(&at.to_le_bytes()).to_le_bytes()).collect();
        let text: Vec<u8> = (0..200)
            .flat_map(|at| format!("{{\"step\": {at}, \"loss\": 0.{:04}}}\n", at * 37 % 9999).into_bytes())
            .collect();
        // Letters that do not repeat: zstd sees no more in a sample than their frequencies.
        let letters: Vec<u8> = noise.iter().map(|byte| b"etaoin shrdluetaoin e tao"[usize::from(*byte) % 25]).collect();
        for bytes in [noise, letters, text, vec![0; SAMPLE_BYTES], Vec::new(), vec![1, 2, 3]] {
            assert_eq!(kind(&bytes, 0).0, Kind::BYTES);
        }
    }
}
