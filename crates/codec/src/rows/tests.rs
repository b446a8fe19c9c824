use super::*;
use crate::float::{Bf16, F16, F32, F64};
use crate::lattice::{self, apply_exceptions, reconstruct};
use proptest::prelude::*;

const FLOATS: [Dtype; 4] = [Dtype::F16, Dtype::Bf16, Dtype::F32, Dtype::F64];

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

fn run(dtype: Dtype, w: &[u8], base: Base<'_>, c: f64) -> Result<Quantized, Unfit> {
    let mut q =
        Quantized { a: vec![7; w.len() / dtype.size()], r: vec![7; w.len()], exceptions: Vec::new(), largest: 0.0 };
    q.largest = quantize(dtype, w, base, c, &mut q.a, &mut q.r, &mut q.exceptions)?;
    Ok(q)
}

fn encoded(a: &[i32], parent: Option<&[i32]>, rows: Rows, exceptions: &[Exception]) -> Vec<u8> {
    let mut payload = Vec::new();
    encode_tile(a, parent, rows, exceptions, &mut payload).unwrap();
    let mut acc = parent.map_or(vec![0; a.len()], <[i32]>::to_vec);
    let mut again = Vec::new();
    decode_tile_add(&payload, &mut acc, rows, &mut again).unwrap();
    assert_eq!((acc.as_slice(), again.as_slice()), (a, exceptions));
    payload
}

/// Invariants of every quantized tile.
fn check(dtype: Dtype, w: &[u8], base: Base<'_>, q: &Quantized) {
    let (exact, decoded) = (widen(dtype, w), widen(dtype, &q.r));
    let mut start = 0;
    for length in base.rows.lengths(exact.len()) {
        let row = start..start + length;
        let bits = q.a[row.clone()].iter().fold(0, |all, a| all | a);
        // Exceptions do not show e, and a short row may seem to have a larger one.
        let e = if bits == 0 { MAX_E } else { bits.trailing_zeros() };
        for i in row {
            let error = (exact[i] - decoded[i]).abs();
            assert!(error <= q.largest && error <= base.g * AT_REST * f64::from(e.min(MAX_E)).exp2());
        }
        start += length;
    }
    let mut r = vec![0; w.len()];
    reconstruct(dtype, base.k, base.g, &q.a, &mut r).unwrap();
    apply_exceptions(dtype, &q.exceptions, &mut r).unwrap();
    assert_eq!(r, q.r);
    assert_eq!(lattice::largest_error(dtype, w, &q.r), Some(q.largest));
    encoded(&q.a, base.a, base.rows, &q.exceptions);
}

fn value() -> impl Strategy<Value = f64> {
    prop_oneof![
        4 => -1.0..1.0f64,
        2 => (-1.0..1.0f64, -40i32..14).prop_map(|(m, e)| m * 2f64.powi(e)),
        1 => Just(0.0),
        1 => Just(-0.0),
        1 => Just(1e-40),
    ]
}

fn rows() -> impl Strategy<Value = Rows> {
    (1..70u64, 0..200u64).prop_map(|(width, first)| Rows { width, first })
}

proptest! {
    #[test]
    fn bounds_hold_and_everything_comes_back(
        pairs in prop::collection::vec((value(), value(), value()), 0..1500),
        rows in rows(),
        (exponent, c) in (-14i32..-2, 0.3..3.0f64),
        dtype in prop::sample::select(FLOATS.as_slice()),
        keyed: bool,
    ) {
        let w = tile(dtype, &pairs.iter().map(|p| p.0).collect::<Vec<_>>());
        let k = tile(dtype, &pairs.iter().map(|p| p.1).collect::<Vec<_>>());
        let base = Base { rows, k: keyed.then_some(k.as_slice()), g: 2f64.powi(exponent), a: None };
        let first = run(dtype, &w, base, c).unwrap();
        check(dtype, &w, base, &first);
        // Every third row moves, each by a different amount.
        let mut next: Vec<f64> = pairs.iter().map(|p| p.0).collect();
        let mut start = 0;
        for (number, length) in rows.lengths(next.len()).enumerate() {
            for i in (start..start + length).filter(|_| number % 3 == 0) {
                next[i] += pairs[i].2 * 2f64.powi(-(number as i32 % 12));
            }
            start += length;
        }
        let next = tile(dtype, &next);
        let base = Base { a: Some(&first.a), ..base };
        let second = run(dtype, &next, base, c).unwrap();
        check(dtype, &next, base, &second);
    }

    #[test]
    fn any_bits_hold_the_bounds_or_are_unfit(
        bits in prop::collection::vec(any::<u64>(), 1..300),
        parent in prop::collection::vec(-lattice::MAX_A..=lattice::MAX_A, 300),
        rows in rows(),
        exponent in -40i32..40,
        dtype in prop::sample::select(FLOATS.as_slice()),
    ) {
        let w: Vec<u8> = bits.iter().flat_map(|b| b.to_le_bytes()[..dtype.size()].to_vec()).collect();
        for a in [None, Some(&parent[..bits.len()])] {
            let base = Base { rows, k: None, g: 2f64.powi(exponent), a };
            if let Ok(q) = run(dtype, &w, base, 1.0) {
                check(dtype, &w, base, &q);
            }
        }
    }

    #[test]
    fn all_levels_give_the_same_bits(
        pairs in prop::collection::vec((value(), value(), -5000..5000i32), 1..400),
        rows in rows(),
        exponent in -12i32..-4,
        keyed: bool,
    ) {
        fn compare<F: Float>(dtype: Dtype, pairs: &[(f64, f64, i32)], rows: Rows, g: f64, keyed: bool)
        where F::Bytes: PartialEq + std::fmt::Debug {
            let w = tile(dtype, &pairs.iter().map(|p| p.0).collect::<Vec<_>>());
            let k = tile(dtype, &pairs.iter().map(|p| p.1).collect::<Vec<_>>());
            let parent: Vec<i32> = pairs.iter().map(|p| p.2 >> (p.2 & 7) << (p.2 & 7)).collect();
            let base = Base { rows, k: keyed.then_some(k.as_slice()), g, a: Some(&parent) };
            let outcomes: Vec<_> = Level::available().into_iter().map(|level| {
                let (mut a, mut r, mut exceptions) = (vec![0; parent.len()], F::elements(&w).to_vec(), Vec::new());
                let k = base.k.map(F::elements);
                let error = quantize_rows::<F>(level, F::elements(&w), k, base, 1.0, &mut a, &mut r, &mut exceptions);
                (error.map(f64::to_bits), a, r, exceptions)
            }).collect();
            for outcome in &outcomes {
                assert_eq!(outcome, &outcomes[0]);
            }
        }
        let g = 2f64.powi(exponent);
        compare::<F16>(Dtype::F16, &pairs, rows, g, keyed);
        compare::<Bf16>(Dtype::Bf16, &pairs, rows, g, keyed);
        compare::<F32>(Dtype::F32, &pairs, rows, g, keyed);
        compare::<F64>(Dtype::F64, &pairs, rows, g, keyed);
    }

    #[test]
    fn any_states_can_be_merged(
        states in prop::collection::vec((-lattice::MAX_A..=lattice::MAX_A, any::<u8>(), -40..40i32), 0..3000),
        rows in rows(),
    ) {
        let fine: Vec<i32> = states.iter().map(|s| s.0).collect();
        let coarse: Vec<i32> = states.iter().map(|s| s.0 >> (s.1 % 30) << (s.1 % 30)).collect();
        let zeros = vec![0; states.len()];
        for (child, parent) in [(&fine, &coarse), (&coarse, &fine), (&zeros, &fine), (&fine, &fine)] {
            encoded(child, Some(parent), rows, &[]);
        }
        encoded(&coarse, None, rows, &[]);
    }

    #[test]
    fn noise_is_no_payload_that_panics(
        payload in prop::collection::vec(any::<u8>(), 0..200),
        acc in prop::collection::vec(any::<i32>(), 0..3000),
        (width, first) in (0..50u64, any::<u64>()),
    ) {
        let _ = decode_tile_add(&payload, &mut acc.clone(), Rows { width, first }, &mut Vec::new());
    }

    #[test]
    fn damaged_payloads_are_errors_or_other_values(
        a in prop::collection::vec(prop_oneof![8 => -2..3i32, 1 => any::<i32>()], 1..3000),
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        cut in any::<prop::sample::Index>(),
        rows in rows(),
    ) {
        let exceptions = [Exception { index: 0, raw: 9 }];
        let mut payload = encoded(&a, None, rows, &exceptions);
        let _ = decode_tile_add(&payload[..cut.index(payload.len())], &mut vec![0; a.len()], rows, &mut Vec::new());
        for (at, byte) in flips {
            let at = at.index(payload.len());
            payload[at] ^= byte;
        }
        let _ = decode_tile_add(&payload, &mut vec![i32::MAX; a.len()], rows, &mut Vec::new());
    }
}

#[test]
fn lengths_of_rows() {
    let lengths = |width, first, elements| Rows { width, first }.lengths(elements).collect::<Vec<_>>();
    assert_eq!(lengths(4, 0, 10), [4, 4, 2]);
    assert_eq!(lengths(4, 7, 10), [1, 4, 4, 1]);
    assert_eq!(lengths(4, 5, 2), [2]);
    assert_eq!(lengths(u64::MAX, 5, 7), [7]);
    assert!(lengths(4, 3, 0).is_empty() && lengths(0, 3, 9).is_empty());
}

#[test]
fn what_is_not_finite_is_unfit() {
    for dtype in FLOATS {
        let good = tile(dtype, &[1.0; 12]);
        for bad in [f64::NAN, f64::INFINITY] {
            let mut values = [1.0; 12];
            values[5] = bad;
            let bad = tile(dtype, &values);
            let base = Base { rows: Rows { width: 4, first: 2 }, k: None, g: 0.125, a: None };
            assert!(run(dtype, &bad, base, 1.0).is_err());
            assert!(run(dtype, &good, Base { k: Some(&bad), ..base }, 1.0).is_err());
            assert!(run(dtype, &good, base, f64::NAN).is_err());
            assert!(run(dtype, &good, Base { g: 0.0, ..base }, 1.0).is_err());
            assert!(run(dtype, &good, Base { rows: Rows { width: 0, first: 0 }, ..base }, 1.0).is_err());
        }
    }
    let far = tile(Dtype::F64, &[1e30; 12]);
    let base = Base { rows: Rows { width: 4, first: 0 }, k: None, g: 0.125, a: None };
    assert!(run(Dtype::F64, &far, base, 1e-9).is_err());
}

/// In this table one row in five moves, by amounts that spread over octaves. It costs less by rows than on one lattice
/// with the same error in units of each row's update.
#[test]
fn rows_pay_where_few_move() {
    let (height, width) = (2000usize, 16usize);
    let mut state = 1u64;
    let mut unit = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 11) as f64 / (1u64 << 53) as f64
    };
    let old: Vec<f64> = (0..height * width).map(|_| 0.2 * unit() - 0.1).collect();
    let mut new = old.clone();
    let mut rms = Vec::new();
    for row in new.chunks_mut(width) {
        if unit() < 0.2 {
            let scale = 1e-2 * (-6.0 * unit()).exp2();
            row.iter_mut().for_each(|w| *w += scale * (2.0 * unit() - 1.0));
            rms.push(scale / 3f64.sqrt());
        } else {
            rms.push(0.0);
        }
    }
    let (old, new) = (tile(Dtype::F32, &old), tile(Dtype::F32, &new));
    let rows = Rows { width: width as u64, first: 0 };
    let g = base_step(&rms).unwrap();
    let zeros = vec![0; height * width];
    let base = Base { rows, k: Some(&old), g, a: Some(&zeros) };
    let q = run(Dtype::F32, &new, base, 1.0).unwrap();
    check(Dtype::F32, &new, base, &q);
    let by_rows = encoded(&q.a, Some(&zeros), rows, &q.exceptions).len();
    let mut payload = Vec::new();
    let (mut a, mut r) = (vec![0; zeros.len()], vec![0; new.len()]);
    let least = rms.iter().copied().filter(|r| *r > 0.0).fold(f64::MAX, f64::min);
    let one_step = lattice::choose_g(Dtype::F32, &[least], 1.0).unwrap();
    lattice::quantize(Dtype::F32, &new, Some(&old), one_step, &mut a, &mut r, &mut Vec::new()).unwrap();
    lattice::encode_tile(&a, Some(&zeros), &[], &mut payload).unwrap();
    println!(
        "rows {:.2}%, one lattice {:.2}%",
        by_rows as f64 * 100.0 / new.len() as f64,
        payload.len() as f64 * 100.0 / new.len() as f64
    );
    assert!(by_rows * 4 < payload.len() * 3, "{by_rows} {}", payload.len());
    let (moves, factor) = moves(&widen(Dtype::F32, &old), &widen(Dtype::F32, &new), width);
    assert_eq!(
        (moves.iter().map(|own| *own > 0.0).collect(), factor),
        (rms.iter().map(|own| *own > 0.0).collect::<Vec<_>>(), 1.0)
    );
    // Nothing moved: flags only.
    let again = run(Dtype::F32, &new, Base { a: Some(&q.a), ..base }, 1.0).unwrap();
    assert_eq!(again.a, q.a);
    assert!(encoded(&again.a, Some(&q.a), rows, &[]).len() < 8);
}

#[test]
fn steps_of_tables() {
    assert_eq!(base_step(&[]), None);
    assert_eq!(base_step(&[0.0, 0.0]), None);
    assert_eq!(base_step(&[1.0, f64::NAN]), None);
    assert_eq!(base_step(&[1.0, f64::INFINITY]), None);
    assert_eq!(base_step(&[0.0, 1.0, 3.0]), Some(0.125));
    assert_eq!(base_step(&[0.9, 1.0, 3.0]), Some(0.0625));
    assert_eq!(base_step(&[1e-30, 1.0]), Some(2f64.powi(-20)));
    assert_eq!(moves(&[], &[], 8), (vec![], 1.0));
    assert_eq!(moves(&[1.0, 2.0, 3.0, 4.0, 5.0], &[1.0, 2.0, 3.0, 5.0, 5.0], 2).0, [0.0, 0.5f64.sqrt(), 0.0]);
    assert!(moves(&[1.0, 2.0], &[f64::NAN, 2.0], 2).0[0].is_nan());
}

/// Twenty states of a table. AdamW's decay shrinks all rows, with the roundings of f32. One row in ten also moves by
/// itself, another one in each state.
#[test]
fn rows_that_only_decay_cost_a_flag() {
    const WIDTH: usize = 64;
    const HEIGHT: usize = 1000;
    const MOVE: f64 = 2e-3;
    let rows = Rows { width: WIDTH as u64, first: 0 };
    let mut state = 1u64;
    let mut normal = || {
        let mut uniform = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f64 / (1u64 << 24) as f64 - 0.5
        };
        (0..12).map(|_| uniform()).sum::<f64>()
    };
    let mut weights: Vec<f32> = (0..HEIGHT * WIDTH).map(|_| normal() as f32).collect();
    let bytes = |weights: &[f32]| -> Vec<u8> { weights.iter().flat_map(|w| w.to_le_bytes()).collect() };
    // The keyframe is a plain lattice with the step of a row that moves.
    let mut g = 2f64.powi(-9);
    let (mut a, mut r) = (vec![0; weights.len()], vec![0; 4 * weights.len()]);
    lattice::quantize(Dtype::F32, &bytes(&weights), None, g, &mut a, &mut r, &mut Vec::new()).unwrap();
    let at_rest = a[..WIDTH].to_vec();
    let decay = f64::from(1.0f32 - 1e-5).powi(100);
    let shares = |payload: &[u8]| payload.len() as f64 / (4 * HEIGHT * WIDTH) as f64;
    for number in 1..=20 {
        let before: Vec<f64> = weights.iter().map(|w| f64::from(*w)).collect();
        for _ in 0..100 {
            weights.iter_mut().for_each(|w| *w *= 1.0 - 1e-5);
        }
        for row in weights.chunks_mut(WIDTH).skip(number % 9 + 1).step_by(10) {
            row.iter_mut().for_each(|w| *w += (MOVE * normal()) as f32);
        }
        let now: Vec<f64> = weights.iter().map(|w| f64::from(*w)).collect();
        let (moves, exact) = moves(&before, &now, WIDTH);
        assert_eq!(moves.iter().filter(|own| **own > 0.0).count(), HEIGHT / 10);
        let since = factor(&widen(Dtype::F32, &r), &now, WIDTH, |row| moves[row] == 0.0);
        assert!((exact - decay).abs() < 1e-7 && (since - decay).abs() < 3e-6, "{exact} {since} {decay}");
        let step = lattice::nearest_step(g * since).unwrap() / 16.0 * if number == 1 { 1.0 } else { 16.0 };
        restate(&mut a, g, step).unwrap();
        let base = Base { rows, k: None, g: step, a: Some(&a) };
        let q = run(Dtype::F32, &bytes(&weights), base, 1.0).unwrap();
        check(Dtype::F32, &bytes(&weights), base, &q);
        let share = shares(&encoded(&q.a, Some(&a), rows, &q.exceptions));
        assert!(share < 0.01, "{share}: 6% of a tenth of the rows, and a flag for the others");
        (a, r, g) = (q.a, q.r, step);
    }
    // The first row never moved by itself. Its integers are those of the keyframe, in the finer step.
    let same = at_rest.iter().zip(&a).filter(|(then, now)| 16 * **then == **now).count();
    assert!(same >= WIDTH - 2, "{same}");
}

/// The byte-counted example of docs/FORMAT.md.
#[test]
fn documented_example() {
    let rows = Rows { width: 2, first: 0 };
    let payload = encoded(&[3, 4, 8, 24], Some(&[3, 4, 5, 11]), rows, &[]);
    assert_eq!(payload, [3, 0, 0, 4, 4, 3, 0, 15, 17, 0]);
}
