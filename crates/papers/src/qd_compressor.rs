//! QD-Compressor (Jin et al., TPDS 2023): quantizes layers first, each with its own range and number of bins, and
//! stores differences of bins.
//!
//! It quantizes uniformly between a layer's smallest and largest value, with a number of bins by the layer's entropy.
//! Differences of bin numbers are cyclic, modulo the larger of the two numbers of bins; then Huffman codes follow.
//! Known here only from its abstract and from Inshrinkerator's sections 6, 8 and A.2. Those also give the tried ranges
//! of bins (table 10) and a fix for a layer whose number of bins changes. They do not say how the entropy decides. Here
//! a layer is first cut into the maximum number of bins. It then gets two to the power of their entropy, rounded to a
//! power of two. The paper's error feedback needs the training program, and is left out.
//!
//! Payload: number of bins - 1, u8; smallest value and step, f32 each; the bins ([`super::levels`]), Huffman alone.

use std::io;
use std::sync::Arc;

use super::levels::{self, Coding};
use super::quantize::{self, Grid};
use super::{Fit, State, System, Tensor, Tile, code};
use codec::Corrupt;

/// Bins of a layer (table 10), powers of two.
const LEAST: u32 = 8;
const MOST: u32 = 256;

/// The system.
#[derive(Debug)]
pub(super) struct QdCompressor;

/// Bins for a layer whose [`MOST`] bins have these counts.
fn bins(counts: &[u64]) -> u32 {
    let total = counts.iter().sum::<u64>() as f64;
    let one = |&count: &u64| if count > 0 { -(count as f64) / total * (count as f64 / total).log2() } else { 0.0 };
    let entropy: f64 = counts.iter().map(one).sum();
    (1 << entropy.round() as u32).clamp(LEAST, MOST)
}

/// Smallest and largest finite value of a tensor; 0 if it has none.
fn range(tensor: &dyn Tensor) -> io::Result<(f32, f32)> {
    let (mut min, mut max) = (f32::INFINITY, f32::NEG_INFINITY);
    for number in 0..tensor.tiles() {
        for &value in tensor.tile(number)?.values.iter().filter(|value| value.is_finite()) {
            (min, max) = (min.min(value), max.max(value));
        }
    }
    Ok(if min <= max { (min, max) } else { (0.0, 0.0) })
}

impl System for QdCompressor {
    fn fit(&self, tensors: &[&dyn Tensor], _position: u32) -> io::Result<Vec<Arc<dyn Fit>>> {
        let one = |tensor: &&dyn Tensor| {
            let (min, max) = range(*tensor)?;
            let finest = Grid::between(min.into(), max.into(), MOST - 1);
            let mut counts = vec![0; MOST as usize];
            for number in 0..tensor.tiles() {
                let (codes, _) = quantize::quantized(finest, MOST - 1, &tensor.tile(number)?.values);
                codes.iter().for_each(|&code| counts[usize::from(code)] += 1);
            }
            let bins = bins(&counts);
            Ok(Arc::new(Bins { bins, grid: Grid::between(min.into(), max.into(), bins - 1) }) as Arc<dyn Fit>)
        };
        tensors.iter().map(one).collect()
    }

    fn take(&self, payload: &mut &[u8], previous: Option<&State>, len: usize) -> Result<State, Corrupt> {
        let bins = u32::from(code::take_byte(payload)?) + 1;
        let grid = code::take_floats(payload, 2)?;
        Corrupt::when(bins < LEAST, "number of bins")?;
        let levels = levels::take(payload, bins as usize, previous, len)?;
        let codes: Vec<u8> = levels.iter().map(|&level| level as u8).collect();
        let mut values = vec![0.0; len];
        quantize::dequantize(Grid { zero: grid[0], scale: grid[1] }, &codes, &mut values);
        Ok(State { values: values.into(), bins: Some(levels) })
    }
}

/// A layer's bins, evenly from its smallest to its largest value.
#[derive(Debug)]
struct Bins {
    bins: u32,
    grid: Grid,
}

impl Fit for Bins {
    fn put(&self, tile: &Tile, out: &mut Vec<u8>) -> Option<State> {
        let (codes, values) = quantize::quantized(self.grid, self.bins - 1, &tile.values);
        let levels: Vec<u16> = codes.into_iter().map(u16::from).collect();
        out.push((self.bins - 1) as u8);
        code::put_floats(&[self.grid.zero, self.grid.scale], out);
        levels::put(&levels, self.bins as usize, tile.previous.as_ref(), Coding::Huffman, out);
        Some(State { values: values.into(), bins: Some(levels) })
    }
}

#[cfg(test)]
mod tests {
    use super::super::conformance::{Made, Noise, checkpoint, conforms};
    use super::*;

    #[test]
    fn all_conform() {
        conforms(&QdCompressor);
    }

    /// A layer that fills its range gets all bins, one with a few far values fewer; the error is at most half a step.
    #[test]
    fn bins_follow_entropy() {
        let mut noise = Noise(1);
        let even: Vec<f32> = (0..20_000).map(|i| i as f32 / 20_000.0).collect();
        let mut peaked: Vec<f32> = (0..20_000).map(|_| 0.01 * noise.normal()).collect();
        (peaked[7], peaked[8]) = (1.0, -1.0);
        for (values, bins) in [(even, 256), (peaked, 8)] {
            let layer = Made { tile: 30_000, ..Made::new("w", 100, values) };
            let fit = format!("{:?}", QdCompressor.fit(&[&layer], 0).unwrap()[0]);
            let step = 2.0 / (bins - 1) as f32;
            assert!(fit.starts_with(&format!("Bins {{ bins: {bins}, ")), "{fit}");
            let state = checkpoint(&QdCompressor, std::slice::from_ref(&layer), 0).remove(0).0.remove(0);
            let largest = layer.values.iter().zip(&state.values).map(|(x, q)| (x - q).abs()).fold(0.0, f32::max);
            assert!(largest <= 0.501 * if bins == 256 { step / 2.0 } else { step });
        }
    }

    /// A value that stays in its bin costs one bit, as in Huffman codes.
    #[test]
    fn what_stays_costs_little() {
        let layer = Made { tile: 200_000, ..Made::layer("w", 100, 1000, &mut Noise(1)) };
        let (states, first) = checkpoint(&QdCompressor, std::slice::from_ref(&layer), 0).remove(0);
        let moved = layer.values.iter().enumerate().map(|(i, &w)| if i % 100 == 0 { w + 0.001 } else { w }).collect();
        let next = checkpoint(&QdCompressor, &[Made { values: moved, previous: Some(states), ..layer }], 1).remove(0).1;
        assert!(next < first / 3 && next > 100_000 / 8, "{first} {next}");
    }
}
