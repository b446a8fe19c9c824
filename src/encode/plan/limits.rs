//! The limits that a tensor's values show, and the constraints under which a program keeps it.
//!
//! A program that clamps, projects or normalizes a parameter after each step relies on it: a probability above 1 makes
//! a logarithm NaN, a point beyond the unit ball has no distance. Rounding keeps limits, but no norm and no sum. So a
//! tensor that shows a constraint stays lossless. One pass over its bytes tells; it is read anyway.

use std::cmp::Ordering;
use std::io;

use crate::store::object::rows_and_width;
use codec::Dtype;
use codec::floor::Limits;
use codec::lattice::values;
use formats::{ReadAt, Tensor};

/// Bytes read at a time.
const PIECE: u64 = 1 << 20;
/// Rows whose norms and sums are taken: of more, every second, third, or further one.
const MOST_ROWS: u64 = 1 << 12;
/// Longer rows are looked at for their limits only: one takes all memory in a file that was made for it.
const LONGEST_ROW: u64 = 1 << 22;
/// Columns compared.
const COLUMNS: usize = 16;
/// Fewer rows are alike by chance.
const LEAST_ALIKE: u64 = 4;

/// The limits of a tensor, and its constraint in words if it shows one.
pub(super) struct Look {
    pub(super) limits: Limits,
    pub(super) constraint: Option<&'static str>,
}

pub(super) fn limits(source: &dyn ReadAt, tensor: &Tensor) -> io::Result<Limits> {
    let mut limits = Limits::OF_NONE;
    in_pieces(source, tensor, PIECE, |piece| limits.add(tensor.dtype, piece))?;
    Ok(limits)
}

/// Looks at a parameter. `whole` has all of its bytes.
pub(super) fn look(source: &dyn ReadAt, whole: &Tensor) -> io::Result<Look> {
    let (rows, width) = rows_and_width(&whole.shape);
    let row_bytes = width.saturating_mul(whole.dtype.size() as u64);
    let is_whole = rows.saturating_mul(row_bytes) == whole.bytes();
    if width == 0 || width > LONGEST_ROW || !is_whole {
        return Ok(Look { limits: limits(source, whole)?, constraint: None });
    }
    let mut seen = Seen::new(whole.dtype, rows, width as usize);
    in_pieces(source, whole, (PIECE / row_bytes).max(1) * row_bytes, |piece| seen.add(piece))?;
    Ok(Look { limits: seen.limits, constraint: seen.constraint() })
}

fn in_pieces(source: &dyn ReadAt, tensor: &Tensor, piece: u64, mut see: impl FnMut(&[u8])) -> io::Result<()> {
    let mut at = tensor.extent.start;
    let mut bytes = Vec::new();
    while at < tensor.extent.end {
        bytes.resize(piece.min(tensor.extent.end - at) as usize, 0);
        source.read_exact_at(&mut bytes, at)?;
        see(&bytes);
        at += bytes.len() as u64;
    }
    Ok(())
}

/// The findings of one pass over a tensor.
struct Seen {
    dtype: Dtype,
    width: usize,
    rows: u64,
    /// The next row, and how many of them are passed over for each whose norm is taken.
    row: u64,
    every: u64,
    limits: Limits,
    /// How often the least and the largest element occur.
    at_limits: [u64; 2],
    /// Elements of the diagonal that are 1 or -1.
    signs: u64,
    /// Of rows: sum of squares, sum, and sum of magnitudes.
    of_rows: Vec<[f64; 3]>,
    /// The same of the first columns.
    of_columns: Vec<[f64; 3]>,
}

impl Seen {
    fn new(dtype: Dtype, rows: u64, width: usize) -> Seen {
        Seen {
            dtype,
            width,
            rows,
            row: 0,
            every: rows.div_ceil(MOST_ROWS).max(1),
            limits: Limits::OF_NONE,
            at_limits: [0; 2],
            signs: 0,
            of_rows: Vec::new(),
            of_columns: vec![[0.0; 3]; width.min(COLUMNS)],
        }
    }

    /// Adds whole rows.
    fn add(&mut self, piece: &[u8]) {
        let mut limits = Limits::OF_NONE;
        limits.add(self.dtype, piece);
        // Most pieces have no element at the limits of those before.
        let least = (limits.least, limits.least.partial_cmp(&self.limits.least));
        let most = (limits.most, self.limits.most.partial_cmp(&limits.most));
        for ((limit, order), count) in [least, most].into_iter().zip(&mut self.at_limits) {
            if order.is_some_and(Ordering::is_le) {
                let before = if order == Some(Ordering::Equal) { *count } else { 0 };
                *count = before + values(self.dtype, piece).iter().filter(|value| **value == limit).count() as u64;
            }
        }
        self.limits.join(limits);
        let size = self.dtype.size();
        for row in piece.chunks(self.width * size) {
            let is_taken = self.row.is_multiple_of(self.every);
            let some = if is_taken { row } else { &row[..self.of_columns.len() * size] };
            let values = values(self.dtype, some);
            for (column, value) in self.of_columns.iter_mut().zip(&values) {
                *column = with(*column, *value);
            }
            if is_taken {
                self.of_rows.push(values.iter().fold([0.0; 3], |sums, value| with(sums, *value)));
            }
            let on_diagonal =
                row.chunks(size).nth(self.row as usize).map(|element| self::values(self.dtype, element)[0]);
            self.signs += u64::from(on_diagonal.is_some_and(|value| value.abs() == 1.0));
            self.row += 1;
        }
    }

    /// The list of constraints. Each says how far chance is from it.
    fn constraint(&self) -> Option<&'static str> {
        let (limits, of_16_bits) = (self.limits, self.dtype.size() == 2);
        // Rounding to 16 bits moves a norm or a sum by at most a share of this.
        let alike = if of_16_bits { 4e-3 } else { 1e-4 };
        let norms_of = |sums: &[[f64; 3]]| -> Vec<f64> { sums.iter().map(|sums| sums[0].sqrt()).collect() };
        let (norms, columns) = (norms_of(&self.of_rows), norms_of(&self.of_columns));
        if limits.most <= limits.least {
            return None;
        }
        let is_one = |value: f64| (value - 1.0).abs() <= alike / 10.0;
        let is_few = self.rows < LEAST_ALIKE;
        let columns_tell = !is_few && columns.len() as u64 >= LEAST_ALIKE;
        let diagonal = self.rows.min(self.width as u64);
        let many = (self.rows * self.width as u64 / if of_16_bits { 25 } else { 100 }).max(8);
        let of_rows = &self.of_rows;
        let found = [
            // Norms of random rows of n elements differ by 1 / sqrt(2n) of themselves: 1% of 4,096. Their sums differ by
            // 1 / sqrt(n) of their magnitudes. Of two or three rows some are alike by chance, and only 1 tells.
            (is_few && norms.iter().all(|norm| is_one(*norm)), "its rows have the norm 1"),
            (is_few && limits.least >= 0.0 && of_rows.iter().all(|row| is_one(row[1])), "its rows sum to 1"),
            (!is_few && are_alike(&norms, alike), "its rows all have one norm"),
            (!is_few && have_one_sum(of_rows, alike), "its rows all have one sum"),
            (columns_tell && are_alike(&columns, alike), "its columns all have one norm"),
            (columns_tell && have_one_sum(&self.of_columns, alike), "its columns all have one sum"),
            (crowd_at_the_edge(&norms), "its rows stay inside a ball, and many lie at its edge"),
            // Signs beside Householder's reflections (torch's `parametrizations.orthogonal`), which keeps integers of
            // them.
            (diagonal >= LEAST_ALIKE && self.signs == diagonal, "its diagonal consists of 1 and -1"),
            // The ends of what training leaves free belong to one element, or to a few where 16 bits round.
            (self.at_limits[0] >= many, "many elements share its least value"),
            (self.at_limits[1] >= many, "many elements share its largest value"),
        ];
        found.into_iter().find(|(holds, _)| *holds).map(|(_, why)| why)
    }
}

fn with([squares, sum, magnitudes]: [f64; 3], value: f64) -> [f64; 3] {
    [squares + value * value, sum + value, magnitudes + value.abs()]
}

/// Whether all of these are one positive number, but for this share of it.
fn are_alike(norms: &[f64], share: f64) -> bool {
    let (least, most) = norms.iter().fold((f64::INFINITY, 0f64), |(least, most), x| (least.min(*x), most.max(*x)));
    least > 0.0 && most.is_finite() && most - least <= share * most
}

/// Whether all rows have one sum, but for this share of the sum of their magnitudes.
fn have_one_sum(rows: &[[f64; 3]], share: f64) -> bool {
    let (least, most) = rows
        .iter()
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(least, most), row| (least.min(row[1]), most.max(row[1])));
    let smallest = rows.iter().fold(f64::INFINITY, |smallest, row| smallest.min(row[2]));
    smallest > 0.0 && most - least <= share * smallest
}

/// Whether rows of many norms stop at one.
fn crowd_at_the_edge(norms: &[f64]) -> bool {
    /// Of fewer rows a few may be alike by chance.
    const LEAST_ROWS: usize = 64;
    /// How near the edge a row lies. The longest of random rows of 100,000 elements has .35% of the others so near.
    const AT_EDGE: f64 = 1e-3;
    /// One row in so many, and this number at least: of 128 random rows, three are so near now and then.
    const ONE_IN: usize = 33;
    const LEAST_NEAR: usize = 8;
    let most = norms.iter().copied().fold(0f64, f64::max);
    let least = norms.iter().copied().fold(f64::INFINITY, f64::min);
    let near = norms.iter().filter(|norm| **norm >= (1.0 - AT_EDGE) * most).count();
    norms.len() >= LEAST_ROWS && least <= 0.98 * most && near * ONE_IN >= norms.len() && near >= LEAST_NEAR
}

#[cfg(test)]
mod tests {
    use super::*;
    use formats::Role;

    fn random(count: usize) -> Vec<f32> {
        let mut state = 1u64;
        let mut uniform = move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
        };
        (0..count).map(|_| (0..12).map(|_| uniform()).sum()).collect()
    }

    fn constraint(values: &[f32], shape: &[u64]) -> Option<&'static str> {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let found = (Role::Weight, "test");
        let tensor = Tensor::found("w".into(), (Dtype::F32, shape.to_vec()), found, 0..bytes.len() as u64);
        look(&&bytes[..], &tensor).unwrap().constraint
    }

    fn rows(values: &[f32], width: usize, each: impl Fn(&[f32]) -> Vec<f32>) -> Vec<f32> {
        values.chunks(width).flat_map(each).collect()
    }

    fn norm(row: &[f32]) -> f32 {
        row.iter().map(|x| x * x).sum::<f32>().sqrt()
    }

    #[test]
    fn each_constraint_is_seen_and_random_parameters_have_none() {
        let free = random(200 * 64);
        assert_eq!(constraint(&free, &[200, 64]), None);
        assert_eq!(constraint(&free, &[12_800]), None);
        assert_eq!(constraint(&random(2 * 40_000), &[2, 40_000]), None, "long rows");
        assert_eq!(constraint(&[1.0; 64], &[64]), None, "a scale that nothing has moved is no constraint");
        let unit = rows(&free, 64, |row| row.iter().map(|x| x / norm(row)).collect());
        assert_eq!(constraint(&unit, &[200, 64]), Some("its rows all have one norm"));
        let turned: Vec<f32> =
            (0..64).flat_map(|c| unit.iter().skip(c).step_by(64).copied().collect::<Vec<_>>()).collect();
        assert_eq!(constraint(&turned, &[64, 200]), Some("its columns all have one norm"));
        assert_eq!(constraint(&unit[..64], &[64]), Some("its rows have the norm 1"));
        let simplex = rows(&free, 64, |row| {
            let all: f32 = row.iter().map(|x| x.exp()).sum();
            row.iter().map(|x| x.exp() / all).collect()
        });
        assert_eq!(constraint(&simplex, &[200, 64]), Some("its rows all have one sum"));
        let ball = rows(&free, 64, |row| row.iter().map(|x| x / norm(row).max(7.9) * 0.999).collect());
        assert_eq!(constraint(&ball, &[200, 64]), Some("its rows stay inside a ball, and many lie at its edge"));
        let mut signs = free.clone();
        (0..64).for_each(|at| signs[65 * at] = 1.0f32.copysign(free[65 * at]));
        assert_eq!(constraint(&signs, &[200, 64]), Some("its diagonal consists of 1 and -1"));
        let clamped: Vec<f32> = free.iter().map(|x| x.clamp(-1.5, 9.0)).collect();
        assert_eq!(constraint(&clamped, &[200, 64]), Some("many elements share its least value"));
        let clamped: Vec<f32> = free.iter().map(|x| x.clamp(-9.0, 1.5)).collect();
        assert_eq!(constraint(&clamped, &[200, 64]), Some("many elements share its largest value"));
    }
}
