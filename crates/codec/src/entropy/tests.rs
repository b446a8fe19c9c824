//! Round trips, cost against the entropy, and payloads that no encoder wrote.

use super::*;
use proptest::prelude::*;

/// A small deterministic generator: tests must not depend on the day.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Normal with standard deviation `sigma`, rounded.
    fn gauss(&mut self, sigma: f64) -> i32 {
        let (u, v) = (1.0 - self.unit(), self.unit());
        (sigma * (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()).round() as i32
    }
}

/// The symbols of one tile.
const TILE: usize = 128 * 1024;

fn gaussian(sigma: f64) -> Vec<i32> {
    let mut random = Random(42);
    (0..TILE).map(|_| random.gauss(sigma)).collect()
}

fn encode_bytes(symbols: &[u8]) -> Vec<u8> {
    let mut payload = Vec::new();
    symbols::encode(symbols, &mut payload);
    let mut out = vec![0xee; symbols.len()];
    symbols::decode(&payload, &mut out).unwrap();
    assert!(out == symbols, "{} symbols, mode {}", symbols.len(), payload[0]);
    payload
}

fn encode_ints(values: &[i32]) -> Vec<u8> {
    let mut payload = Vec::new();
    ints::encode(values, &mut payload);
    let mut out = vec![0x5555_5555; values.len()];
    ints::decode(&payload, &mut out).unwrap();
    assert!(out == values);
    payload
}

/// In blocks like tiles: many large values are halved.
fn encode_blocks(values: &[i32]) -> Vec<u8> {
    let mut payload = Vec::new();
    let fill = |start: usize, block: &mut [i32]| block.copy_from_slice(&values[start..][..block.len()]);
    ints::encode_blocks(values.len(), &mut payload, |_, _| false, fill);
    comes_back(values, &payload);
    payload
}

/// Decodes alone, in a sum, and in pieces.
fn comes_back(values: &[i32], payload: &[u8]) {
    let mut out = vec![0x5555_5555; values.len()];
    ints::decode(payload, &mut out).unwrap();
    assert!(out == values);
    let mut pieces = Vec::new();
    ints::decode_blocks(payload, values.len(), |start, block| {
        assert_eq!(start, pieces.len());
        pieces.extend_from_slice(block);
        Ok(())
    })
    .unwrap();
    assert!(pieces == values);
}

/// The number of low bits that are packed.
fn packed_bits(payload: &[u8]) -> u8 {
    if payload[0] == 0 { payload[1] } else { 0 }
}

#[test]
fn many_large_values_are_halved_and_cost_no_more() {
    for (sigma, width) in [(1.0, 0), (3.0, 0), (6.0, 1), (100.0, 5), (1e4, 12), (1e8, 24)] {
        for more in [0, 1, 600] {
            let mut random = Random(7 + more);
            let values: Vec<i32> = (0..TILE + more as usize).map(|_| random.gauss(sigma)).collect();
            let payload = encode_blocks(&values);
            assert_eq!(packed_bits(&payload), width, "{sigma}");
            let plain = encode_ints(&values).len();
            assert!(payload.len() as f64 <= 1.012 * plain as f64, "{sigma}: {} of {plain} bytes", payload.len());
        }
    }
    // Few values, or low bits that are not random, are not packed.
    assert_eq!(packed_bits(&encode_blocks(&gaussian(100.0)[..TILE - 1])), 0);
    let mut some = gaussian(1000.0);
    some.iter_mut().enumerate().for_each(|(at, value)| *value *= i32::from(at % 5 == 0));
    assert_eq!(packed_bits(&encode_blocks(&some)), 0);
    some.iter_mut().for_each(|value| *value = *value & !63 | 9);
    assert_eq!(packed_bits(&encode_blocks(&some)), 0);
    // Values outside the sampled blocks must come back too.
    let mut last = gaussian(100.0);
    last[TILE - 3..].copy_from_slice(&[i32::MIN, i32::MAX, i32::MIN + 1]);
    assert!(packed_bits(&encode_blocks(&last)) > 0);
}

#[test]
fn costs_stay_near_the_entropy() {
    for (sigma, percent) in [
        (0.3, 3.0),
        (0.35, 3.0),
        (0.4, 3.0),
        (0.5, 2.0),
        (0.6, 2.0),
        (0.7, 2.0),
        (1.0, 2.5),
        (1.4, 2.0),
        (2.0, 2.0),
        (4.0, 1.5),
        (30.0, 2.0),
    ] {
        let values = gaussian(sigma);
        let ideal = ints::estimate_bits(&values);
        let cost = encode_ints(&values).len() as f64 * 8.0;
        let over = (cost / ideal - 1.0) * 100.0;
        println!("sigma {sigma}: {:.4} bits, {over:+.2}%", cost / TILE as f64);
        assert!(over < percent, "sigma {sigma}: {:.4} bits, {over:.2}% over", cost / TILE as f64);
    }
}

#[test]
fn sparse_symbols_cost_next_to_nothing() {
    for density in [0.2, 0.1, 0.05, 0.02, 0.01, 1e-3, 1e-4] {
        let mut random = Random(7);
        let values: Vec<i32> =
            (0..TILE).map(|_| if random.unit() < density { 1 - 2 * (random.next() & 1) as i32 } else { 0 }).collect();
        let ideal = ints::estimate_bits(&values);
        let cost = encode_ints(&values).len() as f64 * 8.0;
        println!("density {density}: {:.5} bits, ideal {:.5}", cost / TILE as f64, ideal / TILE as f64);
        assert!(cost < ideal * 1.04 + 600.0, "density {density}: {cost} against {ideal}");
    }
    assert!(encode_ints(&vec![0; TILE]).len() <= 4);
    assert!(encode_ints(&vec![-70_000; TILE]).len() <= 4 + TILE * 14 / 8 + 2);
}

#[test]
fn an_independent_coder_agrees_on_what_is_possible() {
    use constriction::stream::{model::DefaultContiguousCategoricalEntropyModel, stack::DefaultAnsCoder};
    let values = gaussian(0.55);
    let symbols: Vec<usize> = values.iter().map(|v| (v + 15) as usize).collect();
    let mut counts = vec![0f64; 31];
    symbols.iter().for_each(|&s| counts[s] += 1.0);
    let model =
        DefaultContiguousCategoricalEntropyModel::from_floating_point_probabilities_fast(&counts, None).unwrap();
    let mut coder = DefaultAnsCoder::new();
    coder.encode_iid_symbols_reverse(&symbols, &model).unwrap();
    let ans = coder.num_bits() as f64;
    let ours = encode_ints(&values).len() as f64 * 8.0;
    assert!(ours < ans * 1.02, "{ours} against {ans}");
}

#[test]
fn every_mode_and_length_comes_back() {
    let mut random = Random(3);
    for length in (0..70)
        .chain([255, 256, 2047, 2048, 2049, 4095, 4096, 4097, 6143, 6144, 6145, 8191, 8192, 8193, 10_241, 65_537])
    {
        for spread in [1, 2, 3, 5, 9, 17, 100, 256] {
            for frequent in [0.0, 0.5, 0.8, 0.95, 0.999] {
                let base = random.next() as u8;
                let symbols: Vec<u8> = (0..length)
                    .map(|_| {
                        if random.unit() < frequent { base } else { base.wrapping_add((random.next() % spread) as u8) }
                    })
                    .collect();
                let payload = encode_bytes(&symbols);
                assert!(payload.len() <= length + 1);
            }
        }
    }
}

#[test]
fn all_modes_are_reached() {
    let mut modes = [false; 5];
    for sigma in [0.05, 0.5, 1.0, 6.0] {
        let classes: Vec<u8> = gaussian(sigma).iter().map(|&v| v.clamp(-100, 100) as u8).collect();
        modes[encode_bytes(&classes)[0] as usize] = true;
    }
    modes[encode_bytes(&[5; 100])[0] as usize] = true;
    modes[encode_bytes(&(0..=255).collect::<Vec<_>>())[0] as usize] = true;
    assert_eq!(modes, [true; 5]);
}

#[test]
fn block_shapes_all_come_back() {
    let mut random = Random(11);
    for length in [1, 2, 3, 4, 5, 7, 100, 8192, 10_239, 10_240, 10_241, 30_001] {
        for spread in [2, 3, 4, 6, 16, 256] {
            let base = random.next() as u8;
            let symbols: Vec<u8> = (0..length)
                .map(|_| base.wrapping_add(((random.next() % spread) * (random.next() % spread) % 256) as u8))
                .collect();
            let counts = symbols::histogram(&symbols);
            let range = (*symbols.iter().min().unwrap(), *symbols.iter().max().unwrap());
            for (k, digits) in blocks::SHAPES {
                let shape = blocks::Shape::fit(&counts, range, k, digits);
                if shape.digits < 2 {
                    continue;
                }
                let mut payload = Vec::new();
                let literals = blocks::encode(&symbols, shape, &mut payload);
                symbols::encode(&literals, &mut payload);
                let mut out = vec![0; length];
                blocks::decode(&payload, &mut out, symbols::decode).unwrap();
                assert!(out == symbols, "{length} {spread} {shape:?}");
            }
        }
    }
}

#[test]
fn extremes_come_back() {
    let mut values = vec![i32::MIN, i32::MAX, 0, -1, 1, i32::MIN + 1];
    for shift in 0..31 {
        for near in [-1, 0, 1] {
            values.extend([(1i32 << shift) + near, -(1 << shift) + near]);
        }
    }
    encode_ints(&values);
    for &value in &values {
        encode_ints(&[value]);
    }
    encode_ints(&[]);
    let all_small: Vec<i32> = (-16..=16).collect();
    encode_ints(&all_small);
}

#[test]
fn code_lengths_are_complete_and_limited() {
    let mut random = Random(5);
    for used in 1..=256 {
        for skew in [0, 1, 3, 20] {
            let mut counts = [0u32; 256];
            for (i, count) in counts.iter_mut().take(used).enumerate() {
                *count =
                    1 + (random.next() % 100) as u32 + i.checked_div(skew).map_or(0, |i| u32::MAX >> 9 >> i.min(22));
            }
            let lengths = huffman::code_lengths(&counts, huffman::MAX_LENGTH);
            let space: u32 =
                lengths.iter().filter(|&&l| l > 0).map(|&l| 1 << (huffman::MAX_LENGTH - u32::from(l))).sum();
            assert_eq!(space, 1 << huffman::MAX_LENGTH);
            assert!((0..used).all(|word| lengths[word] > 0));
        }
    }
}

fn any_values() -> impl Strategy<Value = Vec<i32>> {
    let value = prop_oneof![
        6 => -3..4i32,
        2 => -200..200i32,
        1 => any::<i32>(),
        1 => Just(i32::MIN),
        1 => Just(i32::MAX),
    ];
    prop_oneof![
        prop::collection::vec(value, 0..5000),
        prop::collection::vec(-1..2i32, 0..20_000),
        prop::collection::vec(prop_oneof![50 => Just(0), 1 => any::<i32>()], 0..20_000),
        (any::<i32>(), 0..5000usize).prop_map(|(value, n)| vec![value; n]),
    ]
}

proptest! {
    #[test]
    fn ints_come_back(values in any_values()) {
        encode_ints(&values);
    }

    #[test]
    fn halved_ints_come_back(
        values in any_values(),
        width in 1..=24u32,
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..5),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut payload = Vec::new();
        let fill = |start: usize, block: &mut [i32]| block.copy_from_slice(&values[start..][..block.len()]);
        ints::encode_halved(values.len(), if values.is_empty() { 0 } else { width }, &mut payload, |_, _| false, fill);
        comes_back(&values, &payload);
        let mut out = vec![0; values.len()];
        prop_assert!(values.is_empty() || ints::decode(&payload[..cut.index(payload.len()).min(2)], &mut out).is_err());
        let _ = ints::decode(&payload[..cut.index(payload.len())], &mut out);
        let _ = ints::decode(&payload, &mut vec![0; values.len() + 700]);
        for (i, (at, byte)) in flips.into_iter().enumerate() {
            let at = at.index(if i % 2 == 0 { payload.len().min(40) } else { payload.len() });
            payload[at] ^= byte;
        }
        let _ = ints::decode(&payload, &mut out);
    }

    #[test]
    fn adding_is_checked(values in any_values(), start in any::<i32>()) {
        let mut payload = Vec::new();
        ints::encode(&values, &mut payload);
        let mut acc = vec![start; values.len()];
        let sums: Option<Vec<i32>> = values.iter().map(|v| v.checked_add(start)).collect();
        let mut back = vec![0; values.len()];
        ints::decode(&payload, &mut back).unwrap();
        prop_assert_eq!(ints::add(simd::Level::detect(), &back, &mut acc), sums.is_some());
        if let Some(sums) = sums {
            prop_assert!(acc == sums);
        }
    }

    #[test]
    fn bytes_come_back(symbols in prop::collection::vec(any::<u8>(), 0..5000), mask: u8) {
        encode_bytes(&symbols);
        encode_bytes(&symbols.iter().map(|s| s & mask).collect::<Vec<_>>());
    }

    #[test]
    fn noise_never_panics(payload in prop::collection::vec(any::<u8>(), 0..300), mode in 0..6u8, n in 0..20_000usize) {
        let mut out = vec![0; n];
        let _ = symbols::decode(&payload, &mut out);
        let mut with_mode = vec![mode];
        with_mode.extend(&payload);
        let _ = symbols::decode(&with_mode, &mut out);
        let _ = ints::decode(&payload, &mut vec![0; n]);
    }

    #[test]
    fn damage_never_panics(
        values in any_values(),
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..5),
        cut in any::<prop::sample::Index>(),
        length in 0..30_000usize,
    ) {
        let mut payload = Vec::new();
        ints::encode(&values, &mut payload);
        let _ = ints::decode(&payload, &mut vec![0; length]);
        let mut out = vec![0; values.len()];
        let _ = ints::decode(&payload[..cut.index(payload.len())], &mut out);
        // Most of the fields are at the front.
        for (i, (at, byte)) in flips.into_iter().enumerate() {
            let at = at.index(if i % 2 == 0 { payload.len().min(40) } else { payload.len() });
            payload[at] ^= byte;
        }
        let _ = ints::decode(&payload, &mut out);
    }

    #[test]
    fn varints_come_back(value: u64, tail in prop::collection::vec(any::<u8>(), 0..20)) {
        let mut out = Vec::new();
        varint::put(value, &mut out);
        out.extend(&tail);
        let mut rest = out.as_slice();
        prop_assert_eq!(varint::take(&mut rest), Ok(value));
        prop_assert_eq!(rest, tail.as_slice());
        let _ = varint::take(&mut tail.as_slice());
    }
}
