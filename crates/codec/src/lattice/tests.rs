use super::*;
use crate::Integers;
use crate::float::{Bf16, F16, F32, F64};
use crate::log::{self, From, MAX_Q, ZERO};
use crate::plain::decode_tile_add;
use proptest::prelude::*;

const FLOATS: [Dtype; 4] = [Dtype::F16, Dtype::Bf16, Dtype::F32, Dtype::F64];

/// `values` rounded to the type, as bytes.
fn tile(dtype: Dtype, values: &[f64]) -> Vec<u8> {
    for_float!(dtype, F => values.iter().flat_map(|&v| F::round(v)).collect(), else unreachable!())
}

fn widen(dtype: Dtype, data: &[u8]) -> Vec<f64> {
    for_float!(dtype, F => F::elements(data).iter().map(|&e| F::widen(e)).collect(), else unreachable!())
}

struct Quantized {
    a: Vec<i32>,
    r: Vec<u8>,
    exceptions: Vec<Exception>,
    largest: f64,
}

fn run(dtype: Dtype, w: &[u8], k: Option<&[u8]>, g: f64) -> Result<Quantized, Unfit> {
    let mut q =
        Quantized { a: vec![7; w.len() / dtype.size()], r: vec![7; w.len()], exceptions: Vec::new(), largest: 0.0 };
    q.largest = quantize(dtype, w, k, g, &mut q.a, &mut q.r, &mut q.exceptions)?;
    Ok(q)
}

/// Invariants of every quantized tile.
fn check(dtype: Dtype, w: &[u8], k: Option<&[u8]>, g: f64, q: &Quantized) {
    let (exact, decoded) = (widen(dtype, w), widen(dtype, &q.r));
    let mut largest = 0f64;
    for (w, r) in exact.iter().zip(&decoded) {
        assert!((r - w).abs() <= g / 2.0, "{r} for {w}, step {g}");
        largest = largest.max((r - w).abs());
    }
    assert_eq!(largest, q.largest);
    let mut r = vec![0; w.len()];
    reconstruct(dtype, k, g, &q.a, &mut r).unwrap();
    apply_exceptions(dtype, &q.exceptions, &mut r).unwrap();
    assert_eq!(r, q.r);
    for e in &q.exceptions {
        let size = dtype.size();
        let at = e.index as usize * size;
        assert_eq!(w[at..at + size], e.raw.to_le_bytes()[..size]);
    }
    let mut payload = Vec::new();
    encode_tile(&q.a, None, &q.exceptions, &mut payload).unwrap();
    let mut acc = vec![0; q.a.len()];
    let mut exceptions = Vec::new();
    decode_tile_add(&payload, &mut acc, &mut exceptions).unwrap();
    assert_eq!(acc, q.a);
    assert_eq!(exceptions, q.exceptions);
}

fn step() -> impl Strategy<Value = f64> {
    ((1u32 << 23)..1 << 24, -60i32..10).prop_map(|(m, e)| f64::from(m) * 2f64.powi(e - 23))
}

fn value() -> impl Strategy<Value = f64> {
    prop_oneof![
        4 => -1.0..1.0f64,
        2 => (-1.0..1.0f64, -40i32..16).prop_map(|(m, e)| m * 2f64.powi(e)),
        1 => Just(0.0),
        1 => Just(-0.0),
        1 => Just(6e-8),
        1 => Just(1e-40),
        1 => Just(-60000.0),
    ]
}

proptest! {
    #[test]
    fn bound_holds_and_everything_comes_back(
        pairs in prop::collection::vec((value(), value()), 0..1500),
        g in step(),
        dtype in prop::sample::select(FLOATS.as_slice()),
        keyed: bool,
    ) {
        let w = tile(dtype, &pairs.iter().map(|p| p.0).collect::<Vec<_>>());
        let k = tile(dtype, &pairs.iter().map(|p| p.1).collect::<Vec<_>>());
        let k = keyed.then_some(k.as_slice());
        match run(dtype, &w, k, g) {
            Ok(q) => check(dtype, &w, k, g, &q),
            Err(_) => {
                let k = k.map_or(vec![0.0; pairs.len()], |k| widen(dtype, k));
                let far = widen(dtype, &w).iter().zip(&k).any(|(w, k)| (w - k).abs() / g > f64::from(MAX_A) * 0.999);
                prop_assert!(far);
            }
        }
    }

    #[test]
    fn any_bits_hold_the_bound_or_are_unfit(
        bits in prop::collection::vec(any::<u64>(), 1..300),
        other in any::<u64>(),
        g in step(),
        dtype in prop::sample::select(FLOATS.as_slice()),
    ) {
        let data = |mask: u64| -> Vec<u8> {
            bits.iter().flat_map(|b| (b ^ mask).to_le_bytes()[..dtype.size()].to_vec()).collect()
        };
        let (w, k) = (data(0), data(other));
        for k in [None, Some(k.as_slice())] {
            if let Ok(q) = run(dtype, &w, k, g) {
                check(dtype, &w, k, g, &q);
            }
        }
    }

    #[test]
    fn all_levels_give_the_same_bits(
        pairs in prop::collection::vec((value(), value(), -MAX_A..MAX_A), 1..300),
        g in step(),
    ) {
        fn compare<F: Float>(dtype: Dtype, pairs: &[(f64, f64, i32)], g: f64)
        where
            F::Bytes: PartialEq + std::fmt::Debug,
        {
            let w = tile(dtype, &pairs.iter().map(|p| p.0).collect::<Vec<_>>());
            let k = tile(dtype, &pairs.iter().map(|p| p.1).collect::<Vec<_>>());
            let a: Vec<i32> = pairs.iter().map(|p| p.2).collect();
            for k in [None, Some(F::elements(&k))] {
                let outcomes: Vec<_> = Level::available().into_iter().map(|level| {
                    let (mut a_out, mut r, mut far) =
                        (vec![0; a.len()], F::elements(&w).to_vec(), F::elements(&w).to_vec());
                    let (error, fits) = quantize_chunk::<F>(level, F::elements(&w), k, g, &mut a_out, &mut r);
                    reconstruct_chunk::<F, i32, f64>(level, k, g, &a, &mut far);
                    // Out of range the low bits of A mean nothing, but they must be equal.
                    (error.to_bits(), fits, a_out, r, far)
                }).collect();
                for outcome in &outcomes {
                    assert_eq!(outcome, &outcomes[0]);
                }
            }
        }
        compare::<F16>(Dtype::F16, &pairs, g);
        compare::<Bf16>(Dtype::Bf16, &pairs, g);
        compare::<F32>(Dtype::F32, &pairs, g);
        compare::<F64>(Dtype::F64, &pairs, g);
    }

    #[test]
    fn merging_deltas_is_adding_them(
        states in prop::collection::vec((-MAX_A..MAX_A, -40..40i32, -3..3i32), 0..3000),
    ) {
        let a0: Vec<i32> = states.iter().map(|s| s.0 >> 8).collect();
        let a1: Vec<i32> = a0.iter().zip(&states).map(|(a, s)| a + s.1).collect();
        let a2: Vec<i32> = a1.iter().zip(&states).map(|(a, s)| a + s.2).collect();
        let delta = |a: &[i32], parent: &[i32]| {
            let mut payload = Vec::new();
            encode_tile(a, Some(parent), &[], &mut payload).unwrap();
            payload
        };
        let mut by_steps = a0.clone();
        decode_tile_add(&delta(&a1, &a0), &mut by_steps, &mut Vec::new()).unwrap();
        decode_tile_add(&delta(&a2, &a1), &mut by_steps, &mut Vec::new()).unwrap();
        let mut merged = a0.clone();
        decode_tile_add(&delta(&a2, &a0), &mut merged, &mut Vec::new()).unwrap();
        prop_assert_eq!(&by_steps, &a2);
        prop_assert_eq!(&merged, &a2);
    }

    #[test]
    fn damaged_payloads_are_errors_or_other_values(
        a in prop::collection::vec(prop_oneof![8 => -2..3i32, 1 => any::<i32>()], 0..3000),
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        cut in any::<prop::sample::Index>(),
        elements in 0..4000usize,
    ) {
        let exceptions = [Exception { index: 1, raw: 9 }, Exception { index: 5, raw: u64::MAX }];
        let mut payload = Vec::new();
        encode_tile(&a, None, &exceptions, &mut payload).unwrap();
        let _ = decode_tile_add(&payload, &mut vec![0; elements], &mut Vec::new());
        let _ = decode_tile_add(&payload[..cut.index(payload.len())], &mut vec![0; a.len()], &mut Vec::new());
        for (at, byte) in flips {
            let at = at.index(payload.len());
            payload[at] ^= byte;
        }
        let _ = decode_tile_add(&payload, &mut vec![1; a.len()], &mut Vec::new());
    }

    #[test]
    fn noise_is_no_payload_that_panics(
        payload in prop::collection::vec(any::<u8>(), 0..200),
        elements in 0..5000usize,
    ) {
        let _ = decode_tile_add(&payload, &mut vec![0; elements], &mut Vec::new());
    }
}

#[test]
fn values_that_are_not_finite_are_unfit() {
    for dtype in FLOATS {
        for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let (good, bad) = (tile(dtype, &[1.0; 9]), tile(dtype, &[1.0, 1.0, bad, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]));
            assert!(run(dtype, &bad, None, 0.5).is_err());
            assert!(run(dtype, &bad, Some(&good), 0.5).is_err());
            assert!(run(dtype, &good, Some(&bad), 0.5).is_err());
            assert!(run(dtype, &bad, Some(&bad), 0.5).is_err());
        }
    }
}

#[test]
fn too_many_steps_are_unfit_and_the_last_ones_fit() {
    let w = tile(Dtype::F64, &[f64::from(MAX_A), -f64::from(MAX_A)]);
    assert_eq!(run(Dtype::F64, &w, None, 1.0).unwrap().a, [MAX_A, -MAX_A]);
    let w = tile(Dtype::F64, &[f64::from(MAX_A) + 1.0]);
    assert!(run(Dtype::F64, &w, None, 1.0).is_err());
    let mut payload = Vec::new();
    assert!(encode_tile(&[i32::MIN], Some(&[1]), &[], &mut payload).is_err());
}

#[test]
fn sums_beyond_32_bits_are_errors() {
    let mut payload = Vec::new();
    encode_tile(&[1, 1], None, &[], &mut payload).unwrap();
    let mut none = Vec::new();
    assert!(decode_tile_add(&payload, &mut [i32::MAX, 0], &mut none).is_err());
    assert!(decode_tile_add(&payload, &mut [i32::MAX - 1, 0], &mut none).is_ok());
}

#[test]
fn ties_in_bf16_hold_the_bound() {
    // Steps of half a unit in the last place: K + g*A falls on ties of the type again and again.
    let w: Vec<f64> = (0..512).map(|i| 1.0 + f64::from(i) / 128.0).collect();
    let k: Vec<f64> = (0..512).map(|i| 1.0 + f64::from(i * 7 % 512) / 128.0).collect();
    let (w, k) = (tile(Dtype::Bf16, &w), tile(Dtype::Bf16, &k));
    for g in [1.0 / 64.0, 1.0 / 128.0, 1.0 / 256.0, 1.0 / 512.0, 3.0 / 512.0] {
        check(Dtype::Bf16, &w, Some(&k), g, &run(Dtype::Bf16, &w, Some(&k), g).unwrap());
    }
}

#[test]
fn chosen_steps() {
    assert_eq!(choose_g(Dtype::F32, &[], 1.0), None);
    assert_eq!(choose_g(Dtype::F32, &[0.0, -0.0], 1.0), None);
    assert_eq!(choose_g(Dtype::F32, &[1.0, f64::NAN], 1.0), None);
    assert_eq!(choose_g(Dtype::F32, &[f64::INFINITY], 1.0), None);
    assert_eq!(choose_g(Dtype::F32, &[0.5, -0.5], 1.0), Some(0.5));
    assert_eq!(choose_g(Dtype::Bf16, &[0.4, -0.4], 1.0), Some(0.5));
    assert_eq!(choose_g(Dtype::F64, &[1e-200, 1e-200], 1.0).map(|g| (g / 1e-200 - 1.0).abs() < 0.07), Some(true));
    for u in [1e-30, 3.3e-5, 0.7, 123.456] {
        let g = choose_g(Dtype::F32, &[u], 2.0).unwrap();
        assert!(is_step(g) && (g / (2.0 * u) - 1.0).abs() < 0.07);
    }
    assert!(!is_step(0.0) && !is_step(-1.0) && !is_step(f64::NAN) && !is_step(f64::INFINITY) && !is_step(0.1));
    assert!(is_step(f64::from(0.1f32)) && !is_step(f64::MIN_POSITIVE / 2.0) && !is_step(f64::MAX));
}

#[test]
fn updates_are_of_the_values() {
    for dtype in FLOATS {
        let (new, old) = (tile(dtype, &[1.0, -2.0]), tile(dtype, &[0.5, 2.0]));
        assert_eq!(updates(dtype, &new, &old), [0.5, -4.0]);
    }
    assert!(updates(Dtype::U8, &[1], &[2]).is_empty());
}

proptest! {
    #[test]
    fn a_chain_may_change_its_step(
        states in prop::collection::vec((-100_000..100_000i32, -40..40i32), 0..3000),
        from in 1e-6..1e-2f64,
        to in 1e-6..1e-2f64,
    ) {
        let (from, to) = (round_bits(from, STEP_BITS), round_bits(to, STEP_BITS));
        let parent: Vec<i32> = states.iter().map(|s| s.0).collect();
        let mut predicted = parent.clone();
        rescale(&mut predicted, from, to).unwrap();
        for (p, a) in predicted.iter().zip(&parent) {
            prop_assert!((f64::from(*p) - f64::from(*a) * from / to).abs() <= 0.500001);
        }
        let child: Vec<i32> = predicted.iter().zip(&states).map(|(a, s)| a + s.1).collect();
        let mut payload = Vec::new();
        encode_tile(&child, Some(&predicted), &[], &mut payload).unwrap();
        let mut decoded = parent;
        rescale(&mut decoded, from, to).unwrap();
        decode_tile_add(&payload, &mut decoded, &mut Vec::new()).unwrap();
        prop_assert_eq!(decoded, child);
    }
}

#[test]
fn restating_never_wraps() {
    assert!(rescale(&mut [MAX_A], 2.0, 1.0).is_err());
    assert!(rescale(&mut [MAX_A], 1.0, 1.0).is_ok());
    assert!(rescale(&mut [1], 0.0, 1.0).is_err());
    assert!(rescale(&mut [1], f64::NAN, 1.0).is_err());
    let mut a = [3, -3, 5, -5, 0];
    rescale(&mut a, 1.0, 2.0).unwrap();
    assert_eq!(a, [2, -2, 2, -2, 0], "ties go to even");
}

/// The byte-counted examples of docs/FORMAT.md.
#[test]
fn documented_examples() {
    let mut out = Vec::new();
    ints::encode(&[], &mut out);
    assert_eq!(out, [0]);
    out.clear();
    ints::encode(&[0], &mut out);
    assert_eq!(out, [2, 1, 15]);
    out.clear();
    crate::entropy::symbols::encode(&[7; 5000], &mut out);
    assert_eq!(out, [1, 7]);
    out.clear();
    encode_tile(&[0; 5000], None, &[], &mut out).unwrap();
    assert_eq!(out, [3, 2, 1, 15, 0]);
    out.clear();
    crate::lossless::encode(Dtype::U8, &[1, 2, 3, 4, 5], None, &mut out);
    assert_eq!(out, [0, 6, 0, 1, 2, 3, 4, 5]);
}

/// Pairs with small differences, and now and then one without.
fn pairs(odd: Vec<i32>) -> impl Strategy<Value = Vec<(i32, i32)>> {
    let one = (-300..300, -15..16).prop_map(|(before, step)| (before + step, before));
    let odd = prop::sample::select(odd);
    let other = (odd.clone(), odd).prop_map(|(now, before)| (now, before));
    (prop::collection::vec(one, 1..5000), prop::collection::vec((any::<prop::sample::Index>(), other), 0..4)).prop_map(
        |(mut pairs, odd)| {
            odd.into_iter().for_each(|(at, pair)| {
                let at = at.index(pairs.len());
                pairs[at] = pair;
            });
            pairs
        },
    )
}

proptest! {
    #[test]
    fn payloads_are_those_of_wide_integers(
        pairs in pairs(vec![0, 16, -16, 32767, -32767, i32::from(i16::MIN), i32::MIN, 1 << 29]),
    ) {
        let (now, before): (Vec<i32>, Vec<i32>) = pairs.into_iter().unzip();
        let integers = Integers::of(&before);
        let (mut narrow, mut wide) = (Vec::new(), Vec::new());
        let fill = |start: usize, block: &mut [i32]| {
            integers.fill(start, block);
            true
        };
        let fits = encode_difference(&now, integers.narrow(), fill, &[], &mut narrow);
        prop_assert_eq!(fits, encode_tile(&now, Some(&before), &[], &mut wide));
        prop_assert_eq!(narrow, wide);
    }

    #[test]
    fn payloads_of_logarithms_are_those_of_wide_integers(
        pairs in pairs(vec![0, ZERO, MAX_Q, -MAX_Q, MAX_Q + 1, -MAX_Q - 1, MAX_Q - 14, 15]),
    ) {
        let (now, before): (Vec<i32>, Vec<i32>) = pairs.into_iter().unzip();
        let (mut narrow, mut wide) = (Vec::new(), Vec::new());
        let fits = log::encode_tile(&now, From::Integers(&Integers::of(&before)), &mut narrow);
        prop_assert_eq!(fits, log::encode_tile(&now, From::Integers(&Integers::Wide(before)), &mut wide));
        prop_assert_eq!(narrow, wide);
    }
}
