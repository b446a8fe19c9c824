//! The suite over every entry of the table, tiles as objects hold them, and each system's promise about its error.

use std::io;
use std::sync::Arc;

use super::super::registry::{FAMILIES, SystemId};
use super::super::tile::{self, Before, Decoded};
use super::super::*;
use codec::Dtype;

/// Elements of a tile, which cuts rows of 48.
const TILE: usize = 1000;
const TYPES: [Dtype; 3] = [Dtype::F32, Dtype::Bf16, Dtype::F16];

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    fn normal(&mut self) -> f32 {
        (0..12).map(|_| self.next() as f32 / (1u64 << 31) as f32).sum::<f32>() - 6.0
    }
}

/// A tensor in memory, with the previous state.
struct Held {
    name: String,
    shape: (u64, u64),
    dtype: Dtype,
    bytes: Vec<u8>,
    before: Option<Decoded>,
}

/// Bytes and bins of a tile's previous state.
type Was = (Arc<Vec<u8>>, Option<Vec<u16>>);

impl Held {
    fn new(name: &str, dtype: Dtype, shape: (u64, u64), values: &[f32]) -> Held {
        let mut bytes = Vec::new();
        for value in values {
            match dtype {
                Dtype::F16 => bytes.extend(half::f16::from_f32(*value).to_le_bytes()),
                Dtype::Bf16 => bytes.extend(half::bf16::from_f32(*value).to_le_bytes()),
                _ => bytes.extend(value.to_le_bytes()),
            }
        }
        Held { name: name.into(), shape, dtype, bytes, before: None }
    }

    fn before(&self, number: usize) -> Option<Was> {
        let before = self.before.as_ref()?;
        let bytes = Arc::new(before.bytes.chunks(TILE * self.dtype.size()).nth(number)?.to_vec());
        Some((bytes, before.bins.as_ref().and_then(|bins| Some(bins.chunks(TILE).nth(number)?.to_vec()))))
    }
}

impl Tensor for Held {
    fn name(&self) -> &str {
        &self.name
    }

    fn rows(&self) -> (u64, u64) {
        self.shape
    }

    fn tiles(&self) -> usize {
        (self.bytes.len() / self.dtype.size()).div_ceil(TILE)
    }

    fn tile(&self, number: usize) -> io::Result<Tile> {
        let bytes = Arc::new(self.bytes.chunks(TILE * self.dtype.size()).nth(number).unwrap_or_default().to_vec());
        let before = self.before(number);
        let before = before.as_ref().map(|(bytes, bins)| Before { bytes, bins: bins.as_deref() });
        Ok(Tile {
            first: (number * TILE) as u64,
            values: tile::widen(self.dtype, &bytes).unwrap(),
            previous: before.map(|before| before.state(self.dtype).unwrap()),
            gradient: None,
        })
    }
}

/// Payloads of a tensor's tiles, and their decoded bytes; `None` if it stays lossless.
type Encoded = Option<(Vec<Vec<u8>>, Decoded)>;

/// Fits and encodes a checkpoint; decodes each tile and compares.
fn checkpoint(id: SystemId, tensors: &[Held], position: u32) -> Vec<Encoded> {
    let system = id.system();
    let all: Vec<&dyn Tensor> = tensors.iter().map(|tensor| tensor as &dyn Tensor).collect();
    let fits = system.fit(&all, position).unwrap();
    let again = format!("{:?}", system.fit(&all, position).unwrap());
    assert_eq!(format!("{fits:?}"), again, "{id} looks twice and sees something else");
    assert_eq!(fits.len(), tensors.len());
    tensors.iter().zip(&fits).map(|(tensor, fit)| encode(id, tensor, fit.as_ref())).collect()
}

fn encode(id: SystemId, tensor: &Held, fit: &dyn Fit) -> Encoded {
    let (mut payloads, mut all) = (Vec::new(), Decoded { bytes: Vec::new(), bins: None });
    for number in 0..tensor.tiles() {
        let tile = tensor.tile(number).unwrap();
        let (mut payload, mut again) = (Vec::new(), Vec::new());
        let decoded = tile::encode(id, fit, tensor.dtype, &tile, &mut payload)?;
        let twice = tile::encode(id, fit, tensor.dtype, &tile, &mut again);
        assert_eq!(Some(&decoded), twice.as_ref(), "{id}");
        assert_eq!(payload, again, "{id} writes the same");
        assert_eq!(decode(tensor, number, &payload).as_ref(), Ok(&decoded), "{id} {} {number}", tensor.name);
        payloads.push(payload);
        all.bytes.extend(&decoded.bytes);
        if let Some(bins) = decoded.bins {
            all.bins.get_or_insert_default().extend(bins);
        }
    }
    assert_eq!(all.bytes.len(), tensor.bytes.len());
    Some((payloads, all))
}

fn decode(tensor: &Held, number: usize, payload: &[u8]) -> Result<Decoded, Corrupt> {
    let before = tensor.before(number);
    let before = before.as_ref().map(|(bytes, bins)| Before { bytes, bins: bins.as_deref() });
    let len = tensor.bytes.chunks(TILE * tensor.dtype.size()).nth(number).unwrap_or_default().len();
    tile::decode(tensor.dtype, payload, before, len)
}

/// A tensor in training: name, rows and width, type, values.
type Trained = (String, (u64, u64), Dtype, Vec<f32>);

/// A model with every difficult shape: rows cut by tiles, vectors, columns, no elements, one element, zeros, and a
/// tensor that never moves.
fn model(dtype: Dtype, random: &mut Random) -> Vec<Trained> {
    let shapes = [("w", 64, 48), ("b", 1, 2300), ("column", 1500, 1), ("none", 0, 48), ("one", 1, 1), ("same", 20, 20)];
    let mut of = |(name, rows, width): (&str, u64, u64)| {
        let values = (0..rows * width).map(|_| 0.05 * random.normal()).collect();
        (name.to_string(), (rows, width), dtype, values)
    };
    let mut model: Vec<_> = shapes.into_iter().map(&mut of).collect();
    model.push(("zeros".into(), (30, 40), dtype, vec![0.0; 1200]));
    model
}

fn train(model: &mut [Trained], random: &mut Random) {
    for (name, _, _, values) in model {
        if !["same", "zeros"].contains(&name.as_str()) {
            values.iter_mut().for_each(|value| *value += 2e-3 * random.normal());
        }
    }
}

/// Calls `each` with every checkpoint of a series: the tensors with their previous states, and the results.
fn series(id: SystemId, dtype: Dtype, count: u32, mut each: impl FnMut(u32, &[Held], &[Encoded])) {
    let mut random = Random(u64::from(id.family()) << 8 | dtype as u64);
    let mut model = model(dtype, &mut random);
    let mut before: Vec<Option<Decoded>> = vec![None; model.len()];
    for position in 0..count {
        let held = |((name, shape, dtype, values), before): (&Trained, &Option<Decoded>)| Held {
            before: before.clone(),
            ..Held::new(name, *dtype, *shape, values)
        };
        let tensors: Vec<Held> = model.iter().zip(&before).map(held).collect();
        let encoded = checkpoint(id, &tensors, position);
        each(position, &tensors, &encoded);
        let lossless = |tensor: &Held| Decoded { bytes: tensor.bytes.clone(), bins: None };
        let state = |(encoded, tensor): (Encoded, &Held)| Some(encoded.map_or_else(|| lossless(tensor), |done| done.1));
        before = encoded.into_iter().zip(&tensors).map(state).collect();
        train(&mut model, &mut random);
    }
}

fn values(dtype: Dtype, bytes: &[u8]) -> Vec<f32> {
    tile::widen(dtype, &Arc::new(bytes.to_vec())).unwrap().to_vec()
}

#[test]
fn a_series_decodes_to_the_states_it_was_encoded_with() {
    for id in SystemId::usual() {
        for dtype in TYPES {
            let mut lossy = 0;
            series(id, dtype, 4, |position, tensors, encoded| {
                let first_is_whole = position == 0 && !id.system().stands_alone();
                for (tensor, encoded) in tensors.iter().zip(encoded) {
                    assert!(encoded.is_none() || !first_is_whole || tensor.bytes.is_empty(), "{id}: {}", tensor.name);
                    assert!(encoded.is_some() || position == 0, "{id}: {} is not for it", tensor.name);
                    lossy += usize::from(encoded.as_ref().is_some_and(|done| done.1.bytes != tensor.bytes));
                }
            });
            assert!(lossy > 0, "{id} loses nothing of {dtype:?}: is it lossless?");
        }
    }
}

#[test]
fn every_system_conforms() {
    SystemId::usual().for_each(|id| super::conforms(id.system().as_ref()));
}

#[test]
fn each_systems_error_is_what_it_says() {
    for id in SystemId::usual() {
        for dtype in TYPES {
            series(id, dtype, 5, |position, tensors, encoded| {
                let changed: usize = tensors.iter().zip(encoded).map(|both| errors(id, both.0, both.1.as_ref())).sum();
                let total: usize = tensors.iter().map(|tensor| tensor.bytes.len() / dtype.size()).sum();
                let name = id.to_string();
                if let (Some(percent), true) = (name.strip_prefix("topn-"), position > 0) {
                    let n = (total * percent.parse::<usize>().unwrap()).div_ceil(100);
                    assert_eq!(changed, n, "{id}: so many take their new values");
                }
                if let (Some(percent), true) = (name.strip_prefix("scar-"), position > 0) {
                    let percent = percent.trim_start_matches("priority-").parse::<usize>().unwrap();
                    assert!(changed <= (total * percent).div_ceil(100) + 1, "{id}: {changed} of {total}");
                }
            });
        }
    }
}

/// Checks a tensor against its system's error model; returns the number of changed elements.
fn errors(id: SystemId, tensor: &Held, encoded: Option<&(Vec<Vec<u8>>, Decoded)>) -> usize {
    let (Some((_, decoded)), Some(before)) = (encoded, &tensor.before) else { return 0 };
    let dtype = tensor.dtype;
    let (new, old) = (values(dtype, &tensor.bytes), values(dtype, &before.bytes));
    let state = values(dtype, &decoded.bytes);
    let word = FAMILIES.iter().find(|family| family.id == id.family()).unwrap().word;
    let (mut moved, mut least_moved, mut most_left) = (0, f32::MAX, 0f32);
    for ((new, old), state) in new.iter().zip(&old).zip(&state) {
        assert!(state.is_finite(), "{id}");
        let (difference, error) = ((new - old).abs(), (new - state).abs());
        let stays = state.to_bits() == old.to_bits();
        moved += usize::from(!stays);
        match word {
            // A bucket is an octave: no error is more than half of the difference, apart from the roundings of the
            // type.
            "lc" | "lc-layer" => {
                let digits = [1e6, 1e2, 1e3][TYPES.iter().position(|own| *own == dtype).unwrap()];
                let rounding = new.abs().max(old.abs()) / digits;
                assert!(stays || error <= 0.5 * difference + rounding, "{id}: {old} to {new} is {state}");
            }
            "scar" | "scar-priority" | "topn" => {
                assert!(stays || error == 0.0, "{id}: {old} to {new} is {state}");
                if error > 0.0 {
                    most_left = most_left.max(difference);
                } else if !stays {
                    least_moved = least_moved.min(difference);
                }
            }
            _ => {}
        }
    }
    assert!(word != "topn" || moved == 0 || most_left <= least_moved, "{id}: {most_left} stays, {least_moved} goes");
    moved
}

#[test]
fn lc_keeps_as_many_buckets_as_its_bits_say_and_the_largest() {
    for bits in 1..=4u8 {
        let id: SystemId = format!("lc-{bits}").parse().unwrap();
        series(id, Dtype::F32, 3, |position, tensors, encoded| {
            let mut buckets = std::collections::BTreeSet::new();
            let (mut least_kept, mut most_left) = (i32::MAX, i32::MIN);
            for (tensor, encoded) in tensors.iter().zip(encoded).filter(|_| position > 0) {
                let before = values(Dtype::F32, &tensor.before.as_ref().unwrap().bytes);
                let state = values(Dtype::F32, &encoded.as_ref().unwrap().1.bytes);
                for ((new, old), state) in values(Dtype::F32, &tensor.bytes).iter().zip(&before).zip(&state) {
                    let bucket = (new - old).to_bits() >> 23;
                    match state.to_bits() == old.to_bits() {
                        false => {
                            buckets.insert(bucket);
                            least_kept = least_kept.min((bucket & 255) as i32);
                        }
                        true if new != old => most_left = most_left.max((bucket & 255) as i32),
                        true => {}
                    }
                }
            }
            assert!(buckets.len() < 1 << bits, "{buckets:?}");
            assert!(position == 0 || buckets.len() == (1 << bits) - 1 && most_left <= least_kept, "{buckets:?}");
        });
    }
}

#[test]
fn lc_has_numbers_for_all_buckets_there_can_be() {
    // Every exponent of both signs, and zeros of both signs.
    let magnitudes = (0..255u32).map(|exponent| f32::from_bits(exponent << 23 | 0x12_3456));
    let new: Vec<f32> = magnitudes.flat_map(|value| [value, -value, value, -value]).chain([0.0, -0.0]).collect();
    let mut tensor = Held::new("w", Dtype::F32, (1, new.len() as u64), &new);
    let zeros = vec![0.0f32.to_le_bytes(); new.len()].concat();
    tensor.before = Some(Decoded { bytes: zeros, bins: None });
    let encoded = checkpoint("lc".parse().unwrap(), &[tensor], 1);
    let (_, decoded) = encoded[0].as_ref().unwrap();
    assert_eq!(values(Dtype::F32, &decoded.bytes)[..1020], new[..1020], "each is its bucket's only value");
    assert_eq!(values(Dtype::F32, &decoded.bytes)[1020..], [0.0, 0.0]);
}

#[test]
fn scar_by_turns_has_saved_all_after_all_turns() {
    let id: SystemId = "scar-10".parse().unwrap();
    let mut saved: Vec<Vec<bool>> = Vec::new();
    series(id, Dtype::F32, 11, |position, tensors, encoded| {
        saved.resize(tensors.len(), Vec::new());
        for ((tensor, encoded), saved) in tensors.iter().zip(encoded).zip(&mut saved).filter(|_| position > 0) {
            let new = values(Dtype::F32, &tensor.bytes);
            let state = values(Dtype::F32, &encoded.as_ref().unwrap().1.bytes);
            saved.resize(new.len(), false);
            saved.iter_mut().zip(new.iter().zip(&state)).for_each(|(saved, (new, state))| *saved |= new == state);
        }
    });
    assert!(saved.iter().flatten().all(|saved| *saved));
}

#[test]
fn of_equal_changes_topn_takes_the_first() {
    let mut tensors =
        [Held::new("a", Dtype::F32, (1, 2500), &[1.0; 2500]), Held::new("b", Dtype::F32, (50, 10), &[1.0; 500])];
    for tensor in &mut tensors {
        tensor.before = Some(Decoded { bytes: vec![0; tensor.bytes.len()], bins: None });
    }
    let encoded = checkpoint("topn-50".parse().unwrap(), &tensors, 1);
    let taken: Vec<f32> = encoded.iter().flat_map(|done| values(Dtype::F32, &done.as_ref().unwrap().1.bytes)).collect();
    assert_eq!(taken.iter().sum::<f32>(), 1500.0);
    assert!(taken[..1500].iter().all(|value| *value == 1.0));
    // All of them, and no more than exist.
    let encoded = checkpoint("topn-100".parse().unwrap(), &tensors, 1);
    assert!(encoded.iter().zip(&tensors).all(|(done, tensor)| done.as_ref().unwrap().1.bytes == tensor.bytes));
}

#[test]
fn what_is_not_finite_and_what_f32_does_not_hold_stays_lossless() {
    for id in SystemId::usual() {
        for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut values = vec![0.5; 1200];
            values[1100] = odd;
            for before in [vec![0.25; 1200], values.clone()] {
                let mut tensors = [
                    Held::new("w", Dtype::F32, (30, 40), &values),
                    Held::new("sound", Dtype::F32, (30, 40), &[0.5; 1200]),
                    Held::new("since", Dtype::F32, (30, 40), &[0.5; 1200]),
                ];
                tensors[0].before =
                    Some(Decoded { bytes: Held::new("", Dtype::F32, (1, 1), &before).bytes, bins: None });
                tensors[1].before = Some(Decoded { bytes: tensors[1].bytes.clone(), bins: None });
                tensors[2].before = Some(Decoded { bytes: tensors[0].bytes.clone(), bins: None });
                let encoded = checkpoint(id, &tensors, 1);
                assert!(encoded[0].is_none(), "{id}");
                assert!(encoded[1].is_some(), "{id}: one tensor does not spoil the others");
            }
        }
        // Differences that are not finite, of finite values.
        let mut tensor = Held::new("w", Dtype::F32, (1, 2), &[f32::MAX, 1.0]);
        let before = Held::new("", Dtype::F32, (1, 2), &[f32::MIN, 1.0]);
        tensor.before = Some(Decoded { bytes: before.bytes, bins: None });
        if let Some((_, decoded)) = &checkpoint(id, &[tensor], 1)[0] {
            assert!(values(Dtype::F32, &decoded.bytes).iter().all(|value| value.is_finite()), "{id}");
        }
        let tile = Tile { values: vec![1.0].into(), ..Tile::default() };
        let sound: [&dyn Tensor; 1] = [&Held::new("w", Dtype::F32, (1, 1), &[1.0])];
        let fit = id.system().fit(&sound, 1).unwrap().remove(0);
        for dtype in [Dtype::F64, Dtype::I64, Dtype::U8, Dtype::F8E4m3] {
            assert!(!tile::is_for(dtype));
            assert!(tile::encode(id, fit.as_ref(), dtype, &tile, &mut Vec::new()).is_none());
            tile::decode(dtype, &[id.family()], None, 8).unwrap_err();
        }
    }
}

#[test]
fn without_its_state_before_a_difference_is_corrupt() {
    for id in SystemId::usual() {
        series(id, Dtype::F32, 2, |position, tensors, encoded| {
            for (tensor, encoded) in
                tensors.iter().zip(encoded).filter(|_| position == 1 && !id.system().stands_alone())
            {
                for (number, payload) in encoded.iter().flat_map(|done| &done.0).enumerate() {
                    let len = tensor.tile(number).unwrap().values.len() * 4;
                    tile::decode(Dtype::F32, payload, None, len).unwrap_err();
                    // Another shape than before.
                    let other = Arc::new(vec![0; len + 4]);
                    let before = Before { bytes: &other, bins: None };
                    tile::decode(Dtype::F32, payload, Some(before), len).unwrap_err();
                    assert!(tile::decode(Dtype::F32, payload, Some(before), len + 2).is_err());
                }
            }
        });
    }
}

#[test]
fn hostile_payloads_are_corrupt_or_decode_to_something_of_the_right_length() {
    for id in SystemId::usual() {
        let mut random = Random(77);
        series(id, Dtype::F32, 2, |position, tensors, encoded| {
            for (tensor, encoded) in tensors.iter().zip(encoded).filter(|_| position == 1) {
                for (number, payload) in encoded.iter().flat_map(|done| &done.0).enumerate() {
                    let check = |payload: &[u8]| {
                        let len = tensor.tile(number).unwrap().values.len() * 4;
                        if let Ok(decoded) = decode(tensor, number, payload) {
                            assert_eq!(decoded.bytes.len(), len, "{id}");
                        }
                    };
                    for len in (0..payload.len()).step_by(1 + payload.len() / 100) {
                        check(&payload[..len]);
                    }
                    for _ in 0..150 {
                        let mut bad = payload.clone();
                        for _ in 0..1 + random.next() % 3 {
                            // Fields are at the beginning.
                            let end = if random.next().is_multiple_of(2) { bad.len().min(40) } else { bad.len() };
                            let at = 1 + random.next() as usize % (end - 1).max(1);
                            if let Some(byte) = bad.get_mut(at) {
                                *byte = random.next() as u8;
                            }
                        }
                        check(&bad);
                    }
                    let noise: Vec<u8> = (0..64).map(|_| random.next() as u8).collect();
                    check(&[&[id.family()], &noise[..]].concat());
                    check(&[&[id.family()], &[0xff; 64][..]].concat());
                }
            }
        });
    }
}

#[test]
fn a_state_as_it_is_is_the_same_with_and_without_a_parent() {
    let mut random = Random(5);
    for dtype in TYPES {
        let tensor = Held::new("w", dtype, (1, 900), &(0..900).map(|_| random.normal()).collect::<Vec<_>>());
        let parent = Held::new("w", dtype, (1, 900), &(0..900).map(|_| random.normal()).collect::<Vec<_>>());
        let (own, parent) = (Arc::new(tensor.bytes.clone()), Arc::new(parent.bytes));
        for bins in [None, Some((0..900).map(|_| random.next() as u16).collect::<Vec<u16>>())] {
            for with in [None, Some(&parent)] {
                let state = Before { bytes: &own, bins: bins.as_deref() };
                let mut payload = Vec::new();
                tile::encode_as_it_is(dtype, state, with.map(|bytes| bytes.as_slice()), &mut payload);
                let before = with.map(|bytes| Before { bytes, bins: None });
                let decoded = tile::decode(dtype, &payload, before, tensor.bytes.len()).unwrap();
                assert_eq!(decoded, Decoded { bytes: tensor.bytes.clone(), bins: bins.clone() });
                for len in 0..payload.len() {
                    // A state that lacks only the bins is one without bins.
                    let cut = tile::decode(dtype, &payload[..len], before, tensor.bytes.len());
                    assert!(cut.is_err() || bins.is_some() && cut.is_ok_and(|cut| cut.bins.is_none()));
                }
            }
        }
    }
}
