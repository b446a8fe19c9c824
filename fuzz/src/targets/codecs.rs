//! Tiles of stepfs's own codecs: untrusted payloads, and round trips.

use codec::Rows;
use codec::fused_decode::{self, From, LatticeRun, LogRun};
use codec::log::{Factors, FactorsBuilder, Grid};
use codec::moment::Rule;
use codec::rows::Base;
use codec::{Dtype, Integers, cast, lattice, log, lossless, moment, rows};

use super::input::{Input, elements, values};

/// Elements of the tiles here: more than a block of the fused decoder (2048).
const MOST: usize = 5000;

fn count(input: &mut Input) -> usize {
    let long = input.byte() > 200;
    input.upto(if long { MOST } else { 40 })
}

/// A payload: any bytes, or one of a few symbols, so that later steps of a chain are reached.
fn payload(input: &mut Input, n: usize) -> Vec<u8> {
    if input.flag() {
        return input.bytes(400).to_vec();
    }
    let spread = 1 << input.upto(30);
    let a: Vec<i32> = (0..n).map(|_| (input.u32() as i32) % spread).collect();
    let mut out = Vec::new();
    let exceptions = exceptions(input, n);
    lattice::encode_tile(&a, None, &exceptions, &mut out).expect("all fit");
    if input.byte() == 9 {
        out.extend_from_slice(input.bytes(4));
    }
    out
}

fn exceptions(input: &mut Input, n: usize) -> Vec<lattice::Exception> {
    let mut places: Vec<u32> = (0..input.upto(3)).map(|_| input.upto(n.max(1) - 1) as u32).collect();
    places.sort_unstable();
    places.dedup();
    if n == 0 {
        places.clear();
    }
    places.into_iter().map(|index| lattice::Exception { index, raw: u64::from(input.byte()) }).collect()
}

/// A run of lattice payloads: decoded one after the other, and all in one pass.
pub(crate) fn lattice_decode(data: &[u8]) {
    let mut input = Input::new(data);
    let dtype = input.float();
    let n = count(&mut input);
    let k = input.flag().then(|| input.filled(n * dtype.size()));
    let start = input.flag().then(|| (0..n as i32).map(|at| at.wrapping_mul(977)).collect::<Vec<_>>());
    let same = input.flag();
    let first = input.step();
    let steps: Vec<f64> = (0..1 + input.upto(3)).map(|_| if same { first } else { input.step() }).collect();
    let payloads: Vec<Vec<u8>> = steps.iter().map(|_| payload(&mut input, n)).collect();
    let mut runs: Vec<(&[u8], f64)> = payloads.iter().map(Vec::as_slice).zip(steps.iter().copied()).collect();
    // A with its keyframe in the same payload.
    let mut own = None;
    if input.byte() == 3
        && let Ok((keyframe, rest)) = lattice::take_keyframe(dtype, runs[0].0, n * dtype.size())
    {
        runs[0].0 = rest;
        own = keyframe;
    }
    let k = own.as_deref().or(k.as_deref());
    let one_by_one = || -> Option<Vec<u8>> {
        let mut a = Integers::Wide(start.clone().unwrap_or_else(|| vec![0; n]));
        let (mut before, mut exceptions) = (first, Vec::new());
        for (payload, step) in &runs {
            let (mut kept, from) = (Integers::with_capacity(n), From::Integers(&a));
            // A state between two others has no bytes, and f64 holds every exception.
            let run = LatticeRun { dtype: Dtype::F64, k: None, from, step: before, payloads: &[(payload, *step)] };
            fused_decode::lattice(run, &mut vec![0; 8 * n], &mut exceptions, Some(&mut kept)).ok()?;
            (a, before) = (kept, *step);
        }
        let mut out = vec![0; n * dtype.size()];
        lattice::reconstruct(dtype, k, before, &a.values(), &mut out).ok()?;
        lattice::apply_exceptions(dtype, &exceptions, &mut out).ok()?;
        Some(out)
    };
    let (mut out, mut exceptions, mut kept) = (vec![0x55; n * dtype.size()], Vec::new(), Integers::with_capacity(n));
    let wide = start.clone().map(Integers::Wide);
    let from = wide.as_ref().map_or(From::Zeros, From::Integers);
    let run = LatticeRun { dtype, k, from, step: first, payloads: &runs };
    let fused = fused_decode::lattice(run, &mut out, &mut exceptions, Some(&mut kept));
    let fused = fused.ok().map(|()| out);
    // A block without elements computes nothing, so an invalid step goes unnoticed there, and does no harm.
    if n > 0 {
        assert!(fused == one_by_one(), "one pass equals many passes");
    }
}

/// Rows with codes; decoded values are encoded again.
pub(crate) fn rows_decode(data: &[u8]) {
    let mut input = Input::new(data);
    let n = count(&mut input);
    let rows = Rows { width: input.upto(64) as u64, first: input.u64() >> input.upto(63) };
    let parent = input.flag().then(|| (0..n as i32).map(|at| at.wrapping_mul(12_345)).collect::<Vec<i32>>());
    let mut a = parent.clone().unwrap_or_else(|| vec![0; n]);
    let mut exceptions = Vec::new();
    let payload = input.rest();
    if rows::decode_tile_add(payload, &mut a, rows, &mut exceptions).is_err() {
        return;
    }
    assert!(exceptions.iter().all(|exception| (exception.index as usize) < n));
    let mut out = Vec::new();
    if rows::encode_tile(&a, parent.as_deref(), rows, &exceptions, &mut out).is_ok() {
        let (mut again, mut kept) = (parent.unwrap_or_else(|| vec![0; n]), Vec::new());
        rows::decode_tile_add(&out, &mut again, rows, &mut kept).expect("written bytes can be read");
        assert_eq!((again, kept), (a, exceptions));
    }
}

/// Factors, a state that has them, and differences to it: decoded one after the other, and all in one pass.
pub(crate) fn log_decode(data: &[u8]) {
    let mut input = Input::new(data);
    let dtype = input.float();
    let (height, width) = (input.upto(40) as u64, input.upto(40) as u64);
    let text = input.bytes(200);
    let factors = match Factors::decode(text, height, width) {
        Ok(factors) => factors,
        Err(_) => Factors::flat(input.u32() as i32 >> 8),
    };
    let mut written = Vec::new();
    factors.encode(&mut written);
    assert_eq!(Factors::decode(&written, height, width), Ok(factors.clone()));
    let all = (height * width) as usize;
    let n = if factors.is_flat() { count(&mut input) } else { input.upto(all) };
    let first = if input.byte() == 0 { input.u64() } else { input.upto(all - n.min(all)) as u64 };
    let unit = if input.byte() == 0 { input.u32() } else { 1 << (14 + input.upto(6)) };
    let grid = Grid { factors: &factors, first };
    let payloads: Vec<Vec<u8>> = (0..1 + input.upto(2))
        .map(|_| {
            if input.flag() {
                return input.bytes(300).to_vec();
            }
            let mut out = Vec::new();
            let symbols: Vec<i32> = (0..n).map(|_| i32::from(input.byte() as i8)).collect();
            codec::entropy::ints::encode(&symbols, &mut out);
            out
        })
        .collect();
    let one_by_one = || -> Option<(Vec<u8>, Vec<i32>)> {
        let mut q: Option<Integers> = None;
        let mut out = vec![0; n * dtype.size()];
        for payload in &payloads {
            let (mut kept, from) = (Integers::with_capacity(n), q.as_ref().map_or(From::Factors(grid), From::Integers));
            fused_decode::log(LogRun { dtype, grid, unit, from, payloads: &[payload] }, &mut out, Some(&mut kept))
                .ok()?;
            q = Some(kept);
        }
        Some((out, q?.values()))
    };
    let runs: Vec<&[u8]> = payloads.iter().map(Vec::as_slice).collect();
    let (mut out, mut kept) = (vec![0x55; n * dtype.size()], Integers::with_capacity(n));
    let run = LogRun { dtype, grid, unit, from: From::Factors(grid), payloads: &runs };
    let fused = fused_decode::log(run, &mut out, Some(&mut kept)).ok().map(|()| out);
    let (single, q) = one_by_one().unzip();
    if n > 0 {
        assert!(fused == single, "one pass equals many passes");
    }
    if let (Some(q), Some(bytes)) = (q, single) {
        assert!(values(dtype, &bytes).iter().all(|value| value.is_finite() && !value.is_sign_negative()));
        let mut out = Vec::new();
        log::encode_tile(&q, From::Factors(grid), &mut out).expect("each is a q");
        let (mut again, mut back) = (Integers::with_capacity(n), bytes.clone());
        let run = LogRun { dtype, grid, unit, from: From::Factors(grid), payloads: &[&out] };
        fused_decode::log(run, &mut back, Some(&mut again)).expect("written bytes can be read");
        assert_eq!((again.values(), back), (q, bytes));
    }
}

/// First moments in units of the root of second moments.
pub(crate) fn moment_decode(data: &[u8]) {
    let mut input = Input::new(data);
    let dtype = input.float();
    let n = count(&mut input);
    let second = match input.flag() {
        true => input.filled(n * dtype.size()),
        false => elements(dtype, &(0..n).map(|_| input.value().abs()).collect::<Vec<f64>>()),
    };
    let (step, rule) = (input.step(), input.pick(&Rule::ALL));
    let payload = payload(&mut input, n);
    let one_by_one = || -> Option<Vec<u8>> {
        let (mut a, mut exceptions) = (Integers::with_capacity(n), Vec::new());
        let run = LatticeRun { dtype: Dtype::F64, k: None, from: From::Zeros, step: 1.0, payloads: &[(&payload, 1.0)] };
        fused_decode::lattice(run, &mut vec![0; 8 * n], &mut exceptions, Some(&mut a)).ok()?;
        let mut out = vec![0; n * dtype.size()];
        moment::reconstruct((rule, dtype), &second, step, &a.values(), &mut out).ok()?;
        lattice::apply_exceptions(dtype, &exceptions, &mut out).ok()?;
        Some(out)
    };
    let mut out = vec![0x55; n * dtype.size()];
    let fused = fused_decode::moment((rule, dtype), &second, step, &payload, &mut out).ok().map(|()| out);
    if n > 0 {
        assert!(fused == one_by_one(), "one pass equals many passes");
    }
}

/// A lossless tile of any type; decoded bytes are encoded again.
pub(crate) fn lossless_decode(data: &[u8]) {
    let mut input = Input::new(data);
    let dtype = input.pick(&Dtype::ALL);
    let length = count(&mut input) * input.pick(&[1, dtype.size()]);
    let parent = input.flag().then(|| input.filled(length));
    let payload = input.rest();
    let mut out = vec![0x77; length];
    if lossless::decode(dtype, payload, parent.as_deref(), &mut out).is_ok() {
        lossless_returns(dtype, &out, parent.as_deref());
    }
}

fn lossless_returns(dtype: Dtype, bytes: &[u8], parent: Option<&[u8]>) {
    let (mut payload, mut back) = (Vec::new(), vec![0x33; bytes.len()]);
    lossless::encode(dtype, bytes, parent, &mut payload);
    lossless::decode(dtype, &payload, parent, &mut back).expect("written bytes can be read");
    assert!(back == bytes);
}

/// Tensors of any values through each codec that takes them, and back.
pub(crate) fn round_trip(data: &[u8]) {
    let mut input = Input::new(data);
    let dtype = input.float();
    let n = count(&mut input);
    let raw = input.flag();
    let tile = |input: &mut Input| match raw {
        true => input.filled(n * dtype.size()),
        false => elements(dtype, &(0..n).map(|_| input.value()).collect::<Vec<f64>>()),
    };
    let (w, before) = (tile(&mut input), tile(&mut input));
    let parent = input.flag().then_some(before.as_slice());
    let step = input.step();
    lossless_returns(dtype, &w, parent);
    let k = parent;
    let (mut a, mut r, mut kept) = (vec![0; n], vec![0; w.len()], Vec::new());
    if let Ok(error) = lattice::quantize(dtype, &w, k, step, &mut a, &mut r, &mut kept) {
        is_within(dtype, &w, &r, error, step / 2.0);
        let prior: Option<Vec<i32>> = input.flag().then(|| a.iter().map(|a| a / 2).collect());
        let mut out = Vec::new();
        if lattice::encode_tile(&a, prior.as_deref(), &kept, &mut out).is_ok() {
            let base = prior.map(Integers::Wide);
            let from = base.as_ref().map_or(From::Zeros, From::Integers);
            let mut back = vec![0; w.len()];
            let run = LatticeRun { dtype, k, from, step, payloads: &[(&out, step)] };
            fused_decode::lattice(run, &mut back, &mut Vec::new(), None).expect("written bytes can be read");
            assert!(back == r, "the tile decodes as promised");
        }
    }
    let rows = Rows { width: 1 + input.upto(20) as u64, first: u64::from(input.byte()) };
    let prior: Option<Vec<i32>> = input.flag().then(|| (0..n).map(|_| i32::from(input.byte() as i8)).collect());
    let base = Base { rows, k, g: step, a: prior.as_deref() };
    let (mut a, mut r, mut kept) = (vec![0; n], vec![0; w.len()], Vec::new());
    if rows::quantize(dtype, &w, base, 0.25 * (1.0 + f64::from(input.byte())), &mut a, &mut r, &mut kept).is_ok() {
        let mut out = Vec::new();
        if rows::encode_tile(&a, prior.as_deref(), rows, &kept, &mut out).is_ok() {
            let (mut sums, mut exceptions) = (prior.unwrap_or_else(|| vec![0; n]), Vec::new());
            rows::decode_tile_add(&out, &mut sums, rows, &mut exceptions).expect("written bytes can be read");
            let mut back = vec![0; w.len()];
            lattice::reconstruct(dtype, k, step, &sums, &mut back).expect("the same step and keyframe");
            lattice::apply_exceptions(dtype, &exceptions, &mut back).expect("they are of this tile");
            assert!(back == r, "the tile decodes as promised");
        }
    }
    let v: Vec<f64> = values(dtype, &w).iter().map(|value| value.abs()).collect();
    let v = elements(dtype, &v);
    moments(&mut input, dtype, n, &v, &before);
    for narrow in super::input::FLOATS.into_iter().filter(|to| to.size() < dtype.size()) {
        let mut out = vec![0; n * narrow.size()];
        cast::cast(dtype, &w, narrow, &mut out).expect("from a wider type");
        for (wide, near) in values(dtype, &w).into_iter().zip(values(narrow, &out)) {
            assert_eq!(wide.is_nan(), near.is_nan());
            assert!(wide.is_nan() || wide == 0.0 || near == 0.0 || (wide > 0.0) == (near > 0.0));
        }
    }
}

/// A second moment, and a first one in units of its root.
fn moments(input: &mut Input, dtype: Dtype, n: usize, v: &[u8], m: &[u8]) {
    let width = 1 + input.upto(30);
    let factors = match input.flag() {
        true => Factors::flat_of(dtype, v),
        false => {
            let mut builder = FactorsBuilder::new(n.div_ceil(width), width);
            builder.add(dtype, 0, v);
            builder.finish(0)
        }
    };
    let unit = 1 << (14 + input.upto(6));
    let grid = Grid { factors: &factors, first: 0 };
    let (mut q, mut decoded) = (vec![0; n], vec![0; v.len()]);
    let Ok(error) = log::quantize(dtype, v, grid, unit, None, &mut q, &mut decoded) else { return };
    assert!(error <= log::bound(unit, false));
    for (was, is) in values(dtype, v).into_iter().zip(values(dtype, &decoded)) {
        assert!(was >= 0.0 && is.is_finite() && is.is_sign_positive() && (was == 0.0) == (is == 0.0), "{was} {is}");
    }
    let mut out = Vec::new();
    log::encode_tile(&q, From::Factors(grid), &mut out).expect("each is a q");
    let (mut back, mut kept) = (vec![0; v.len()], Integers::with_capacity(n));
    let run = LogRun { dtype, grid, unit, from: From::Factors(grid), payloads: &[&out] };
    fused_decode::log(run, &mut back, Some(&mut kept)).expect("written bytes can be read");
    assert!(kept.values() == q && back == decoded);
    let (step, rule, outward) = (input.step(), input.pick(&Rule::ALL), input.pick(&[0.0, moment::OUTWARD]));
    let (mut a, mut kept) = (vec![0; n], Vec::new());
    if moment::quantize((rule, dtype), m, v, (step, outward), &mut a, &mut kept).is_err() {
        return;
    }
    let mut is = vec![0; m.len()];
    moment::reconstruct((rule, dtype), &decoded, step, &a, &mut is).expect("a sound second moment");
    lattice::apply_exceptions(dtype, &kept, &mut is).expect("they are of this tile");
    if moment::largest_error((rule, dtype), m, v, &is, &decoded, step).is_some() {
        for (m, is) in values(dtype, m).into_iter().zip(values(dtype, &is)) {
            assert!(is.is_finite() && (is == 0.0 || (is > 0.0) == (m > 0.0)), "{m} became {is}");
        }
    }
}

fn is_within(dtype: Dtype, w: &[u8], r: &[u8], error: f64, bound: f64) {
    assert!(error <= bound);
    for (w, r) in values(dtype, w).into_iter().zip(values(dtype, r)) {
        assert!((w - r).abs() <= bound, "{w} became {r}, bound {bound}");
    }
}
