use super::*;
use crate::float::{Bf16, F16, F32, F64};
use crate::lattice::{apply_exceptions, choose_g, encode_tile, predict};
use crate::log::{self, Factors, Grid};
use crate::plain::decode_tile_add;
use proptest::prelude::*;

const FLOATS: [Dtype; 4] = [Dtype::F16, Dtype::Bf16, Dtype::F32, Dtype::F64];

fn tile(dtype: Dtype, values: &[f64]) -> Vec<u8> {
    for_float!(dtype, F => values.iter().flat_map(|&v| F::round(v)).collect(), else unreachable!())
}

/// Decodes A with these second moments and these exceptions.
fn decode((rule, dtype): (Rule, Dtype), v_q: &[u8], g: f64, a: &[i32], exceptions: &[Exception]) -> Vec<u8> {
    let mut out = vec![3; v_q.len()];
    reconstruct((rule, dtype), v_q, g, a, &mut out).unwrap();
    apply_exceptions(dtype, exceptions, &mut out).unwrap();
    out
}

/// d by this rule.
fn divisor(rule: Rule, v: f64) -> f64 {
    if matches!(rule, Rule::Root | Rule::Inward) { v.sqrt() } else { v }
}

/// The second moments as decoded by the logarithmic lattice, if it takes them.
fn quantized(dtype: Dtype, v: &[u8]) -> Option<Vec<u8>> {
    let factors = Factors::flat_of(dtype, v);
    let (mut q, mut out) = (vec![0; v.len() / dtype.size()], vec![0; v.len()]);
    let grid = Grid { factors: &factors, first: 0 };
    log::quantize(dtype, v, grid, 1 << 16, None, &mut q, &mut out).ok().map(|_| out)
}

fn magnitude() -> impl Strategy<Value = f64> {
    prop_oneof![
        6 => (1.0..2.0f64, -30i32..4).prop_map(|(m, e)| m * 2f64.powi(e)),
        1 => (1.0..2.0f64, -150i32..120).prop_map(|(m, e)| m * 2f64.powi(e)),
        1 => (1.0..2.0f64, -1022i32..1023).prop_map(|(m, e)| m * 2f64.powi(e)),
        1 => Just(0.0),
    ]
}

proptest! {
    #[test]
    fn the_quotient_comes_back_and_is_never_inflated(
        triples in prop::collection::vec((magnitude(), -3.0..3.0f64, magnitude()), 1..1500),
        exponent in -6..2i32,
        dtype in prop::sample::select(FLOATS.as_slice()),
        rule in prop::sample::select(Rule::ALL.as_slice()),
        outward in prop::sample::select([0.0, OUTWARD].as_slice()),
    ) {
        let largest = for_float!(dtype, F => F::LARGEST, else 0.0);
        let v = tile(dtype, &triples.iter().map(|t| t.0.min(largest)).collect::<Vec<_>>());
        // Mostly u in proportion; where v is 0, sometimes an m of its own.
        let m: Vec<f64> = triples.iter().map(|t| if t.0 == 0.0 { t.2 } else { t.1 * divisor(rule, t.0) }).collect();
        let m = tile(dtype, &m.iter().map(|m| m.clamp(-largest, largest)).collect::<Vec<_>>());
        let g = 2f64.powi(exponent);
        let (mut a, mut exceptions) = (vec![7; triples.len()], Vec::new());
        if quantize((rule, dtype), &m, &v, (g, outward), &mut a, &mut exceptions).is_err() {
            // After rounding, a tiny v can make u of any size.
            prop_assert!(samples((rule, dtype), &m, &v).iter().any(|s| s.ratio.abs() / g > 1e9), "unfit without reason");
            return Ok(());
        }
        let v_q = [Some(v.clone()), quantized(dtype, &v)];
        for v_q in v_q.iter().flatten() {
            let m_q = decode((rule, dtype), v_q, g, &a, &exceptions);
            let error = largest_error((rule, dtype), &m, &v, &m_q, v_q, g);
            prop_assert!(error.is_some());
            // Subnormals of m_q are coarser than their quotient, except for a value clamped to the type's largest.
            if dtype == Dtype::F32 && triples.iter().all(|t| (1e-30..1e30).contains(&t.0)) {
                prop_assert!(error.unwrap() <= g * rule.steps() + 3.0 / 1048576.0 + 8.0 / 1048576.0 * g.max(3.0));
            }
        }
        let mut payload = Vec::new();
        encode_tile(&a, None, &exceptions, &mut payload).unwrap();
        let (mut acc, mut again) = (vec![0; a.len()], Vec::new());
        decode_tile_add(&payload, &mut acc, &mut again).unwrap();
        prop_assert_eq!((acc, again), (a, exceptions));
    }

    #[test]
    fn any_bits_hold_the_invariants_or_are_unfit(
        bits in prop::collection::vec(any::<(u64, u64)>(), 1..200),
        dtype in prop::sample::select(FLOATS.as_slice()),
        rule in prop::sample::select(Rule::ALL.as_slice()),
        exponent in -60..60i32,
        positive: bool,
        outward in prop::sample::select([0.0, OUTWARD].as_slice()),
    ) {
        let of = |bits: u64| bits.to_le_bytes()[..dtype.size()].to_vec();
        let mask = if positive { u64::MAX >> 1 >> (64 - 8 * dtype.size() as u32) } else { u64::MAX };
        let m: Vec<u8> = bits.iter().flat_map(|b| of(b.0)).collect();
        let v: Vec<u8> = bits.iter().flat_map(|b| of(b.1 & mask)).collect();
        let (mut a, mut exceptions) = (vec![7; bits.len()], Vec::new());
        let g = 2f64.powi(exponent);
        if quantize((rule, dtype), &m, &v, (g, outward), &mut a, &mut exceptions).is_ok() {
            let m_q = decode((rule, dtype), &v, g, &a, &exceptions);
            prop_assert!(largest_error((rule, dtype), &m, &v, &m_q, &v, g).is_some());
        }
    }

    #[test]
    fn no_payload_decodes_to_what_is_not_finite(
        pairs in prop::collection::vec((any::<i32>(), any::<u64>()), 1..200),
        dtype in prop::sample::select(FLOATS.as_slice()),
        rule in prop::sample::select(Rule::ALL.as_slice()),
        exponent in -64..64i32,
    ) {
        let v: Vec<u8> = pairs.iter().flat_map(|p| p.1.to_le_bytes()[..dtype.size()].to_vec()).collect();
        let a: Vec<i32> = pairs.iter().map(|p| p.0).collect();
        let mut out = vec![0; v.len()];
        let sound = for_float!(
            dtype, F => F::elements(&v).iter().all(|&v| F::widen(v).is_finite() && F::widen(v) >= 0.0), else false
        );
        let done = reconstruct((rule, dtype), &v, 2f64.powi(exponent), &a, &mut out);
        prop_assert_eq!(done.is_ok(), sound);
        if sound {
            let finite = for_float!(dtype, F => F::elements(&out).iter().all(|&m| F::widen(m).is_finite()), else false);
            prop_assert!(finite);
        }
    }

    #[test]
    fn all_levels_give_the_same_bits(
        values in prop::collection::vec((magnitude(), -3.0..3.0f64, any::<i32>()), 1..300),
        exponent in -10..3i32,
        rule in prop::sample::select(Rule::ALL.as_slice()),
    ) {
        fn compare_levels<F: Float, R: Divide>(dtype: Dtype, values: &[(f64, f64, i32)], g: f64)
        where F::Bytes: PartialEq + std::fmt::Debug {
            let v = tile(dtype, &values.iter().map(|v| v.0).collect::<Vec<_>>());
            let m = tile(dtype, &values.iter().map(|v| v.0.sqrt() * v.1).collect::<Vec<_>>());
            let a: Vec<i32> = values.iter().map(|v| v.2).collect();
            let (m, v) = (F::elements(&m), F::elements(&v));
            let outcomes: Vec<_> = Level::available().into_iter().map(|level| {
                let (mut a_out, mut out) = (vec![0; a.len()], m.to_vec());
                let flags = quantize_chunk::<F, R>(level, m, v, (g, 0.0), &mut a_out);
                let (sound, _) = reconstruct_chunk::<F, R, i32, f64>(level, v, g, &a, &mut out);
                let (error, ok) = compare::<F, R>(level, m, v, &out, v, g);
                // NaN need only be NaN in both: nothing is stored then.
                let out = sound.then_some(out);
                (flags, flags.0.then_some(a_out), out, ok, ok.then_some(error.to_bits()))
            }).collect();
            for outcome in &outcomes {
                assert_eq!(outcome, &outcomes[0]);
            }
        }
        let g = 2f64.powi(exponent);
        for_rule!(rule, R => compare_levels::<F16, R>(Dtype::F16, &values, g));
        for_rule!(rule, R => compare_levels::<Bf16, R>(Dtype::Bf16, &values, g));
        for_rule!(rule, R => compare_levels::<F32, R>(Dtype::F32, &values, g));
        for_rule!(rule, R => compare_levels::<F64, R>(Dtype::F64, &values, g));
    }

    #[test]
    fn parents_restated_with_a_gain_are_near(
        a in prop::collection::vec(-100_000..100_000i32, 0..500),
        gain in -2.0..2.0f64,
    ) {
        let mut restated = a.clone();
        predict(&mut restated, gain).unwrap();
        for (new, old) in restated.iter().zip(&a) {
            prop_assert!((f64::from(*new) - f64::from(*old) * gain).abs() <= 0.5);
        }
    }
}

#[test]
fn gains_that_are_none_are_errors() {
    for gain in [f64::NAN, f64::INFINITY, 3.0] {
        assert!(predict(&mut [MAX_A / 2], gain).is_err());
    }
    assert!(predict(&mut [0], f64::INFINITY).is_err());
    let mut a = [5, -7];
    predict(&mut a, 0.0).unwrap();
    assert_eq!(a, [0, 0]);
}

#[test]
fn what_cannot_be_is_unfit() {
    for dtype in FLOATS {
        let g = 0.5;
        let good = tile(dtype, &[1.0; 4]);
        for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let bad = tile(dtype, &[1.0, bad, 1.0, 1.0]);
            assert!(quantize((Rule::Root, dtype), &bad, &good, (g, 0.0), &mut [0; 4], &mut Vec::new()).is_err());
            assert!(quantize((Rule::Root, dtype), &good, &bad, (g, 0.0), &mut [0; 4], &mut Vec::new()).is_err());
            assert_eq!(largest_error((Rule::Root, dtype), &good, &bad, &good, &bad, g), None);
        }
        let negative = tile(dtype, &[1.0, -1.0, 1.0, 1.0]);
        assert!(quantize((Rule::Root, dtype), &good, &negative, (g, 0.0), &mut [0; 4], &mut Vec::new()).is_err());
        assert!(quantize((Rule::Root, dtype), &good, &good, (f64::NAN, 0.0), &mut [0; 4], &mut Vec::new()).is_err());
        assert!(
            quantize((Rule::Root, dtype), &good, &good, (2f64.powi(-40), 0.0), &mut [0; 4], &mut Vec::new()).is_err()
        );
    }
}

#[test]
fn broken_invariants_are_seen() {
    let of = |values: &[f64]| tile(Dtype::F32, values);
    let error = |m: f64, v: f64, m_q: f64, v_q: f64| {
        largest_error((Rule::Root, Dtype::F32), &of(&[m]), &of(&[v]), &of(&[m_q]), &of(&[v_q]), 1.0)
    };
    assert_eq!(error(1.0, 1.0, 2.0, 4.0), Some(0.0));
    assert_eq!(error(1.0, 1.0, 1.5, 1.0), Some(0.5));
    assert_eq!(error(4.0, 1.0, 0.0, 1.0), Some(4.0));
    assert_eq!(error(1.0, 1.0, 1.6, 1.0), None, "inflated");
    assert_eq!(error(0.2, 1.0, -0.1, 1.0), None, "flipped");
    assert_eq!(error(0.0, 1.0, 0.1, 1.0), None, "out of nothing");
    assert_eq!(error(1.0, 1.0, 1.0, 0.0), None, "v is lost");
    assert_eq!(error(1.0, f64::INFINITY, 1.0, f64::INFINITY), None, "no divisor");
    assert_eq!(error(f64::NAN, 1.0, 1.0, 1.0), None, "no number");
    assert_eq!(error(1.0, -1.0, 1.0, -1.0), None, "no root");
    assert_eq!(error(1.0, 0.0, 1.0, 0.0), Some(0.0));
    assert_eq!(error(1.0, 0.0, 0.5, 0.0), None, "not exact");
    assert_eq!(error(0.0, 0.0, 0.0, 0.0), Some(0.0));
}

#[test]
fn quotients_of_order_one_cost_little() {
    // u is normal while v spans 20 octaves: a lattice of m itself would be all zeros and outliers.
    let mut state = 1u64;
    let mut unit = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 11) as f64 / (1u64 << 53) as f64
    };
    let v: Vec<f64> = (0..20_000).map(|_| 1e-8 * (20.0 * unit() - 10.0).exp2()).collect();
    let m: Vec<f64> =
        v.iter().map(|v| v.sqrt() * (0..12).map(|_| unit() / 4.0).sum::<f64>() - v.sqrt() * 1.5).collect();
    let (m, v) = (tile(Dtype::F32, &m), tile(Dtype::F32, &v));
    let u: Vec<f64> = samples((Rule::Root, Dtype::F32), &m, &v).iter().map(|sample| sample.ratio).collect();
    let g = choose_g(Dtype::F32, &u, 1.0).unwrap();
    let mut a = vec![0; 20_000];
    quantize((Rule::Root, Dtype::F32), &m, &v, (g, 0.0), &mut a, &mut Vec::new()).unwrap();
    let mut payload = Vec::new();
    encode_tile(&a, None, &[], &mut payload).unwrap();
    let percent = payload.len() as f64 * 100.0 / m.len() as f64;
    // The entropy of a normal in steps of its deviation is 2.05 bits, 6.4% of fp32.
    assert!((5.0..7.5).contains(&percent), "{percent}%");
}

#[test]
fn each_rule_keeps_what_its_optimizer_needs() {
    // Values of every size, one exactly on a step, and one whose square is nearly all of v.
    let v: [f64; 6] = [1e-12, 4e-6, 1.0, 1.0, 9.0, 1e-4];
    let m = [3e-7, -1e-3, 0.75, 1.0 - 1e-7, -2.9, 1e-9];
    let close = |rule: Rule| v.map(|v| if divisor(rule, 4.0) == 2.0 { v } else { v.sqrt() });
    for dtype in [Dtype::F32, Dtype::F64] {
        for rule in Rule::ALL {
            let (was_m, was_v) = (tile(dtype, &m), tile(dtype, &close(rule)));
            let v_q = quantized(dtype, &was_v).unwrap();
            let (mut a, mut kept) = ([0; 6], Vec::new());
            quantize((rule, dtype), &was_m, &was_v, (0.25, 0.0), &mut a, &mut kept).unwrap();
            let m_q = decode((rule, dtype), &v_q, 0.25, &a, &kept);
            let error = largest_error((rule, dtype), &was_m, &was_v, &m_q, &v_q, 0.25).unwrap();
            assert!(error <= 0.25 * rule.steps() + 1e-5, "{rule:?}: {error}");
            let of = |bytes: &[u8]| -> Vec<f64> {
                for_float!(dtype, F => F::elements(bytes).iter().map(|&x| F::widen(x)).collect(), else unreachable!())
            };
            for ((m, v), (m_q, v_q)) in of(&was_m).into_iter().zip(of(&was_v)).zip(of(&m_q).into_iter().zip(of(&v_q))) {
                let (u, u_q) = (m / divisor(rule, v), m_q / divisor(rule, v_q));
                assert!(m_q == 0.0 || (m_q > 0.0) == (m > 0.0));
                match rule {
                    Rule::Root | Rule::Norm => assert!(u_q.abs() <= u.abs() + 0.126),
                    // The rest of v after the square is subtracted.
                    Rule::Inward => assert!((v_q - m_q * m_q) / v_q >= (v - m * m) / v && v_q > m_q * m_q),
                    Rule::Sign => assert!(m_q != 0.0),
                }
            }
        }
    }
}

#[test]
fn inward_and_sign_are_checked_as_what_they_are() {
    let of = |values: &[f64]| tile(Dtype::F32, values);
    let error = |rule: Rule, m: f64, m_q: f64| {
        let one = of(&[1.0]);
        largest_error((rule, Dtype::F32), &of(&[m]), &one, &of(&[m_q]), &one, 0.5)
    };
    assert_eq!(error(Rule::Inward, 0.75, 0.5), Some(0.25));
    assert_eq!(error(Rule::Inward, 0.75, 0.75 + 1e-5), None, "it grew");
    assert_eq!(error(Rule::Inward, 0.75, -0.1), None, "it flipped");
    assert_eq!(error(Rule::Sign, 0.25, 0.5), Some(0.25));
    assert_eq!(error(Rule::Sign, 0.25, 0.0), None, "the sign is lost");
    assert_eq!(error(Rule::Sign, 0.0, 0.5), None, "a sign out of nothing");
    assert_eq!(error(Rule::Sign, 0.25, 0.8), None, "inflated by more than a step");
    assert_eq!(error(Rule::Norm, 0.25, 0.54), None, "inflated by more than half a step and what is rounded outward");
}

#[test]
fn the_least_value_keeps_its_sign() {
    for dtype in FLOATS {
        let least = for_float!(dtype, F => F::LEAST, else 0.0);
        let sizes = tile(dtype, &[least, 1.0]);
        let m = tile(dtype, &[-least, 1e-3]);
        let (mut a, mut kept) = ([0; 2], Vec::new());
        quantize((Rule::Sign, dtype), &m, &sizes, (0.25, 0.0), &mut a, &mut kept).unwrap();
        let m_q = decode((Rule::Sign, dtype), &sizes, 0.25, &a, &kept);
        assert!(largest_error((Rule::Sign, dtype), &m, &sizes, &m_q, &sizes, 0.25).is_some(), "{dtype:?}");
    }
}
