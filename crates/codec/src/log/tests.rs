use super::*;
use crate::Integers;
use crate::float::{Bf16, F16, F32, F64};
use crate::plain::decode_tile;
use proptest::prelude::*;

const FLOATS: [Dtype; 4] = [Dtype::F16, Dtype::Bf16, Dtype::F32, Dtype::F64];
const UNITS: [u32; 4] = [1 << 14, 1 << 16, 1 << 18, 1 << 20];

fn tile(dtype: Dtype, values: &[f64]) -> Vec<u8> {
    for_float!(dtype, F => values.iter().flat_map(|&v| F::round(v)).collect(), else unreachable!())
}

fn widen(dtype: Dtype, data: &[u8]) -> Vec<f64> {
    for_float!(dtype, F => F::elements(data).iter().map(|&e| F::widen(e)).collect(), else unreachable!())
}

fn factors_of(dtype: Dtype, data: &[u8], width: usize) -> Factors {
    let mut builder = FactorsBuilder::new((data.len() / dtype.size()).div_ceil(width), width);
    // In pieces that begin within rows.
    for (number, piece) in data.chunks(7 * dtype.size()).enumerate() {
        builder.add(dtype, number as u64 * 7, piece);
    }
    builder.finish(0)
}

struct Quantized {
    q: Vec<i32>,
    decoded: Vec<u8>,
    error: f64,
}

fn run(dtype: Dtype, v: &[u8], grid: Grid<'_>, unit: u32, keep: Option<&[i32]>) -> Result<Quantized, Unfit> {
    let mut all = Quantized { q: vec![7; v.len() / dtype.size()], decoded: vec![7; v.len()], error: 0.0 };
    all.error = quantize(dtype, v, grid, unit, keep, &mut all.q, &mut all.decoded)?;
    Ok(all)
}

/// Invariants of every quantized tile.
fn check(dtype: Dtype, v: &[u8], grid: Grid<'_>, unit: u32, parent: Option<&[i32]>, all: &Quantized) {
    assert_eq!(largest_error(dtype, v, &all.decoded), Some(all.error));
    assert!(all.error <= bound(unit, parent.is_some()));
    for (v, decoded) in widen(dtype, v).into_iter().zip(widen(dtype, &all.decoded)) {
        assert!(decoded.is_finite() && decoded.is_sign_positive() && (decoded == 0.0) == (v == 0.0), "{v} {decoded}");
    }
    let mut decoded = vec![9; v.len()];
    reconstruct(dtype, grid, unit, &all.q, &mut decoded).unwrap();
    assert_eq!(decoded, all.decoded);
    let mut payload = Vec::new();
    let before = parent.map(|parent| Integers::Wide(parent.to_vec()));
    encode_tile(&all.q, before.as_ref().map_or(From::Factors(grid), From::Integers), &mut payload).unwrap();
    let mut q = parent.map_or(vec![5; all.q.len()], <[i32]>::to_vec);
    decode_tile(&payload, parent.is_none().then_some(grid), &mut q).unwrap();
    assert_eq!(q, all.q);
}

fn magnitude() -> impl Strategy<Value = f64> {
    prop_oneof![
        6 => (1.0..2.0f64, -30i32..4).prop_map(|(m, e)| m * 2f64.powi(e)),
        2 => (1.0..2.0f64, -160i32..130).prop_map(|(m, e)| m * 2f64.powi(e)),
        1 => (1.0..2.0f64, -1022i32..1023).prop_map(|(m, e)| m * 2f64.powi(e)),
        2 => Just(0.0),
        1 => Just(1e-44),
    ]
}

/// Values near these that the type holds: no overflow, no negative, no subnormal of f64.
fn fitting(dtype: Dtype, values: &[f64]) -> Vec<f64> {
    let largest = for_float!(dtype, F => F::LARGEST, else 0.0);
    values.iter().map(|&v| v.min(largest)).collect()
}

proptest! {
    #[test]
    fn the_bound_holds_and_everything_comes_back(
        pairs in prop::collection::vec((magnitude(), magnitude(), 0.4..2.5f64), 0..1500),
        width in 1..70usize,
        skip in 0..100usize,
        unit in prop::sample::select(UNITS.as_slice()),
        dtype in prop::sample::select(FLOATS.as_slice()),
        flat: bool,
    ) {
        let whole = fitting(dtype, &pairs.iter().map(|p| p.0).collect::<Vec<_>>());
        let data = tile(dtype, &whole);
        let factors = if flat { Factors::flat_of(dtype, &data) } else { factors_of(dtype, &data, width) };
        let skip = skip.min(whole.len());
        let grid = Grid { factors: &factors, first: skip as u64 };
        let first = data[skip * dtype.size()..].to_vec();
        let parent = run(dtype, &first, grid, unit, None);
        // A value that may decode to the smallest subnormals may be unfit, but no other.
        let smallest = match dtype {
            Dtype::F16 => 2f64.powi(-14),
            Dtype::F64 => 0.0,
            _ => 2f64.powi(-126),
        };
        let subnormal = |v: &f64| *v > 0.0 && *v < smallest * (bound(unit, true) + 1.0).exp2();
        let Ok(parent) = parent else {
            prop_assert!(whole.iter().any(subnormal));
            return Ok(());
        };
        check(dtype, &first, grid, unit, None, &parent);
        // The next state: most elements moved by less than an octave, some came or went.
        let next: Vec<f64> =
            whole[skip..].iter().zip(&pairs).map(|(v, p)| if p.2 > 2.4 { p.1 } else { v * p.2 }).collect();
        let next = tile(dtype, &fitting(dtype, &next));
        match run(dtype, &next, grid, unit, Some(&parent.q)) {
            Ok(child) => check(dtype, &next, grid, unit, Some(&parent.q), &child),
            Err(_) => prop_assert!(
                widen(dtype, &next).iter().any(|v| subnormal(v) || *v < f64::MIN_POSITIVE && *v > 0.0)
            ),
        }
    }

    #[test]
    fn any_bits_hold_the_invariants_or_are_unfit(
        bits in prop::collection::vec(any::<u64>(), 1..300),
        unit in prop::sample::select(UNITS.as_slice()),
        dtype in prop::sample::select(FLOATS.as_slice()),
        keep in prop::collection::vec(prop_oneof![any::<i32>(), -9000..9000i32, Just(ZERO)], 300),
        positive: bool,
    ) {
        let mask = if positive { u64::MAX >> 1 >> (64 - 8 * dtype.size() as u32) } else { u64::MAX };
        let data: Vec<u8> = bits.iter().flat_map(|b| (b & mask).to_le_bytes()[..dtype.size()].to_vec()).collect();
        let factors = factors_of(dtype, &data, 13);
        let grid = Grid { factors: &factors, first: 0 };
        if let Ok(all) = run(dtype, &data, grid, unit, None) {
            check(dtype, &data, grid, unit, None, &all);
        }
        if let Ok(all) = run(dtype, &data, grid, unit, Some(&keep[..bits.len()])) {
            prop_assert_eq!(largest_error(dtype, &data, &all.decoded), Some(all.error));
        }
    }

    #[test]
    fn no_q_decodes_to_what_must_not_be(
        q in prop::collection::vec(prop_oneof![any::<i32>(), -40..40i32, Just(ZERO)], 1..300),
        base in any::<i32>(),
        unit in prop::sample::select(UNITS.as_slice()),
        dtype in prop::sample::select(FLOATS.as_slice()),
    ) {
        let factors = Factors::flat(base);
        let mut out = vec![1; q.len() * dtype.size()];
        reconstruct(dtype, Grid { factors: &factors, first: 3 }, unit, &q, &mut out).unwrap();
        for (q, v) in q.iter().zip(widen(dtype, &out)) {
            prop_assert!(v.is_finite() && v.is_sign_positive() && (v == 0.0) == (*q == ZERO));
        }
    }

    #[test]
    fn all_levels_give_the_same_bits(
        values in prop::collection::vec((magnitude(), -300..300i32, 0..32000i32), 1..300),
        unit in prop::sample::select(UNITS.as_slice()),
    ) {
        fn compare_levels<F: Float>(dtype: Dtype, values: &[(f64, i32, i32)], unit: u32)
        where F::Bytes: PartialEq + std::fmt::Debug {
            let data = tile(dtype, &values.iter().map(|v| v.0).collect::<Vec<_>>());
            let keep: Vec<i32> = values.iter().map(|v| if v.1 == 0 { ZERO } else { v.1 }).collect();
            let p: Vec<i32> = values.iter().map(|v| v.2 << 12).collect();
            let outcomes: Vec<_> = Level::available().into_iter().map(|level| {
                let v = F::elements(&data);
                let (mut q, mut out, mut again) = (vec![0; p.len()], v.to_vec(), v.to_vec());
                let error = quantize_chunk::<F, f64>(level, v, &p, Steps::new::<F>(unit), Some(&keep), &mut q, &mut out);
                reconstruct_chunk::<F, i32, f64>(level, &p, Steps::new::<F>(unit), &keep, &mut again);
                (error, q, out, again, compare::<F, f64>(level, v, F::elements(&data)))
            }).collect();
            for outcome in &outcomes {
                assert_eq!(outcome, &outcomes[0]);
            }
        }
        compare_levels::<F16>(Dtype::F16, &values, unit);
        compare_levels::<Bf16>(Dtype::Bf16, &values, unit);
        compare_levels::<F32>(Dtype::F32, &values, unit);
        compare_levels::<F64>(Dtype::F64, &values, unit);
    }

    #[test]
    fn factors_come_back(
        values in prop::collection::vec(magnitude(), 1..900),
        width in 1..90usize,
        dead in 0..100usize,
    ) {
        let mut values = values;
        values.iter_mut().skip(dead).step_by(width).for_each(|v| *v = 0.0);
        let factors = factors_of(Dtype::F64, &tile(Dtype::F64, &values), width);
        let mut payload = Vec::new();
        factors.encode(&mut payload);
        let rows = values.len().div_ceil(width) as u64;
        prop_assert_eq!(Factors::decode(&payload, rows, width as u64), Ok(factors));
    }

    #[test]
    fn noise_is_no_payload_that_panics(
        payload in prop::collection::vec(any::<u8>(), 0..200),
        q in prop::collection::vec(any::<i32>(), 0..3000),
        (rows, width) in (0..100u64, 0..100u64),
    ) {
        let mut q = q;
        let _ = decode_tile(&payload, None, &mut q);
        if let Ok(factors) = Factors::decode(&payload, rows, width) {
            let grid = Grid { factors: &factors, first: 5 };
            let _ = decode_tile(&payload, Some(grid), &mut q);
            let mut out = vec![0; 2 * q.len()];
            let _ = reconstruct(Dtype::F16, grid, 1 << 16, &q, &mut out);
        }
    }

    #[test]
    fn damaged_payloads_are_errors_or_other_values(
        q in prop::collection::vec(prop_oneof![8 => -2..3i32, 1 => Just(ZERO), 1 => -MAX_Q..=MAX_Q], 1..3000),
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let (zeros, mut payload, mut decoded) = (vec![0; q.len()], Vec::new(), vec![0; q.len()]);
        encode_tile(&q, From::Integers(&Integers::Wide(zeros)), &mut payload).unwrap();
        decode_tile(&payload, None, &mut decoded).unwrap();
        prop_assert_eq!(&decoded, &q);
        for (at, byte) in flips {
            let at = at.index(payload.len());
            payload[at] ^= byte;
        }
        let mut decoded = q.clone();
        if decode_tile(&payload, None, &mut decoded).is_ok() {
            prop_assert!(decoded.iter().all(|&q| q == ZERO || q.abs() <= MAX_Q));
        }
        // The decoded q has a payload itself.
        payload.clear();
        encode_tile(&q, From::Integers(&Integers::of(&q)), &mut payload).unwrap();
        prop_assert!(payload.len() <= 3, "{} bytes for no change", payload.len());
    }
}

#[test]
fn what_no_second_moment_is_unfit() {
    for dtype in FLOATS {
        for bad in [f64::NAN, f64::INFINITY, -1.0, -0.0] {
            let data = tile(dtype, &[1.0, 0.0, bad, 1.0]);
            let factors = factors_of(dtype, &data, 2);
            let grid = Grid { factors: &factors, first: 0 };
            assert!(run(dtype, &data, grid, 1 << 16, None).is_err());
            assert!(run(dtype, &data, grid, 1 << 16, Some(&[0, 0, 0, 0])).is_err());
            assert_eq!(largest_error(dtype, &data, &data), None);
        }
    }
    let flat = Factors::flat(0);
    let grid = Grid { factors: &flat, first: 0 };
    assert!(run(Dtype::F64, &tile(Dtype::F64, &[5e-324]), grid, 1 << 16, None).is_err());
    assert!(run(Dtype::F32, &tile(Dtype::F32, &[1.0]), grid, 3 << 16, None).is_err());
    assert_eq!(largest_error(Dtype::F32, &tile(Dtype::F32, &[1e-9]), &tile(Dtype::F32, &[0.0])), None);
    assert_eq!(largest_error(Dtype::F32, &tile(Dtype::F32, &[2.0]), &tile(Dtype::F32, &[1.0])), Some(1.0));
    let narrow = factors_of(Dtype::F32, &tile(Dtype::F32, &[1.0; 6]), 3);
    let beyond = Grid { factors: &narrow, first: 5 };
    assert!(run(Dtype::F32, &tile(Dtype::F32, &[1.0; 2]), beyond, 1 << 16, None).is_err());
    assert!(reconstruct(Dtype::F32, beyond, 1 << 16, &[0, 0], &mut [0; 8]).is_err());
}

#[test]
fn values_near_a_middle_do_not_go_back_and_forth() {
    let factors = Factors::flat(1023 * 16);
    let grid = Grid { factors: &factors, first: 0 };
    let (up, down) = (tile(Dtype::F32, &[1.51; 64]), tile(Dtype::F32, &[1.49; 64]));
    let first = run(Dtype::F32, &down, grid, 1 << 16, None).unwrap();
    let fresh = run(Dtype::F32, &up, grid, 1 << 16, None).unwrap();
    assert_ne!(first.q, fresh.q);
    assert_eq!(run(Dtype::F32, &up, grid, 1 << 16, Some(&first.q)).unwrap().q, first.q);
    assert_eq!(run(Dtype::F32, &down, grid, 1 << 16, Some(&fresh.q)).unwrap().q, fresh.q);
}

/// Second moments like Adam's: row scale times column scale times a lognormal of `spread` octaves.
fn adam_like(rows: usize, width: usize, spread: f64) -> Vec<f64> {
    let mut state = 88172645463325252u64;
    let mut gauss = || {
        let sum: f64 = (0..12)
            .map(|_| {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (state >> 11) as f64 / (1u64 << 53) as f64
            })
            .sum();
        sum - 6.0
    };
    let row: Vec<f64> = (0..rows).map(|_| 3.0 * gauss()).collect();
    let column: Vec<f64> = (0..width).map(|_| 2.0 * gauss()).collect();
    row.iter()
        .flat_map(|r| column.iter().map(|c| 1e-9 * (r + c + spread * gauss()).exp2()).collect::<Vec<_>>())
        .collect()
}

#[test]
fn rank_one_pays() {
    let (rows, width) = (256, 192);
    let values = adam_like(rows, width, 1.0);
    let data = tile(Dtype::F32, &values);
    let size = |factors: &Factors, unit: u32| {
        let grid = Grid { factors, first: 0 };
        let all = run(Dtype::F32, &data, grid, unit, None).unwrap();
        let mut payload = Vec::new();
        factors.encode(&mut payload);
        let alone = payload.len();
        encode_tile(&all.q, From::Factors(grid), &mut payload).unwrap();
        (payload.len(), alone, all.q)
    };
    let (flat, factors) = (Factors::flat_of(Dtype::F32, &data), factors_of(Dtype::F32, &data, width));
    let (without, ..) = size(&flat, 1 << 16);
    let (with, of_factors, q) = size(&factors, 1 << 16);
    let (coarse, ..) = size(&factors, 1 << 18);
    let percent = |bytes: usize| bytes as f64 * 100.0 / data.len() as f64;
    println!(
        "flat {:.2}%, rank-1 {:.2}% (factors {:.2}%), 4 octaves {:.2}%",
        percent(without),
        percent(with),
        percent(of_factors),
        percent(coarse)
    );
    assert!(with * 10 < without * 9, "{with} {without}");
    assert!(coarse * 4 < with, "{coarse} {with}");
    // The next state costs less as a difference, and less with kept q than with fresh rounding.
    let next = tile(
        Dtype::F32,
        &values
            .iter()
            .zip(adam_like(rows, width, 1.0).iter().skip(7).cycle())
            .map(|(v, other)| 0.9 * v + 0.1 * v * (other / (other + 1e-9)))
            .collect::<Vec<_>>(),
    );
    let grid = Grid { factors: &factors, first: 0 };
    let delta = |keep: Option<&[i32]>| {
        let all = run(Dtype::F32, &next, grid, 1 << 16, keep).unwrap();
        let mut payload = Vec::new();
        encode_tile(&all.q, From::Integers(&Integers::of(&q)), &mut payload).unwrap();
        payload.len()
    };
    let (kept, fresh) = (delta(Some(&q)), delta(None));
    assert!(kept < fresh && fresh < with, "{kept} {fresh} {with}");
}

#[test]
fn zeros_cost_what_their_number_says() {
    let (rows, width) = (512, 64);
    let mut values = adam_like(rows, width, 0.5);
    let full = tile(Dtype::F32, &values);
    // Every other row was never touched.
    values.chunks_mut(2 * width).for_each(|rows| rows[..width].fill(0.0));
    let half = tile(Dtype::F32, &values);
    let size = |data: &[u8]| {
        let factors = factors_of(Dtype::F32, data, width);
        let grid = Grid { factors: &factors, first: 0 };
        let all = run(Dtype::F32, data, grid, 1 << 16, None).unwrap();
        check(Dtype::F32, data, grid, 1 << 16, None, &all);
        let mut payload = Vec::new();
        encode_tile(&all.q, From::Factors(grid), &mut payload).unwrap();
        payload.len()
    };
    let (full, half) = (size(&full), size(&half));
    assert!(half * 10 < full * 9, "{half} {full}");
}

/// The byte-counted examples of docs/FORMAT.md.
#[test]
fn documented_examples() {
    let mut out = Vec::new();
    encode_tile(&[3; 5000], From::Integers(&Integers::of(&[3; 5000])), &mut out).unwrap();
    assert_eq!(out, [2, 1, 15]);
    out.clear();
    encode_tile(&[0, ZERO], From::Integers(&Integers::of(&[ZERO, 3])), &mut out).unwrap();
    assert_eq!(out, [3, 0, 16, 30]);
    out.clear();
    Factors::flat_of(Dtype::F32, &tile(Dtype::F32, &[0.125; 9])).encode(&mut out);
    assert_eq!(out, [0, 0xc0, 0x7f]);
    assert_eq!(Factors::decode(&out, 1, 9), Ok(Factors::flat(1020 * 16)));
    out.clear();
    factors_of(Dtype::F32, &tile(Dtype::F32, &[0.125, 0.0, 0.125, 0.0]), 2).encode(&mut out);
    assert_eq!(
        Factors::decode(&out, 2, 2),
        Ok(factors_of(Dtype::F32, &tile(Dtype::F32, &[0.125, 0.0, 0.125, 0.0]), 2))
    );
}

/// Mostly normal values, and all kinds of others.
fn element() -> impl Strategy<Value = u32> {
    prop_oneof![
        40 => 1u32 << 23..254 << 23,
        4 => Just(0u32),
        1 => any::<u32>(),
        1 => prop::sample::select([1, 0x007f_ffff, 0x0080_0000, 0x7f7f_ffff, 0x7f80_0000, 0x8000_0000].as_slice()),
    ]
}

/// Elements with these bits of f32, or near them.
type Element = (u32, u32, i32, i32);

fn f32_gives_what_f64_gives<F: Float>(elements: &[Element], shift: u32, kept: bool) -> Result<(), TestCaseError>
where
    F::Bytes: PartialEq + std::fmt::Debug,
{
    let n = elements.len();
    let of = |bits: u32| F::of_single(f32::from_bits(bits));
    let v: Vec<F::Bytes> = elements.iter().map(|e| of(e.0)).collect();
    let other: Vec<F::Bytes> = elements.iter().map(|e| of(e.1)).collect();
    let log = |v: F::Bytes| f32::of::<F>(v).high_bits(FRACTION_BITS);
    // Some predictions are near, others anywhere.
    let near = |e: &Element, v: F::Bytes| if e.3 == 0 { e.2 } else { (log(v) / 2 + bias::<f32>()).clamp(0, 1 << 27) };
    let p: Vec<i32> = elements.iter().zip(&v).map(|(e, v)| near(e, *v)).collect();
    let keep: Vec<i32> =
        elements.iter().zip(&v).zip(&p).map(|((e, v), p)| ((log(*v) + bias::<f32>() - p) >> shift) + e.3).collect();
    let keep = kept.then_some(keep.as_slice());
    let steps = Steps::new::<F>(1 << shift);
    let (mut q, mut out) = (vec![7; n], vec![of(7 << 23); n]);
    let (error, fits) = quantize_chunk::<F, f64>(Level::PORTABLE, &v, &p, steps, keep, &mut q, &mut out);
    for level in Level::available() {
        let (mut own_q, mut own_out) = (vec![9; n], vec![of(9 << 23); n]);
        if let (own, true) = quantize_chunk::<F, f32>(level, &v, &p, steps, keep, &mut own_q, &mut own_out) {
            prop_assert_eq!((own, true, &own_q, &own_out), (error, fits, &q, &out));
        }
        for decoded in [&out, &other, &v] {
            if let (own, true) = compare::<F, f32>(level, &v, decoded) {
                prop_assert_eq!((own, true), compare::<F, f64>(level, &v, decoded));
            }
        }
    }
    // Normal values need no f64.
    if v.iter().all(|v| (1 << 23..255 << 23).contains(&f32::of::<F>(*v).to_bits())) {
        prop_assert!(compare::<F, f32>(Level::detect(), &v, &v) == (0, true));
    }
    Ok(())
}

proptest! {
    #[test]
    fn precisions_agree(
        elements in prop::collection::vec((element(), element(), 0..1 << 27, -3..4i32), 1..40),
        shift in 14..=20u32,
        kept: bool,
    ) {
        f32_gives_what_f64_gives::<F32>(&elements, shift, kept)?;
        f32_gives_what_f64_gives::<Bf16>(&elements, shift, kept)?;
        f32_gives_what_f64_gives::<F16>(&elements, shift, kept)?;
    }
}
