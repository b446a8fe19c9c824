use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::tile::{Codec, Coding};
use codec::moment::Rule;
use codec::{Dtype, TILE_BYTES};
use formats::Role;

fn id() -> impl Strategy<Value = Id> {
    any::<[u8; 16]>().prop_map(|bytes| if bytes == [0; 16] { Id([1; 16]) } else { Id(bytes) })
}

prop_compose! {
    fn header()(
        id in id(),
        parent in proptest::option::of(self::id()),
        depth: u32,
        position: u32,
        flags in any::<[bool; 2]>(),
        numbers in any::<[u64; 5]>(),
        decoded_hash: u128,
        original in any::<[u8; 32]>(),
        modified_ns: i64,
    ) -> Header {
        Header {
            id,
            parent,
            depth,
            position,
            lossy: flags[0],
            ordered: flags[1],
            logical_len: numbers[0],
            decoded_hash,
            decoded_sample: numbers[3],
            source_sample: numbers[4],
            original,
            modified_ns,
            lineage: numbers[1],
            signature: numbers[2],
        }
    }
}

fn coding() -> impl Strategy<Value = Coding> {
    let step = (1u32..1 << 24, -40i32..40).prop_map(|(m, e)| f64::from(m) * 2f64.powi(e));
    let unit = (14u32..=20).prop_map(|unit| 1 << unit);
    let codec = prop_oneof![
        Just(Codec::Lossless),
        step.clone().prop_map(|step| Codec::Lattice { step }),
        step.clone().prop_map(|step| Codec::Rows { step }),
        step.clone().prop_map(|step| Codec::Sized { step, rule: Rule::Norm }),
        step.prop_map(|step| Codec::Sized { step, rule: Rule::Sign }),
        unit.prop_map(|unit| Codec::Log { unit }),
        Just(Codec::External),
    ];
    (codec, any::<Option<u32>>())
        .prop_map(|(codec, parent)| Coding { codec, parent: parent.filter(|_| codec.has_differences()) })
}

/// End of the payloads of the objects of these indexes.
const PAYLOAD_END: u64 = 1 << 40;

fn tiles(bytes: u64, seed: u64) -> Vec<Tile> {
    (0..tiles_of(bytes))
        .map(|at| {
            let mix = (seed ^ at).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let stored = (mix >> 42) as u32;
            let offset = mix % (PAYLOAD_END - u64::from(stored) + 1);
            Tile { offset, stored, payload_hash: mix.rotate_left(7) as u32, decoded_hash: !mix }
        })
        .collect()
}

prop_compose! {
    /// A tensor, and the size of the gap before it.
    fn tensor()(
        path in ".{0,12}",
        dtype in 0..Dtype::ALL.len(),
        role in 0..Role::ALL.len(),
        shape in vec(any::<u64>(), 0..5),
        gap in 0u64..3000,
        len in prop_oneof![0u64..5000, 0..3 * TILE_BYTES as u64],
        coding in coding(),
        bound in 0.0..1e9,
        seed: u64,
    ) -> (u64, TensorEntry) {
        let dtype = Dtype::ALL[dtype];
        let fits = dtype.is_lattice_float() && !(coding.is_external() && dtype == Dtype::F64);
        let coding = if fits || !coding.is_lossy() { coding } else { Coding::LOSSLESS };
        let role = Role::ALL[role];
        let len = len - len % dtype.size() as u64;
        let factors = coding.has_factors().then(|| tiles(1, !seed)[0]);
        // Factors are only accepted for existing elements.
        let shape = if factors.is_some() { vec![len / dtype.size() as u64] } else { shape };
        let tiles = tiles(len, seed);
        let bound = if coding.is_lossy() { bound } else { 0.0 };
        let max_abs_error = f64::from((bound / 3.0) as f32);
        (gap, TensorEntry { path, dtype, role, shape, extent: 0..len, coding, bound, max_abs_error, factors, tiles })
    }
}

/// A tensor with the tensors that need it beside them, in all ways that exist. Their numbers are relative until they
/// are `numbered`.
fn family(((gap, tensor), ways): ((u64, TensorEntry), u8)) -> Vec<(u64, TensorEntry)> {
    let of_lattice = tensor.dtype.is_lattice_float();
    let mut family = vec![(gap, tensor.clone())];
    let moment = |rule| Codec::Moment { second: 1, step: 0.5, rule };
    let rule = [Rule::Root, Rule::Norm, Rule::Inward][usize::from(ways / 3 % 3)];
    let others = [moment(rule), Codec::Cast { of: 1 }].map(Codec::alone);
    for coding in others.into_iter().take(if of_lattice { usize::from(ways % 3) } else { 0 }) {
        family.push((gap / 2, TensorEntry { coding, bound: 1.5, factors: None, ..tensor.clone() }));
    }
    family
}

fn numbered(((gap, mut tensor), own): ((u64, TensorEntry), u32)) -> (u64, TensorEntry) {
    match &mut tensor.coding.codec {
        Codec::Moment { second, .. } => *second = own - 1,
        Codec::Cast { of } => *of = own - 1,
        _ => {}
    }
    (gap, tensor)
}

prop_compose! {
    /// An index and the length of its file.
    fn index()(
        tensors in vec((tensor(), any::<u8>()), 0..4),
        texts in any::<[String; 4]>(),
        generations: u32,
        error in 0f32..1e9,
        rest in 0u64..2 * TILE_BYTES as u64,
        seed: u64,
    ) -> (Index, u64) {
        let mut end = 0;
        let mut skeleton = rest;
        let tensors = tensors.into_iter().flat_map(family).zip(0..).map(numbered).map(|(gap, mut tensor)| {
            let len = tensor.extent.end;
            tensor.extent = end + gap..end + gap + len;
            end += gap + len;
            skeleton += gap;
            tensor
        });
        let tensors = tensors.collect();
        let [origin, profile, container, note] = texts;
        (Index { origin, profile, container, note, generations, error_updates: error.into(), tensors, skeleton: tiles(skeleton, seed) }, end + rest)
    }
}

/// The guarantees for readers of an index.
fn is_sound(index: &Index, len: u64) {
    let mut end = 0;
    let within = |tiles: &[Tile], bytes: u64| {
        assert_eq!(tiles.len() as u64, tiles_of(bytes));
        assert!(tiles.iter().all(|tile| tile.offset + u64::from(tile.stored) <= PAYLOAD_END));
    };
    for tensor in &index.tensors {
        assert!(end <= tensor.extent.start && tensor.extent.start <= tensor.extent.end && tensor.extent.end <= len);
        end = tensor.extent.end;
        within(&tensor.tiles, tensor.extent.end - tensor.extent.start);
        if let Some(step) = tensor.coding.step() {
            assert!(step > 0.0 && step.is_finite() && tensor.dtype.is_lattice_float());
        }
        if let Some(beside) = tensor.coding.companion() {
            let other = &index.tensors[beside as usize];
            assert!(other.coding.companion() != Some(beside) && other.coding.rank() < tensor.coding.rank());
            let elements = |t: &TensorEntry| (t.extent.end - t.extent.start) / t.dtype.size() as u64;
            assert_eq!(elements(tensor), elements(other));
        }
        assert_eq!(tensor.factors.is_some(), tensor.coding.has_factors());
    }
    within(
        &index.skeleton,
        gaps(index.tensors.iter().map(|t| t.extent.clone()), len).iter().map(|g| g.end - g.start).sum(),
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_header_comes_back_and_no_changed_one_does(header in header()) {
        let bytes = header.encode();
        prop_assert_eq!(Header::decode(&bytes), Ok(header));
        for at in 0..8 * HEADER_BYTES {
            let mut changed = bytes;
            changed[at / 8] ^= 1 << (at % 8);
            prop_assert!(Header::decode(&changed).is_err(), "bit {}", at);
        }
    }

    #[test]
    fn a_footer_comes_back_and_no_changed_one_does(numbers in any::<[u64; 4]>(), id in id()) {
        let [index_offset, index_stored, index_len, index_hash] = numbers;
        let footer = Footer { index_offset, index_stored, index_len, index_hash, id };
        let bytes = footer.encode();
        prop_assert_eq!(Footer::decode(&bytes), Ok(footer));
        for at in 0..8 * FOOTER_BYTES {
            let mut changed = bytes;
            changed[at / 8] ^= 1 << (at % 8);
            prop_assert!(Footer::decode(&changed).is_err(), "bit {}", at);
        }
    }

    #[test]
    fn an_index_comes_back((index, len) in index()) {
        let bytes = index.encode();
        is_sound(&index, len);
        prop_assert_eq!(Index::decode(&bytes, len, PAYLOAD_END), Ok(index));
    }

    /// The checksum is in the footer. Without it a reader must still never panic or accept an unsound index.
    #[test]
    fn a_changed_index_is_refused_or_sound((index, len) in index(), mask in 1u8..) {
        let bytes = index.encode();
        for at in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= mask;
            if let Ok(index) = Index::decode(&changed, len, PAYLOAD_END) {
                is_sound(&index, len);
            }
            prop_assert!(Index::decode(&bytes[..at], len, PAYLOAD_END).is_err());
        }
        let mut longer = bytes.clone();
        longer.push(0);
        prop_assert!(Index::decode(&longer, len, PAYLOAD_END).is_err());
        // With a shorter file, or with payloads that end earlier.
        if let Ok(index) = Index::decode(&bytes, len / 2, PAYLOAD_END) {
            is_sound(&index, len / 2);
        }
        let stored =
            index.tensors.iter().flat_map(|t| &t.tiles).chain(&index.skeleton).map(|t| t.offset + u64::from(t.stored));
        if let Some(end) = stored.max() {
            prop_assert!(end == 0 || Index::decode(&bytes, len, end - 1).is_err());
        }
    }
}

fn one_tensor() -> (Index, u64) {
    let tensor = TensorEntry {
        path: "w".into(),
        dtype: Dtype::F32,
        role: Role::Weight,
        shape: vec![10, 10],
        extent: 8..408,
        coding: Codec::Lattice { step: 0.5 }.alone(),
        bound: 0.25,
        max_abs_error: 0.125,
        factors: None,
        tiles: tiles(400, 1),
    };
    (Index { tensors: vec![tensor], skeleton: tiles(8, 2), ..Index::default() }, 408)
}

#[track_caller]
fn refused(change: impl FnOnce(&mut Index)) {
    let (mut index, len) = one_tensor();
    Index::decode(&index.encode(), len, PAYLOAD_END).unwrap();
    change(&mut index);
    Index::decode(&index.encode(), len, PAYLOAD_END).unwrap_err();
}

#[test]
fn what_lies_about_its_tensors_is_refused() {
    refused(|index| index.tensors[0].extent = 8..409);
    refused(|index| index.tensors[0].extent = u64::MAX - 399..u64::MAX);
    refused(|index| index.tensors[0].tiles[0].stored = 10 * TILE_BYTES as u32 + 1);
    refused(|index| index.tensors[0].tiles.clear());
    refused(|index| index.tensors[0].tiles = tiles(2 * TILE_BYTES as u64, 1));
    refused(|index| index.tensors[0].tiles[0].offset = u64::MAX);
    refused(|index| index.tensors[0].shape = vec![1; 65]);
    refused(|index| index.tensors.push(index.tensors[0].clone()));
    refused(|index| index.tensors[0].dtype = Dtype::I32);
    refused(|index| index.skeleton.clear());
    for step in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e-310, 1.0 + f64::EPSILON] {
        refused(|index| index.tensors[0].coding = Codec::Lattice { step }.alone());
    }
}

/// A later version may add fields, and states for each whether this version may ignore it.
#[test]
fn a_later_field_is_skipped_or_refused() {
    let (index, len) = one_tensor();
    let bytes = index.encode();
    let with = |number: u8| [&bytes[..], &[number, 3, 1, 2, 3]].concat();
    assert_eq!(Index::decode(&with(2), len, PAYLOAD_END), Ok(index.clone()));
    assert_eq!(Index::decode(&[with(2), vec![4, 0]].concat(), len, PAYLOAD_END), Ok(index));
    for wrong in [with(3), [with(2), vec![5, 0]].concat(), [&bytes[..], &[2, 4, 1, 2, 3]].concat()] {
        Index::decode(&wrong, len, PAYLOAD_END).unwrap_err();
    }
}

#[test]
fn counts_beyond_what_follows_are_refused() {
    let (index, len) = one_tensor();
    let bytes = index.encode();
    // The four texts are empty. The bytes are their lengths, the generations, four of the error, the number of tensors,
    // and the first tensor's path.
    for at in [0, 1, 2, 3, 9] {
        for lie in [&[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1][..], &[0xff, 0xff, 3], &[0xe8, 7]] {
            let changed = [&bytes[..at], lie, &bytes[at + 1..]].concat();
            assert!(Index::decode(&changed, len, PAYLOAD_END).is_err(), "{lie:?} at {at}");
        }
    }
}

#[test]
fn an_id_is_read_as_it_is_shown() {
    let id = Id::random().unwrap();
    assert_eq!(id.to_string().parse(), Ok(id));
    for text in ["", "0", &"g".repeat(32), &"A".repeat(32), &"0".repeat(33), "é234567890123456789012345678901"] {
        assert!(text.parse::<Id>().is_err(), "{text}");
    }
}

#[test]
fn an_unfinished_object_leaves_nothing_and_is_none() {
    let dir = tempfile::tempdir().unwrap();
    let (tmp, objects) = (dir.path().join("tmp"), dir.path().join("objects"));
    std::fs::create_dir(&tmp).unwrap();
    let mut writer = ObjectWriter::create(&tmp).unwrap();
    let id = writer.id();
    writer.put(b"payload", 0).unwrap();
    writer.close(&Index::default()).unwrap();
    // Closed but without its header: even renamed by hand, it is not accepted as an object.
    let path = path_of(&objects, id);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::copy(tmp.join(format!("object-{id}")), &path).unwrap();
    assert_eq!(Object::open(&objects, id).unwrap_err().kind(), std::io::ErrorKind::InvalidData);
    drop(writer);
    assert_eq!(std::fs::read_dir(&tmp).unwrap().count(), 0);
}

/// A crafted index of 46 MB, which compresses to nothing, would claim so many tensors that their entries take a
/// gigabyte.
#[test]
fn a_number_of_tensors_that_no_file_has_is_not_believed() {
    let count = index::MAX_TENSORS + 1;
    // Four texts, no restores, no error.
    let mut bytes = vec![0; 9];
    codec::entropy::varint::put(count as u64, &mut bytes);
    bytes.resize(bytes.len() + 12 * count, 0);
    let refused = Index::decode(&bytes, 1 << 40, 1 << 40);
    assert_eq!(refused, Err(crate::store::Damage("it has more tensors than any file")));
}
