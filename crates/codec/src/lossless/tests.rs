use super::*;
use proptest::prelude::*;

fn round_trip(dtype: Dtype, data: &[u8], parent: Option<&[u8]>) -> Vec<u8> {
    let mut payload = Vec::new();
    encode(dtype, data, parent, &mut payload);
    let mut out = vec![0xaa; data.len()];
    decode(dtype, &payload, parent, &mut out).unwrap();
    assert_eq!(out, data);
    payload
}

/// Bit patterns of a float type that break careless code, and their neighbours.
fn awkward() -> Vec<u8> {
    let f32s = [0.0f32, -0.0, 1.0, -1.0, f32::MIN_POSITIVE, 1e-45, f32::MAX, f32::INFINITY, f32::NEG_INFINITY];
    let mut bits: Vec<u32> = f32s.iter().map(|f| f.to_bits()).collect();
    bits.extend([0x7fc0_0000, 0xffc0_0000, 0x7f80_0001, 0xff80_dead, 0x7fff_ffff, 0xffff_ffff]);
    bits.iter().flat_map(|b| [b.wrapping_sub(1), *b, b.wrapping_add(1)]).flat_map(u32::to_le_bytes).collect()
}

#[test]
fn awkward_bits_survive_every_type() {
    let data = awkward();
    let mut parent = data.clone();
    parent.rotate_left(12);
    for dtype in Dtype::ALL {
        for length in [0, 1, 3, 16, 48, data.len()] {
            let (data, parent) = (&data[..length], &parent[..length]);
            round_trip(dtype, data, None);
            round_trip(dtype, data, Some(parent));
            round_trip(dtype, data, Some(data));
        }
    }
}

#[test]
fn small_updates_cost_little_and_useless_parents_nothing() {
    let n = 20_000;
    let value = |i: usize| ((i * 7919 % 10_007) as f32 / 5000.0 - 1.0) * 0.1;
    let old: Vec<u8> = (0..n).flat_map(|i| value(i).to_le_bytes()).collect();
    let new: Vec<u8> = (0..n).flat_map(|i| (value(i) * (1.0 + (i % 13) as f32 * 1e-6)).to_le_bytes()).collect();
    let alone = round_trip(Dtype::F32, &new, None);
    let delta = round_trip(Dtype::F32, &new, Some(&old));
    assert!(delta.len() * 2 < alone.len(), "{} {}", delta.len(), alone.len());
    let noise: Vec<u8> = (0..4 * n as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    assert!(round_trip(Dtype::F32, &new, Some(&noise)).len() <= alone.len());
    assert!(round_trip(Dtype::F32, &new, Some(&new)).len() < 20);
}

#[test]
fn bytes_that_repeat_are_found_in_the_parent_wherever_they_are() {
    let line = |at: u32| format!("{{\"step\": {at}, \"loss\": {}}}\n", at.wrapping_mul(2_654_435_761));
    let text: Vec<u8> = (0..5000).flat_map(|at| line(at).into_bytes()).collect();
    let mut moved = b"a line that is new\n".to_vec();
    moved.extend_from_slice(&text[..text.len() - moved.len()]);
    let alone = round_trip(Dtype::U8, &moved, None);
    let delta = round_trip(Dtype::U8, &moved, Some(&text));
    assert!(alone[0] == 3 && delta[0] == 4);
    assert!(alone.len() < moved.len() / 2 && delta.len() < 100, "{} {}", alone.len(), delta.len());
    assert!(estimate(Dtype::U8, &moved, Some(&text)) < 0.1 * estimate(Dtype::U8, &moved, None));
    // A frame is of no use without its parent, in wider words, or for another length.
    let mut out = vec![0; moved.len()];
    assert!(decode(Dtype::U8, &delta, None, &mut out).is_err());
    let even = out.len() / 2 * 2;
    assert!(decode(Dtype::U16, &alone, None, &mut out[..even]).is_err());
    assert!(decode(Dtype::U8, &alone, None, &mut out[1..]).is_err());
    assert!(decode(Dtype::U8, &[3], None, &mut out).is_err());
}

#[test]
fn parents_of_another_length_are_not_used() {
    let data = awkward();
    let mut payload = Vec::new();
    encode(Dtype::F32, &data, Some(&data[4..]), &mut payload);
    let mut out = vec![0; data.len()];
    decode(Dtype::F32, &payload, None, &mut out).unwrap();
    assert_eq!(out, data);
    payload.clear();
    encode(Dtype::F32, &data, Some(&data), &mut payload);
    assert!(decode(Dtype::F32, &payload, None, &mut out).is_err());
    assert!(decode(Dtype::F32, &payload, Some(&data[4..]), &mut out).is_err());
}

proptest! {
    #[test]
    fn any_bytes_come_back(
        dtype in prop::sample::select(Dtype::ALL.as_slice()),
        pairs in prop::collection::vec((any::<u8>(), any::<u8>()), 0..3000),
        narrow: bool,
    ) {
        let mask = if narrow { 3 } else { 0xff };
        let data: Vec<u8> = pairs.iter().map(|p| p.0 & mask).collect();
        let parent: Vec<u8> = pairs.iter().map(|p| p.1 & mask).collect();
        round_trip(dtype, &data, None);
        round_trip(dtype, &data, Some(&parent));
    }

    #[test]
    fn damaged_payloads_never_panic(
        dtype in prop::sample::select(Dtype::ALL.as_slice()),
        data in prop::collection::vec(0..9u8, 0..3000),
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        cut in any::<prop::sample::Index>(),
        length in 0..4000usize,
    ) {
        let mut payload = Vec::new();
        encode(dtype, &data, None, &mut payload);
        let _ = decode(dtype, &payload, None, &mut vec![0; length]);
        if !payload.is_empty() {
            let _ = decode(dtype, &payload[..cut.index(payload.len())], Some(&data), &mut vec![0; data.len()]);
            for (at, byte) in flips {
                let at = at.index(payload.len());
                payload[at] ^= byte;
            }
            let _ = decode(dtype, &payload, Some(&data), &mut vec![0; data.len()]);
        }
    }
}

#[test]
fn all_levels_split_and_join_alike() {
    fn check<T: Word>(data: &[u8], order: Order)
    where
        T::Bytes: PartialEq + std::fmt::Debug,
    {
        let elements = T::elements(data);
        let mut parent = elements.to_vec();
        parent.rotate_left(3);
        for parent in [None, Some(parent.as_slice())] {
            let mut expected = None;
            for level in Level::available() {
                let mut split = vec![0; elements.len() * T::BYTES];
                planes::split::<T>(level, elements, parent, order, &mut split);
                assert_eq!(expected.get_or_insert_with(|| split.clone()), &split);
                let slices: Vec<&[u8]> = split.chunks(elements.len()).collect();
                let mut joined = parent.unwrap_or(elements).to_vec();
                joined.rotate_left(1);
                planes::join::<T>(level, &slices, parent, order, &mut joined);
                assert_eq!(joined, elements);
            }
        }
    }
    let data = awkward().repeat(30);
    for order in [Order::Integer, Order::Float] {
        check::<u8>(&data, order);
        check::<u16>(&data, order);
        check::<u32>(&data, order);
        check::<u64>(&data[..data.len() / 8 * 8], order);
    }
}

/// A tile of weights, before and after an update of one size for all of them.
fn updated(n: usize, scale: f32) -> (Vec<u8>, Vec<u8>) {
    let mut seed = 1u64;
    let mut uniform = || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    let mut normal = || (0..6).map(|_| uniform()).sum::<f32>();
    let old: Vec<f32> = (0..n).map(|_| 0.05 * normal()).collect();
    let new: Vec<f32> = old.iter().map(|w| w + scale * normal()).collect();
    let bytes = |values: Vec<f32>| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    (bytes(old), bytes(new))
}

#[test]
fn updates_of_one_size_are_cheaper_by_the_parents_exponent() {
    let (old, new) = updated(100_000, 1e-4);
    let payload = round_trip(Dtype::F32, &new, Some(&old));
    assert_eq!(payload[0], SECTIONS);
    let mut planes = vec![DIFFERENCE];
    for plane in split::<u32>(&new, Some(&old), Order::Float).chunks(100_000) {
        varint::put_bytes(&mut planes, |out| symbols::encode(plane, out));
    }
    assert!(payload.len() as f64 <= 0.99 * planes.len() as f64, "{} {}", payload.len(), planes.len());
}

#[test]
fn sections_give_back_any_bits_of_every_narrow_float() {
    let awkward = awkward();
    let mut parent = awkward.clone();
    parent.rotate_left(16);
    for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
        for (data, parent) in [(&awkward, &parent), (&parent, &awkward), (&awkward, &awkward)] {
            let mut payload = Vec::new();
            assert!(sections::encode(dtype, data, parent, &mut payload));
            let mut out = vec![0xaa; data.len()];
            sections::decode(dtype, &payload, parent, &mut out).unwrap();
            assert_eq!(&out, data);
        }
    }
}

proptest! {
    #[test]
    fn damaged_sections_are_errors_or_other_values(
        bytes in prop::collection::vec(any::<u8>(), 64..256),
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        cut in any::<prop::sample::Index>(),
    ) {
        let data = &bytes[..bytes.len() / 8 * 4];
        let parent = &bytes[bytes.len() - data.len()..];
        for dtype in [Dtype::F32, Dtype::Bf16] {
            let mut payload = vec![SECTIONS];
            prop_assert!(sections::encode(dtype, data, parent, &mut payload));
            let mut out = vec![0; data.len()];
            decode(dtype, &payload, Some(parent), &mut out).unwrap();
            prop_assert_eq!(&out, data);
            for (at, flip) in &flips {
                let at = at.index(payload.len());
                payload[at] ^= flip;
            }
            let _ = decode(dtype, &payload, Some(parent), &mut out);
            payload.truncate(cut.index(payload.len()));
            let _ = decode(dtype, &payload, Some(parent), &mut out);
            prop_assert!(decode(dtype, &payload, None, &mut out).is_err() || payload.first() != Some(&SECTIONS));
        }
    }
}

/// Released objects have such payloads: if this fails, they cannot be read any more.
#[test]
fn sections_are_those_of_the_format() {
    let (old, new) = updated(3000, 1e-4);
    let mut payload = Vec::new();
    assert!(sections::encode(Dtype::F32, &new, &old, &mut payload));
    let hash = xxhash_rust::xxh3::xxh3_64(&payload);
    assert_eq!((payload.len(), hash), (6826, 1_104_489_604_823_363_582));
}
