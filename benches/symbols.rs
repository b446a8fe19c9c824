//! Symbols of rows and columns that differ in how busy they are: the adaptive coder beside Huffman codes, the best of
//! some rounds.
//!
//!     cargo bench --bench symbols

use std::time::{Duration, Instant};

use stepfs::entropy::grid::Shape;
use stepfs::entropy::symbols;

const WIDTH: usize = 400;
const ROWS: usize = 300;
/// Long enough that the clock's grain is nothing.
const ROUND: Duration = Duration::from_millis(300);
const ROUNDS: usize = 5;

fn main() {
    let symbols = symbols();
    let (mut plain, mut grid) = (Vec::new(), Vec::new());
    symbols::encode(&symbols, &mut plain);
    let shape = Shape { width: WIDTH, first: 0 };
    symbols::encode_rows(&symbols, shape, &mut grid);
    let mut out = vec![0; symbols.len()];
    for (name, payload) in [("Huffman", &plain), ("grid", &grid)] {
        let encode = speed(symbols.len(), || {
            let mut payload = Vec::new();
            match name {
                "grid" => symbols::encode_rows(&symbols, shape, &mut payload),
                _ => symbols::encode(&symbols, &mut payload),
            }
        });
        let decode = speed(symbols.len(), || symbols::decode(payload, &mut out).expect("own payload"));
        let bits = payload.len() as f64 * 8.0 / symbols.len() as f64;
        println!("{name}: {bits:.3} bits a symbol, encode {encode:.0}, decode {decode:.0} million symbols/s");
    }
}

/// Updates of a layer of which some units and inputs are quiet: 15 is no change.
fn symbols() -> Vec<u8> {
    let mut state = 1u64;
    let mut next = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u32
    };
    let rows: Vec<u32> = (0..ROWS).map(|_| next() % 5).collect();
    let columns: Vec<u32> = (0..WIDTH).map(|_| next() % 5).collect();
    let mut symbols = Vec::new();
    for row in rows {
        for column in &columns {
            let moves = next() % 512 < 1 << (row + column);
            symbols.push(if moves { 16 - 2 * (next() % 2) as u8 } else { 15 });
        }
    }
    symbols
}

/// Millions of symbols a second, the best of some rounds.
fn speed(symbols: usize, mut job: impl FnMut()) -> f64 {
    let mut best = 0f64;
    for _ in 0..ROUNDS {
        let (start, mut count) = (Instant::now(), 0);
        while start.elapsed() < ROUND {
            job();
            count += symbols;
        }
        best = best.max(count as f64 / 1e6 / start.elapsed().as_secs_f64());
    }
    best
}
