use super::*;
use crate::float::{Bf16, F32};
use crate::log::{Factors, FactorsBuilder, ZERO};
use crate::plain::decode_tile_add;
use proptest::prelude::*;

/// A pseudo-random number of 64 bits for each seed and place.
fn noise(seed: u64, at: usize) -> u64 {
    let mut z = seed.wrapping_add(at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z ^ (z >> 31)
}

/// Values of a payload: mostly small, sometimes large.
fn integers(seed: u64, n: usize, reach: i32) -> Vec<i32> {
    let one = |at| {
        let bits = noise(seed, at);
        let small = (bits % 7) as i32 - 3;
        if bits >> 60 == 0 { (bits as u32 >> 8) as i32 % reach } else { small }
    };
    (0..n).map(one).collect()
}

/// The start of a run, in each permitted form.
fn froms<'a>(wide: &'a Integers, narrow: &'a Integers) -> [From<'a>; 2] {
    [From::Integers(wide), From::Integers(narrow)]
}

/// The classes of these small values.
fn classes(values: impl Iterator<Item = i32>) -> Vec<u8> {
    values.map(|value| (value + 15) as u8).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Any f32 as a keyframe or a second moment, any short step, and integers of 16 bits.
    #[test]
    fn single_precision_gives_the_bits_of_double(
        elements in prop::collection::vec((any::<u32>(), any::<i16>(), -15..=15i32), 1..300),
        fraction in 1..512u32,
        exponent in -55..50i32,
    ) {
        let g = f64::from(fraction) * f64::from(exponent).exp2();
        prop_assert!(in_single(Dtype::F32, g).is_some() && lattice::is_step(g));
        let bytes = |of: &dyn Fn(u32) -> u32| -> Vec<u8> {
            elements.iter().flat_map(|(bits, ..)| of(*bits).to_le_bytes()).collect()
        };
        // A keyframe is finite, and so is a second moment, which is not negative either.
        let finite = |bits: u32| if f32::from_bits(bits).is_finite() { bits } else { bits & 0x807f_ffff };
        let (k, v) = (bytes(&finite), bytes(&|bits| finite(bits) & 0x7fff_ffff));
        let a: Vec<i16> = elements.iter().map(|(_, a, _)| *a).collect();
        let wide: Vec<i32> = a.iter().map(|&a| a.into()).collect();
        let (mut single, mut double) = (vec![1; k.len()], vec![2; k.len()]);
        for k in [None, Some(k.as_slice())] {
            lattice::reconstruct_symbols(Dtype::F32, k, g, &a, &mut single).unwrap();
            lattice::reconstruct(Dtype::F32, k, g, &wide, &mut double).unwrap();
            prop_assert_eq!(&single, &double);
            let (half, steps): (Vec<i16>, Vec<i32>) = elements.iter().map(|(_, a, step)| (a / 2, *step)).unzip();
            let sums: Vec<i32> = half.iter().zip(&steps).map(|(&a, step)| i32::from(a) + step).collect();
            lattice::reconstruct(Dtype::F32, k, g, &sums, &mut double).unwrap();
            for level in Level::available() {
                let (k, out) = (k.map(F32::elements), F32::elements_mut(&mut single));
                prop_assert!(add_and_reconstruct::<F32>(level, k, g as f32, &half, &classes(steps.iter().copied()), out));
                prop_assert_eq!(&single, &double);
            }
        }
        for rule in Rule::ALL {
            moment::reconstruct_symbols((rule, Dtype::F32), &v, g, &a, &mut single).unwrap();
            moment::reconstruct((rule, Dtype::F32), &v, g, &wide, &mut double).unwrap();
            prop_assert_eq!(&single, &double);
        }
    }

    /// The same for bf16, whose sums often lie in the middle of two elements.
    #[test]
    fn single_precision_gives_the_bits_of_double_in_bf16(
        elements in prop::collection::vec((any::<u16>(), -300..300i16, any::<bool>(), -15..=15i32), 1..700),
        fraction in 1..512u32,
        exponent in -30..30i32,
        around in -8..=8i32,
    ) {
        let g = f64::from(fraction) * f64::from(exponent).exp2();
        // Keyframes near the step, where sums need rounding.
        let near = (127 + exponent + around) as u16;
        let of = |bits: u16| bits & 0x807f | near << 7;
        let k: Vec<u8> = elements.iter().flat_map(|(bits, ..)| of(*bits).to_le_bytes()).collect();
        let v: Vec<u8> = elements.iter().flat_map(|(bits, ..)| (of(*bits) & 0x7fff).to_le_bytes()).collect();
        let a: Vec<i16> = elements.iter().map(|(_, a, large, _)| if *large { a * 100 } else { *a }).collect();
        let wide: Vec<i32> = a.iter().map(|&a| a.into()).collect();
        let (mut single, mut double) = (vec![1; k.len()], vec![2; k.len()]);
        for k in [None, Some(k.as_slice())] {
            lattice::reconstruct_symbols(Dtype::Bf16, k, g, &a, &mut single).unwrap();
            lattice::reconstruct(Dtype::Bf16, k, g, &wide, &mut double).unwrap();
            prop_assert_eq!(&single, &double);
            let (half, steps): (Vec<i16>, Vec<i32>) = elements.iter().map(|(_, a, _, step)| (*a, *step)).unzip();
            let sums: Vec<i32> = half.iter().zip(&steps).map(|(&a, step)| i32::from(a) + step).collect();
            lattice::reconstruct(Dtype::Bf16, k, g, &sums, &mut double).unwrap();
            for level in Level::available() {
                let (k, out) = (k.map(Bf16::elements), Bf16::elements_mut(&mut single));
                let sure = add_and_reconstruct::<Bf16>(level, k, g as f32, &half, &classes(steps.iter().copied()), out);
                prop_assert!(!sure || single == double);
            }
        }
        for rule in Rule::ALL {
            moment::reconstruct_symbols((rule, Dtype::Bf16), &v, g, &a, &mut single).unwrap();
            moment::reconstruct((rule, Dtype::Bf16), &v, g, &wide, &mut double).unwrap();
            prop_assert_eq!(&single, &double);
        }
    }

    #[test]
    fn a_run_of_lattices_is_one_step_after_the_other(
        n in 1..5000usize,
        states in 0..4u64,
        seed: u64,
        reach in prop::sample::select([7, 40, 30_000, 1 << 26].as_slice()),
        change in prop::sample::select([7, 40, 30_000, 1 << 26].as_slice()),
        step_by_step in prop::collection::vec(prop::sample::select([0.5, 0.25, 0.375].as_slice()), 5),
        one_step: bool,
        with_keyframe: bool,
    ) {
        let keyframe: Vec<u8> =
            (0..n).flat_map(|at| (noise(seed ^ 1, at) as u32 as f32 / 1e9).to_le_bytes()).collect();
        let k = with_keyframe.then_some(keyframe.as_slice());
        let steps = if one_step { vec![0.375; 5] } else { step_by_step };
        let first = integers(seed, n, reach);
        let (mut a, mut exceptions, mut payloads) = (first.clone(), Vec::new(), Vec::new());
        let mut sound = true;
        for state in 0..states as usize {
            let kept = vec![Exception { index: (n / 2) as u32, raw: state as u64 }];
            let mut payload = Vec::new();
            lattice::encode_tile(&integers(seed.wrapping_add(7 + state as u64), n, change), None, &kept, &mut payload)
                .unwrap();
            exceptions.clear();
            sound = sound
                && lattice::rescale(&mut a, steps[state], steps[state + 1]).is_ok()
                && decode_tile_add(&payload, &mut a, &mut exceptions).is_ok();
            payloads.push((payload, steps[state + 1]));
        }
        let payloads: Vec<(&[u8], f64)> = payloads.iter().map(|(payload, step)| (payload.as_slice(), *step)).collect();
        let mut wanted = vec![0; 4 * n];
        lattice::reconstruct(Dtype::F32, k, steps[states as usize], &a, &mut wanted).unwrap();
        apply_exceptions(Dtype::F32, &exceptions, &mut wanted).unwrap();
        for from in froms(&Integers::Wide(first.clone()), &Integers::of(&first)) {
            let (mut out, mut found, mut kept) = (vec![1; 4 * n], Vec::new(), Integers::with_capacity(n));
            let run = LatticeRun { dtype: Dtype::F32, k, from, step: steps[0], payloads: &payloads };
            let done = super::lattice(run, &mut out, &mut found, Some(&mut kept));
            prop_assert_eq!(done.is_ok(), sound);
            let mut alone = vec![1; 4 * n];
            let done = super::lattice(run, &mut alone, &mut Vec::new(), None);
            prop_assert_eq!(done.is_ok(), sound);
            if sound {
                prop_assert_eq!(&out, &wanted);
                prop_assert_eq!(&alone, &wanted, "kept in no memory");
                prop_assert_eq!(&found, &exceptions);
                prop_assert_eq!(kept.values(), a.clone());
            }
        }
    }

    #[test]
    fn a_run_of_logarithmic_lattices_is_one_step_after_the_other(
        width in 2..70usize,
        rows in 2..70usize,
        states in 1..4u64,
        seed: u64,
        alone: bool,
        flat: bool,
        zeros: bool,
        reach in prop::sample::select([7, 200, 1 << 14].as_slice()),
    ) {
        let n = width * rows;
        let v: Vec<u8> = (0..n)
            .flat_map(|at| {
                let zero = noise(seed, at).is_multiple_of(5) || at % width == 1;
                (if zero { 0.0 } else { (noise(seed, at) >> 40) as f32 * 1e-6 + 1e-9 }).to_le_bytes()
            })
            .collect();
        let mut builder = FactorsBuilder::new(rows, width);
        builder.add(Dtype::F32, 0, &v);
        let factors = if flat { Factors::flat_of(Dtype::F32, &v) } else { builder.finish(0) };
        let grid = Grid { factors: &factors, first: 0 };
        let unit = 1 << 16;
        let q_of = |seed: u64| -> Vec<i32> {
            let q = integers(seed, n, reach);
            let is_zero = |at| zeros && noise(seed ^ 3, at).is_multiple_of(4);
            (0..n).map(|at| if is_zero(at) { ZERO } else { q[at] }).collect()
        };
        let first = q_of(seed);
        let (mut before, mut payloads) = (first.clone(), Vec::new());
        for state in 0..states {
            let q = q_of(seed + state + 1);
            let wide = Integers::Wide(before);
            let parent = if alone && state == 0 { From::Factors(grid) } else { From::Integers(&wide) };
            let mut payload = Vec::new();
            log::encode_tile(&q, parent, &mut payload).unwrap();
            payloads.push(payload);
            before = q;
        }
        let payloads: Vec<&[u8]> = payloads.iter().map(Vec::as_slice).collect();
        let mut wanted = vec![0; 4 * n];
        log::reconstruct(Dtype::F32, grid, unit, &before, &mut wanted).unwrap();
        for from in froms(&Integers::Wide(first.clone()), &Integers::of(&first)) {
            let from = if alone { From::Factors(grid) } else { from };
            let (mut out, mut kept) = (vec![1; 4 * n], Integers::with_capacity(n));
            let run = LogRun { dtype: Dtype::F32, grid, unit, from, payloads: &payloads };
            super::log(run, &mut out, Some(&mut kept)).unwrap();
            prop_assert_eq!(&out, &wanted);
            prop_assert_eq!(kept.values(), before.clone());
            let mut alone = vec![1; 4 * n];
            super::log(run, &mut alone, None).unwrap();
            prop_assert_eq!(&alone, &wanted, "kept in no memory");
        }
    }

    #[test]
    fn any_bytes_are_an_answer_or_an_error(payload in prop::collection::vec(any::<u8>(), 0..200), n in 0..3000usize) {
        let second = vec![0; 4 * n];
        let mut out = vec![1; 4 * n];
        let _ = super::moment((Rule::Root, Dtype::F32), &second, 0.5, &payload, &mut out);
        let payloads = [(payload.as_slice(), 0.5)];
        let run = LatticeRun { dtype: Dtype::F32, k: None, from: From::Zeros, step: 0.5, payloads: &payloads };
        let _ = super::lattice(run, &mut out, &mut Vec::new(), None);
        let factors = Factors::flat(7);
        let grid = Grid { factors: &factors, first: 0 };
        let (dtype, from) = (Dtype::F32, From::Factors(grid));
        let _ = super::log(LogRun { dtype, grid, unit: 1 << 16, from, payloads: &[&payload] }, &mut out, None);
    }
}
