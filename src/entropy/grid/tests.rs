use proptest::prelude::*;

use super::*;
use crate::entropy::symbols;

/// Symbols around [`QUIET`], in rows and columns with activity of different octaves.
fn symbols(n: usize, shape: Shape, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let mut next = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u32
    };
    let rows: Vec<u32> = (0..=(shape.first + n) / shape.width).map(|_| next() % 4).collect();
    let columns: Vec<u32> = (0..shape.width).map(|_| next() % 4).collect();
    let mut symbols = Vec::new();
    for ((row, first), busy) in shape.rows(n).zip(rows) {
        for (_, column) in row.zip(&columns[first..]) {
            let moves = next() % 64 < 1 << (busy + column);
            symbols.push(if moves { QUIET + 1 - 2 * (next() % 2) as u8 } else { QUIET });
        }
    }
    symbols
}

fn decoded(payload: &[u8], n: usize) -> Result<Vec<u8>, Corrupt> {
    let mut out = vec![0xaa; n];
    symbols::decode(payload, &mut out)?;
    Ok(out)
}

#[test]
fn busy_rows_and_columns_are_cheaper_together() {
    let shape = Shape { width: 200, first: 30 };
    let symbols = symbols(20_000, shape, 7);
    let (mut plain, mut rows) = (Vec::new(), Vec::new());
    symbols::encode(&symbols, &mut plain);
    symbols::encode_rows(&symbols, shape, &mut rows);
    assert!(rows.len() as f64 <= 0.88 * plain.len() as f64, "{} {}", rows.len(), plain.len());
    assert_eq!(decoded(&rows, symbols.len()), Ok(symbols));
}

#[test]
fn rows_that_are_alike_cost_nothing_more() {
    let shape = Shape { width: 256, first: 0 };
    let mut alike = symbols(65_536, Shape { width: 1, first: 0 }, 3);
    alike.rotate_left(1);
    let (mut plain, mut rows) = (Vec::new(), Vec::new());
    symbols::encode(&alike, &mut plain);
    symbols::encode_rows(&alike, shape, &mut rows);
    assert!(rows.len() as f64 <= 1.001 * plain.len() as f64, "{} {}", rows.len(), plain.len());
}

proptest! {
    #[test]
    fn any_shape_comes_back(n in 1usize..5000, width in 1usize..700, first in 0usize..700, seed: u64) {
        let shape = Shape { width, first: first % width };
        let symbols = symbols(n, shape, seed);
        let mut payload = Vec::new();
        symbols::encode_rows(&symbols, shape, &mut payload);
        prop_assert_eq!(decoded(&payload, n), Ok(symbols));
    }

    #[test]
    fn damage_is_an_error_or_other_symbols(
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        head in any::<bool>(),
        cut in any::<prop::sample::Index>(),
        n in 0usize..9000,
    ) {
        let shape = Shape { width: 40, first: 3 };
        let symbols = symbols(6000, shape, 11);
        let mut payload = Vec::new();
        symbols::encode_rows(&symbols, shape, &mut payload);
        prop_assert_eq!(payload[0], 5);
        let _ = decoded(&payload, n);
        for (at, flip) in &flips {
            let reach = if head { 16 } else { payload.len() };
            let at = at.index(reach);
            payload[at] ^= flip;
        }
        let _ = decoded(&payload, 6000);
        payload.truncate(cut.index(payload.len()));
        let _ = decoded(&payload, 6000);
    }
}

proptest! {
    /// For any symbols, even unsuitable ones.
    #[test]
    fn any_symbols_come_back(
        symbols in prop::collection::vec(any::<u8>(), 1..2000),
        few in any::<bool>(),
        width in 1usize..60,
    ) {
        let symbols: Vec<u8> = symbols.iter().map(|s| if few { QUIET + s % 3 } else { *s }).collect();
        let shape = Shape { width: width.min(symbols.len()), first: 0 };
        let mut payload = Vec::new();
        put(&symbols, shape, &mut payload);
        let mut out = vec![0; symbols.len()];
        decode(&payload, &mut out).unwrap();
        prop_assert_eq!(out, symbols);
        payload.push(0);
        let mut out = vec![0; shape.width];
        prop_assert!(decode(&payload, &mut out).is_err());
    }
}

/// Released objects have such payloads: if this fails, they cannot be read any more.
#[test]
fn the_bits_are_those_of_the_format() {
    let shape = Shape { width: 50, first: 7 };
    let mut symbols = symbols(4000, shape, 5);
    symbols.iter_mut().step_by(97).zip(0u8..).for_each(|(symbol, any)| *symbol = any.wrapping_mul(37));
    let mut payload = Vec::new();
    put(&symbols, shape, &mut payload);
    let hash = xxhash_rust::xxh3::xxh3_64(&payload);
    assert_eq!((payload.len(), hash), (596, 2_283_073_581_577_058_124));
}
