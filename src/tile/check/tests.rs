use super::*;
use crate::tile::{Around, Coding, quantize};
use codec::hash::{Checksum, xxh3_64};
use codec::moment::Rule;
use codec::{Dtype, Rows};

/// More than two blocks, the last one short.
const N: usize = 2 * BLOCK + 100;

fn bytes(value: impl Fn(usize) -> f32) -> Vec<u8> {
    (0..N).flat_map(|i| value(i).to_le_bytes()).collect()
}

fn spec(coding: Coding) -> TileSpec {
    TileSpec { dtype: Dtype::F32, coding, len: 4 * N, rows: Rows { width: 0, first: 0 } }
}

fn checked(coding: Coding, one_sign: bool, written: &[u8], decoded: &[u8]) -> Option<Checked> {
    let limits = one_sign.then_some(Limits { least: 0.0, most: f64::INFINITY });
    let mut check = Check::new(spec(coding), None, None).within(limits).with_crc(Some(Checksum::new(false)));
    check.add_all(written, decoded).unwrap();
    check.finish()
}

/// The bytes with another value of one element.
fn with(bytes: &[u8], at: usize, value: f32) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes[4 * at..][..4].copy_from_slice(&value.to_le_bytes());
    bytes
}

#[test]
fn one_element_beyond_the_bound_is_found_in_every_block() {
    let coding = Codec::Lattice { step: 0.5 }.alone();
    let written = bytes(|i| i as f32);
    let decoded = bytes(|i| i as f32 + 0.125);
    let found = checked(coding, false, &written, &decoded).unwrap();
    assert_eq!((found.error, found.max_abs_error, found.differs), (0.125, 0.125, true));
    assert_eq!(found.hash, xxh3_64(&decoded));
    let crc = found.crc.unwrap().map(|crc| crc.finalize());
    assert_eq!(crc, [crc32fast::hash(&written), crc32fast::hash(&decoded)]);
    for at in [0, BLOCK - 1, BLOCK, N - 1] {
        assert!(checked(coding, false, &written, &with(&decoded, at, at as f32 + 0.25)).is_some());
        for wrong in [at as f32 - 0.26, f32::NAN, f32::INFINITY] {
            assert!(checked(coding, false, &written, &with(&decoded, at, wrong)).is_none(), "{at}: {wrong}");
        }
    }
    assert!(checked(coding, false, &written, &decoded[..4 * N - 4]).is_none());
}

#[test]
fn one_changed_bit_of_a_lossless_tile_is_found() {
    let written = bytes(|i| i as f32);
    assert!(!checked(Coding::LOSSLESS, false, &written, &written).unwrap().differs);
    assert!(checked(Coding::LOSSLESS, false, &written, &with(&written, 0, -0.0)).is_none());
}

#[test]
fn a_lost_sign_is_found_where_the_tensor_has_one() {
    let coding = Codec::Lattice { step: 4.0 }.alone();
    let written = bytes(|i| i as f32 + 1.0);
    let decoded = with(&written, 1, 0.0);
    assert!(checked(coding, false, &written, &decoded).is_some());
    assert!(checked(coding, true, &written, &decoded).is_none());
    assert!(checked(coding, true, &written, &with(&written, 1, 2.2)).is_some());
}

#[test]
fn a_value_beyond_the_limits_is_found() {
    let coding = Codec::Lattice { step: 4.0 }.alone();
    let written = bytes(|i| (i % 7) as f32 - 3.0);
    let compare = |decoded: &[u8]| {
        let mut check = Check::new(spec(coding), None, None).within(Some(Limits { least: -3.0, most: 3.0 }));
        check.add_all(&written, decoded).unwrap();
        check.finish().is_some()
    };
    assert!(compare(&with(&written, 3, 1.0)));
    assert!(!compare(&with(&written, 6, 3.1)) && !compare(&with(&written, N - 1, -3.1)));
}

#[test]
fn second_moments_that_become_zero_and_ratios_that_grow_are_found() {
    let v = bytes(|i| 1e-8 * (1 + i % 7) as f32);
    let log = Codec::Log { unit: 1 << 16 }.alone();
    assert!(checked(log, false, &v, &v).is_some());
    for wrong in [0.0, -1e-8, 1e-6] {
        assert!(checked(log, false, &v, &with(&v, N - 1, wrong)).is_none(), "{wrong}");
    }
    let m = bytes(|i| 1e-5 * (i % 5) as f32);
    let coding = Codec::Moment { second: 0, step: 0.015_625, rule: Rule::Root }.alone();
    let compare = |decoded: &[u8]| {
        let mut check = Check::new(spec(coding), None, Some((&v, &v)));
        check.add_all(&m, decoded).unwrap();
        check.finish()
    };
    let share = 0.015_625 * Rule::Root.steps();
    assert!(compare(&m).unwrap().error <= share, "the share of a step, unless an error is larger");
    assert!(compare(&with(&m, N - 1, 1e-3)).is_none());
    assert!(compare(&with(&m, N - 4, -1e-5)).is_none(), "another sign");
    assert!(Check::new(spec(coding), None, None).add_all(&m, &m).is_err(), "no second moment");
}

/// Steps of rows are their own, so no step of the coding bounds the error.
#[test]
fn an_error_beyond_the_stated_one_fails() {
    let written = bytes(|i| i as f32);
    let decoded = with(&written, N - 1, (N - 1) as f32 + 0.5);
    for (stated, is_sound) in [(0.5, true), (0.25, false)] {
        let mut check = Check::new(spec(Codec::Rows { step: 0.015_625 }.alone()), None, None);
        check.states(stated);
        check.add_all(&written, &decoded).unwrap();
        assert_eq!(check.finish().is_some(), is_sound);
    }
}

/// The check of blocks while they are quantized sees what one of the whole tile sees.
#[test]
fn a_tile_that_is_quantized_in_blocks_is_compared_whole() {
    let data = Arc::new(bytes(|i| (i as f32 * 0.37).sin()));
    let spec = spec(Codec::Lattice { step: 0.015625 }.alone());
    let mut check = Check::new(spec, None, None);
    let (_, decoded) = quantize(spec, &data, Around::default(), Some(&mut check)).unwrap();
    let (found, whole) = (check.finish().unwrap(), checked(spec.coding, false, &data, &decoded).unwrap());
    assert_eq!((found.hash, found.error, found.differs), (whole.hash, whole.error, whole.differs));
    assert_eq!(found.hash, xxh3_64(&decoded));
    assert!(found.error > 0.007 && found.error <= 0.0078125, "{}", found.error);
}
