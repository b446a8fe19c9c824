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
//! Payload: [`ID`]; 1 if there are differences, else 0; varint number of bins; smallest value and step, f32 each;
//! varint cycle; the bins, as in `inshrinkerator/delta.rs`, Huffman alone.

use std::io;

use super::inshrinkerator::{Coding, decode_levels, encode_levels};
use super::uniform::{self, Grid};
use super::{Corrupt, Fit, State, System, Tensor, Tile, pack};
use crate::entropy::varint;

/// First byte of a payload.
pub const ID: u8 = 30;

/// Smallest number of bins: with three steps from the smallest value to the largest, a step is always in f32's range.
const LEAST: u32 = 4;
/// Largest number of bins.
const MOST: u32 = 256;

/// The system with its range of bins.
#[derive(Clone, Copy, Debug)]
pub struct QdCompressor {
    least: u32,
    most: u32,
}

impl QdCompressor {
    /// Powers of two, 4 to 256, the first not above the second; `None` for others.
    pub fn new(least: u32, most: u32) -> Option<QdCompressor> {
        let sound = [least, most].iter().all(|bins| bins.is_power_of_two() && (LEAST..=MOST).contains(bins));
        (sound && least <= most).then_some(QdCompressor { least, most })
    }

    /// Bins for a layer whose `most` bins have these counts.
    fn bins(&self, counts: &[u64]) -> u32 {
        let total = counts.iter().sum::<u64>() as f64;
        let one = |&count: &u64| if count > 0 { -(count as f64) / total * (count as f64 / total).log2() } else { 0.0 };
        let entropy: f64 = counts.iter().map(one).sum();
        (1 << entropy.round() as u32).clamp(self.least, self.most)
    }
}

/// Smallest and largest value of a tensor; 0 for no values. `None` if a value is not finite.
fn range(tensor: &dyn Tensor) -> io::Result<Option<(f32, f32)>> {
    let (mut min, mut max) = (f32::INFINITY, f32::NEG_INFINITY);
    for number in 0..tensor.tiles() {
        for &value in &tensor.tile(number)?.values {
            if !value.is_finite() {
                return Ok(None);
            }
            (min, max) = (min.min(value), max.max(value));
        }
    }
    Ok(Some(if min <= max { (min, max) } else { (0.0, 0.0) }))
}

impl System for QdCompressor {
    fn fit(&self, tensors: &[&dyn Tensor], _position: u32) -> io::Result<Vec<Fit>> {
        let one = |tensor: &&dyn Tensor| {
            let Some((min, max)) = range(*tensor)? else { return Ok(Vec::new()) };
            let finest = Grid::between(min.into(), max.into(), self.most - 1);
            let mut counts = vec![0; self.most as usize];
            let (mut codes, mut values) = (Vec::new(), Vec::new());
            for number in 0..tensor.tiles() {
                let tile = tensor.tile(number)?;
                codes.resize(tile.values.len(), 0);
                values.resize(tile.values.len(), 0.0);
                uniform::quantize(finest, self.most - 1, &tile.values, &mut codes, &mut values);
                codes.iter().for_each(|&code| counts[usize::from(code)] += 1);
            }
            let bins = self.bins(&counts);
            let grid = Grid::between(min.into(), max.into(), bins - 1);
            let mut fit = Vec::new();
            varint::put(bins.into(), &mut fit);
            pack::put_floats(&[grid.zero, grid.scale], &mut fit);
            Ok(fit)
        };
        tensors.iter().map(one).collect()
    }

    fn encode(&self, fit: &Fit, tile: &Tile, out: &mut Vec<u8>) -> Option<State> {
        let (grid, bins) = take_grid(&mut fit.as_slice()).ok()?;
        if !tile.values.iter().all(|x| x.is_finite()) {
            return None;
        }
        let (mut codes, mut values) = (vec![0; tile.values.len()], vec![0.0; tile.values.len()]);
        uniform::quantize(grid, bins - 1, &tile.values, &mut codes, &mut values);
        let levels: Vec<u16> = codes.into_iter().map(u16::from).collect();
        let before = tile.previous.as_ref().and_then(|state| state.bins.as_deref());
        let before =
            before.filter(|before| before.len() == levels.len() && before.iter().all(|&b| u32::from(b) < MOST));
        let most_before = before.and_then(|before| before.iter().max()).map_or(0, |&level| u32::from(level) + 1);
        let cycle = bins.max(most_before);
        out.extend_from_slice(&[ID, u8::from(before.is_some())]);
        out.extend_from_slice(fit);
        varint::put(cycle.into(), out);
        encode_levels(&levels, before, cycle as usize, Coding::Huffman, out);
        Some(State { values: values.into(), bins: Some(levels) })
    }

    fn decode(&self, mut payload: &[u8], previous: Option<&State>, len: usize) -> Result<State, Corrupt> {
        let payload = &mut payload;
        if pack::take_byte(payload)? != ID {
            return Err(Corrupt("not of QD-Compressor"));
        }
        let before = match pack::take_byte(payload)? {
            0 => None,
            _ => Some(previous.and_then(|state| state.bins.as_deref()).ok_or(Corrupt("no previous bins"))?),
        };
        let (grid, bins) = take_grid(payload)?;
        let cycle = usize::try_from(varint::take(payload)?).unwrap_or(0);
        let mut levels = vec![0; len];
        decode_levels(payload, before, cycle, &mut levels)?;
        if levels.iter().any(|&level| u32::from(level) >= bins) || !payload.is_empty() {
            return Err(Corrupt("bins of a tile"));
        }
        let codes: Vec<u8> = levels.iter().map(|&level| level as u8).collect();
        let mut values = vec![0.0; len];
        uniform::dequantize(grid, &codes, &mut values);
        Ok(State { values: values.into(), bins: Some(levels) })
    }
}

/// Takes a layer's grid and its number of bins off the front of `payload`.
fn take_grid(payload: &mut &[u8]) -> Result<(Grid, u32), Corrupt> {
    let bins = u32::try_from(varint::take(payload)?).unwrap_or(0);
    let values = pack::take_floats(payload, 2)?;
    let sound = (LEAST..=MOST).contains(&bins);
    if sound { Ok((Grid { zero: values[0], scale: values[1] }, bins)) } else { Err(Corrupt("number of bins")) }
}

#[cfg(test)]
mod tests {
    use super::super::conformance::{Made, Noise, checkpoint, conforms};
    use super::*;

    #[test]
    fn all_conform() {
        for (least, most) in [(8, 256), (4, 4), (256, 256), (8, 32)] {
            conforms(&QdCompressor::new(least, most).unwrap());
        }
        assert!([(5, 8), (8, 512), (16, 8), (2, 8)].iter().all(|&(a, b)| QdCompressor::new(a, b).is_none()));
    }

    /// A layer that fills its range gets all bins, one with a few far values fewer; the error is at most half a step.
    #[test]
    fn bins_follow_entropy() {
        let mut noise = Noise(1);
        let even: Vec<f32> = (0..20_000).map(|i| i as f32 / 20_000.0).collect();
        let mut peaked: Vec<f32> = (0..20_000).map(|_| 0.01 * noise.normal()).collect();
        (peaked[7], peaked[8]) = (1.0, -1.0);
        let qd = QdCompressor::new(8, 256).unwrap();
        for (values, bins) in [(even, 256), (peaked, 8)] {
            let layer = Made { tile: 30_000, ..Made::new("w", 100, values) };
            let fit = qd.fit(&[&layer], 0).unwrap().remove(0);
            let (grid, found) = take_grid(&mut fit.as_slice()).unwrap();
            assert_eq!(found, bins);
            let state = checkpoint(&qd, std::slice::from_ref(&layer), 0).remove(0).0.remove(0);
            let largest = layer.values.iter().zip(&state.values).map(|(x, q)| (x - q).abs()).fold(0.0, f32::max);
            assert!(largest <= 0.501 * grid.scale);
        }
    }

    /// A value that stays in its bin costs one bit, as in Huffman codes.
    #[test]
    fn what_stays_costs_little() {
        let layer = Made { tile: 200_000, ..Made::layer("w", 100, 1000, &mut Noise(1)) };
        let qd = QdCompressor::new(8, 256).unwrap();
        let (states, first) = checkpoint(&qd, std::slice::from_ref(&layer), 0).remove(0);
        let moved = layer.values.iter().enumerate().map(|(i, &w)| if i % 100 == 0 { w + 0.001 } else { w }).collect();
        let next = checkpoint(&qd, &[Made { values: moved, previous: Some(states), ..layer }], 1).remove(0).1;
        assert!(next < first / 3 && next > 100_000 / 8, "{first} {next}");
    }
}
