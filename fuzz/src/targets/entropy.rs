//! Symbols to bits and back.

use codec::entropy::{ints, symbols};

use super::input::Input;

/// More than one chunk of every loop, more than a Huffman body with one stream.
const MOST: usize = 70_000;

/// Any payload, decoded to any number of symbols. Decoded symbols are encoded again, and decode to the same.
pub(crate) fn decode(data: &[u8]) {
    let mut input = Input::new(data);
    let (kind, long) = (input.byte() % 4, input.flag());
    let count = input.upto(if long { MOST } else { 300 });
    let payload = input.rest();
    match kind {
        0 | 1 => {
            let mut out = vec![0xaa; count];
            if symbols::decode(payload, &mut out).is_ok() {
                bytes_return(&out);
            }
        }
        _ => {
            let mut out = vec![0; count];
            if ints::decode(payload, &mut out).is_ok() {
                ints_return(&out);
            }
        }
    }
}

/// Symbols of any kind.
pub(crate) fn round_trip(data: &[u8]) {
    let mut input = Input::new(data);
    let (wide, runs, long) = (input.flag(), input.flag(), input.flag());
    let count = input.upto(if long { MOST } else { 500 });
    let raw = input.filled(count);
    let mut symbols: Vec<u8> = Vec::with_capacity(count);
    if runs {
        // A symbol and its count.
        for pair in raw.chunks(2) {
            if symbols.len() > MOST {
                break;
            }
            let times = usize::from(*pair.last().unwrap_or(&0));
            symbols.extend(std::iter::repeat_n(pair[0], times * times / 64 + 1));
        }
    } else {
        let spread = input.byte().max(1);
        symbols.extend(raw.iter().map(|byte| if wide { *byte } else { byte.wrapping_rem(spread).wrapping_add(15) }));
    }
    bytes_return(&symbols);
    let magnitude = input.byte() % 32;
    let values: Vec<i32> = symbols
        .chunks_exact(4)
        .map(|word| i32::from_le_bytes([word[0], word[1], word[2], word[3]]) >> magnitude)
        .chain(symbols.iter().map(|symbol| i32::from(*symbol) - 15))
        .chain([i32::MIN, i32::MAX].into_iter().take(usize::from(wide) * 2))
        .collect();
    ints_return(&values);
}

fn bytes_return(symbols: &[u8]) {
    let mut each: [Vec<u8>; 2] = Default::default();
    symbols::encode(symbols, &mut each[0]);
    symbols::encode_huffman(symbols, &mut each[1]);
    for payload in &each {
        // FORMAT.md: raw costs a byte, and nothing costs more.
        assert!(payload.len() <= symbols.len() + 1);
        let mut back = vec![0x55; symbols.len()];
        symbols::decode(payload, &mut back).expect("written bytes can be read");
        assert!(back == symbols);
        if let Some((_, short)) = payload.split_last() {
            let _ = symbols::decode(short, &mut back);
        }
    }
}

fn ints_return(values: &[i32]) {
    let mut payload = Vec::new();
    ints::encode(values, &mut payload);
    let mut back = vec![1; values.len()];
    ints::decode(&payload, &mut back).expect("written bytes can be read");
    assert!(back == values);
}
