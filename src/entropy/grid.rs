//! Symbols in rows and columns with different activity. An update of a linear layer is nearly a sum of products of
//! inputs and returned gradients. So an inactive unit or a constant input quiets a whole row or column. Symbols are
//! coded bit by bit. Each bit's probability follows the earlier symbols whose rows and columns were equally active.
//! This is a thirtieth as fast as Huffman codes and up to a fifth smaller, so it serves small tensors that save by it.
//!
//! A symbol's activity is its distance from [`QUIET`]. The expected activity is the column's mean so far, times the
//! row's, divided by the mean of all earlier rows.
//!
//! Layout: the width of a row, the place of the first symbol in its row; the bits ([`super::range`]). A symbol's bits
//! are, in order: whether it is not QUIET; whether it is above; then for each further step, at most [`NEAR`] in all,
//! whether there is one. After the last step a bit says whether it is beyond all of these; if so, its eight bits
//! follow, the highest first.

use super::range::{Bit, Decoder, Encoder};
use super::{Corrupt, cost, huffman, varint};

/// The layout of symbols in rows.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Symbols per row.
    pub width: usize,
    /// Place of the first symbol in its row.
    pub first: usize,
}

/// The symbol for no change ([`super::ints`]).
const QUIET: u8 = 15;
/// Steps from it that are coded one by one.
const NEAR: u8 = 15;
/// Octaves of expected activity with their own probabilities: 2^-6 to 2^3.
const LOWEST: i64 = -6;
const CONTEXTS: usize = 10;
/// Steps with their own probability; further ones share that of the last.
const STEPS: usize = 6;

/// With fewer symbols there is nothing to learn from.
const FEWEST: usize = 512;
/// From this many symbols on, time matters more than bytes. It is a whole tile of f32, so of a large tensor of 32 or 16
/// bits only the last tile is even examined. The examination alone takes as long as the rest of a tile's encoding.
const MOST: usize = 128 * 1024;
/// Number of symbols in the examination, and the saving that it must predict, since this coding is slow.
const TRIAL: usize = 32 * 1024;
const SAVE: f64 = 0.04;

impl Shape {
    /// For each row: the range of its symbols, and the column of the first.
    fn rows(self, n: usize) -> impl Iterator<Item = (std::ops::Range<usize>, usize)> {
        let (mut start, mut column) = (0, self.first);
        std::iter::from_fn(move || {
            (start < n).then(|| {
                let row = start..n.min(start + self.width - column);
                let first = std::mem::replace(&mut column, 0);
                start = row.end;
                (row, first)
            })
        })
    }

    /// True if there are enough rows and columns to tell apart.
    fn fits(self, n: usize) -> bool {
        (FEWEST..MOST).contains(&n) && self.width >= 2 && self.first < self.width && self.width <= n / 2
    }
}

/// Appends the layout if that is clearly smaller than `symbols` without it. Otherwise appends nothing and returns
/// `false`.
pub(super) fn encode(symbols: &[u8], shape: Shape, out: &mut Vec<u8>) -> bool {
    if !shape.fits(symbols.len()) {
        return false;
    }
    let trial = &symbols[..symbols.len().min(TRIAL.next_multiple_of(shape.width))];
    if !shape.fits(trial.len()) || saving(trial, shape) < SAVE {
        return false;
    }
    put(symbols, shape, out);
    true
}

fn put(symbols: &[u8], shape: Shape, out: &mut Vec<u8>) {
    varint::put(shape.width as u64, out);
    varint::put(shape.first as u64, out);
    let (mut models, mut bits) = (Models::new(), Encoder::new(out));
    let mut busy = Busy::new(shape);
    for (row, first) in shape.rows(symbols.len()) {
        busy.begin(first);
        for &symbol in &symbols[row] {
            models.put(busy.context(), symbol, &mut bits);
            busy.note(symbol);
        }
        busy.end();
    }
    bits.finish();
}

/// The inverse of [`encode`].
pub(super) fn decode(mut body: &[u8], out: &mut [u8]) -> Result<(), Corrupt> {
    let [width, first] = [varint::take(&mut body)?, varint::take(&mut body)?];
    // No row is longer than all symbols, so a payload cannot demand more memory.
    if !(1..=out.len() as u64).contains(&width) || first >= width {
        return Err(Corrupt("width of a grid"));
    }
    let shape = Shape { width: width as usize, first: first as usize };
    let (mut models, mut bits) = (Models::new(), Decoder::new(body));
    let mut busy = Busy::new(shape);
    for (row, first) in shape.rows(out.len()) {
        busy.begin(first);
        for symbol in &mut out[row] {
            *symbol = models.take(busy.context(), &mut bits);
            busy.note(*symbol);
        }
        busy.end();
    }
    bits.finish()
}

/// The probabilities of a symbol's bits.
struct Models {
    moves: [Bit; CONTEXTS],
    above: Bit,
    further: [[Bit; STEPS]; CONTEXTS],
    far: Bit,
    /// By the bits so far, with a 1 before them.
    eight: [Bit; 256],
}

impl Models {
    fn new() -> Models {
        Models {
            moves: [Bit::NEW; CONTEXTS],
            above: Bit::NEW,
            further: [[Bit::NEW; STEPS]; CONTEXTS],
            far: Bit::NEW,
            eight: [Bit::NEW; 256],
        }
    }

    #[inline(always)]
    fn further(&mut self, context: usize, step: u8) -> &mut Bit {
        &mut self.further[context][usize::from(step).min(STEPS) - 1]
    }

    #[inline(always)]
    fn put(&mut self, context: usize, symbol: u8, bits: &mut Encoder) {
        let distance = symbol.abs_diff(QUIET);
        bits.put(&mut self.moves[context], distance > 0);
        if distance == 0 {
            return;
        }
        bits.put(&mut self.above, symbol > QUIET);
        for step in 1..distance.min(NEAR) {
            bits.put(self.further(context, step), true);
        }
        if distance < NEAR {
            return bits.put(self.further(context, distance), false);
        }
        bits.put(&mut self.far, distance > NEAR);
        if distance > NEAR {
            for place in (0..8).rev() {
                let before = 1 << (7 - place) | usize::from(symbol) >> (place + 1);
                bits.put(&mut self.eight[before], symbol >> place & 1 == 1);
            }
        }
    }

    #[inline(always)]
    fn take(&mut self, context: usize, bits: &mut Decoder) -> u8 {
        if !bits.take(&mut self.moves[context]) {
            return QUIET;
        }
        let above = bits.take(&mut self.above);
        let mut distance = 1;
        while distance < NEAR && bits.take(self.further(context, distance)) {
            distance += 1;
        }
        if distance == NEAR && bits.take(&mut self.far) {
            let mut before = 1;
            while before < 256 {
                before = before << 1 | usize::from(bits.take(&mut self.eight[before]));
            }
            return before as u8;
        }
        if above { QUIET + distance } else { QUIET - distance }
    }
}

/// The activity of rows and columns, from the symbols coded so far.
struct Busy {
    /// By column: twice the sum of distances, plus 1.
    columns: Vec<u32>,
    /// All symbols before this row: the sum of distances, and the number of symbols; both begin at 1.
    sum: u64,
    count: u64,
    rows: u64,
    /// This row: the common part of its contexts; the sum of distances, plus 1; its symbols; the next column.
    base: i64,
    row_sum: u64,
    row_count: u64,
    column: usize,
}

/// log2 in sixteenths, linear between powers of two.
#[inline(always)]
fn sixteenths(x: u64) -> i64 {
    let exponent = x.ilog2();
    i64::from(exponent) * 16 + ((x << (63 - exponent)) >> 59 & 15) as i64
}

impl Busy {
    fn new(shape: Shape) -> Busy {
        Busy { columns: vec![1; shape.width], sum: 1, count: 1, rows: 0, base: 0, row_sum: 1, row_count: 0, column: 0 }
    }

    fn begin(&mut self, first: usize) {
        // The column's mean is (2c + 1) / (2 rows + 1 / mean). The row's is r / (count + 1 / mean), where r has 1 more.
        // Both begin as the mean of all, sum / count, as if one symbol of that size had been seen.
        self.base = sixteenths(self.sum) + sixteenths(self.count) - sixteenths(2 * self.rows * self.sum + self.count);
        (self.row_sum, self.row_count, self.column) = (1, 0, first);
    }

    #[inline(always)]
    fn context(&self) -> usize {
        let column = sixteenths(self.columns[self.column].into());
        let row = sixteenths(self.row_sum) - sixteenths(self.count + self.row_count * self.sum);
        let octave = (self.base + column + row + 8) >> 4;
        (octave - LOWEST).clamp(0, CONTEXTS as i64 - 1) as usize
    }

    #[inline(always)]
    fn note(&mut self, symbol: u8) {
        let distance = symbol.abs_diff(QUIET).min(NEAR);
        self.columns[self.column] += 2 * u32::from(distance);
        self.row_sum += u64::from(distance);
        self.row_count += 1;
        self.column += 1;
    }

    fn end(&mut self) {
        self.sum += self.row_sum - 1;
        self.count += self.row_count;
        self.rows += 1;
    }
}

/// Estimated share of bits that the activity of rows and columns saves, by octave, against symbols without order.
fn saving(symbols: &[u8], shape: Shape) -> f64 {
    let (mut rows, mut columns) = (Vec::new(), vec![(0u32, 0u32); shape.width]);
    for (row, first) in shape.rows(symbols.len()) {
        let count = row.len() as u32;
        let mut sum = 0;
        for (&symbol, column) in symbols[row].iter().zip(&mut columns[first..]) {
            let distance = u32::from(symbol.abs_diff(QUIET).min(NEAR));
            sum += distance;
            *column = (column.0 + distance, column.1 + 1);
        }
        rows.push((sum, count));
    }
    let total: f64 = rows.iter().map(|(sum, _)| f64::from(*sum)).sum();
    let mean = total / symbols.len() as f64;
    let octave = |&(sum, count): &(u32, u32)| match sum {
        0 => LOWEST as i32,
        _ => (f64::from(sum) / f64::from(count) / mean).log2().round() as i32,
    };
    let [rows, columns] = [rows, columns].map(|sums| sums.iter().map(octave).collect::<Vec<i32>>());
    let mut counts = [[0u32; 256]; CONTEXTS];
    for ((row, first), row_octave) in shape.rows(symbols.len()).zip(rows) {
        for (&symbol, octave) in symbols[row].iter().zip(&columns[first..]) {
            let context = (row_octave + octave - LOWEST as i32).clamp(0, CONTEXTS as i32 - 1);
            counts[context as usize][usize::from(symbol)] += 1;
        }
    }
    let known: f64 = counts.iter().map(|counts| cost::entropy_bits(counts)).sum();
    1.0 - known / cost::entropy_bits(&huffman::histogram(symbols)).max(1.0)
}

#[cfg(test)]
mod tests;
