//! HDF5 and Keras: places and roles as their libraries have them, and nothing worse than opaque where files lie.

use std::time::Duration;

use proptest::prelude::*;

use super::*;

#[test]
fn hdf5_is_described_as_h5py_sees_it() {
    assert_eq!(described_as_python_sees("hdf5").len(), 18);
}

#[test]
fn patched_keras_files_are_what_zipfile_writes() {
    assert_eq!(patched_as_written("hdf5_pairs"), 2);
}

fn description(name: &str) -> Description {
    check(&files("hdf5")[name])
}

fn tensor<'d>(d: &'d Description, path: &str) -> &'d Tensor {
    d.tensors.iter().find(|t| t.path == path).expect(path)
}

/// Paths of a tensor's parameter and its other moment.
fn related<'d>(d: &'d Description, path: &str) -> (Role, Option<&'d str>, Option<&'d str>) {
    let path_of = |index: usize| d.tensors[index].path.as_str();
    let t = tensor(d, path);
    (t.role, t.of.map(path_of), t.partner.map(path_of))
}

#[test]
fn adam_of_keras_is_told_by_its_name_and_paired_by_number() {
    for name in ["adam.keras", "adamw.keras", "adam.weights.h5", "named.keras"] {
        let d = description(name);
        let of = |n: u32| format!("optimizer/vars/{n}");
        let first = (Role::FirstMoment, Some("layers/dense/vars/0"), Some("optimizer/vars/3"));
        assert_eq!(related(&d, &of(2)), first, "{name}");
        let second = (Role::SecondMoment, Some("layers/dense_2/vars/0"), Some("optimizer/vars/14"));
        let last: Vec<_> = (10..18).map(|n| related(&d, &of(n))).collect();
        let expected = (Role::FirstMoment, second.1, Some("optimizer/vars/15"));
        assert!(last.contains(&second) && last.contains(&expected) || name != "adam.keras", "{name}: {last:?}");
        // As many vectors as an optimizer trains stand beside statistics of the same length.
        assert!(d.tensors.iter().all(|t| t.shape != [5] || t.of.is_none()), "{name}");
        let proven: Vec<&str> = d.tensors.iter().filter(|t| t.trained.is_some()).map(|t| t.path.as_str()).collect();
        assert_eq!(proven.len(), 3, "{name}: {proven:?}");
        assert!(d.tensors.iter().filter(|t| t.trained.is_some()).all(|t| t.is_trained_by_shape_only()), "{name}");
    }
}

#[test]
fn moments_are_paired_in_the_order_of_building() {
    let d = description("built.weights.h5");
    let of_shape = |shape: &[u64]| {
        let number = |t: &Tensor| t.path.rsplit('/').next().and_then(|number| number.parse::<u32>().ok());
        let firsts = d.tensors.iter().filter(|t| t.role == Role::FirstMoment && t.shape == shape);
        let mut firsts: Vec<_> = firsts.map(|t| (number(t), t.of.map(|of| d.tensors[of].path.as_str()))).collect();
        firsts.sort_unstable();
        firsts.into_iter().map(|(_, of)| of.expect("a parameter")).collect::<Vec<_>>()
    };
    let parts = ["query", "key", "value"];
    let layers = ["multi_head_attention", "multi_head_attention_1"];
    let expected = layers.iter().flat_map(|l| parts.iter().map(move |part| format!("layers/{l}/{part}_dense/vars/0")));
    assert_eq!(of_shape(&[8, 2, 4]), expected.collect::<Vec<_>>());
    let [ahead, back] = ["forward", "backward"].map(|way| format!("layers/bidirectional/{way}_layer/cell/vars/0"));
    assert_eq!(of_shape(&[8, 2]), [ahead, back]);
}

#[test]
fn what_is_not_known_to_be_adam_is_lossless() {
    for name in ["amsgrad.keras", "amsgrad.weights.h5", "named.weights.h5", "lamb.keras", "sgd.keras", "sgd.weights.h5"]
    {
        let d = description(name);
        for t in &d.tensors {
            let state = t.path.starts_with("optimizer/");
            assert_eq!(state, t.role == Role::Optimizer, "{name}: {}", t.path);
            assert!(t.trained.is_none() && t.of.is_none() && t.partner.is_none(), "{name}: {}", t.path);
        }
    }
}

#[test]
fn legacy_keras_files_are_paired_by_name() {
    let d = description("adam.h5");
    let state = d.tensors.iter().find(|t| t.path.ends_with("dense_1_kernel_momentum"));
    let first = state.or(d.tensors.iter().find(|t| t.path.ends_with("kernel_momentum"))).expect("a moment");
    let (role, of, partner) = related(&d, &first.path);
    assert_eq!((role, partner), (Role::FirstMoment, Some(&*first.path.replace("momentum", "velocity"))));
    assert!(of.is_some_and(|of| of.starts_with("model_weights/") && of.ends_with("/kernel")));
    let moving = d.tensors.iter().filter(|t| t.path.contains("moving_"));
    assert!(moving.clone().count() == 2 && moving.clone().all(|t| t.role == Role::Other && t.trained.is_none()));
    let weights = d.tensors.iter().filter(|t| t.is_weight());
    assert!(weights.clone().count() == 8 && weights.clone().all(|t| t.trained.is_some()));
}

#[test]
fn keras_files_have_one_checksum_for_all_tensors() {
    let file = files("hdf5").remove("adam.keras").expect("corpus file");
    let d = check(&file);
    assert!(d.kind == Kind::Keras && d.has_checksums() && d.is_intact(&file).expect("in memory"));
    let mut other = file.clone();
    let mut changed = Vec::new();
    for (index, t) in d.tensors.iter().enumerate() {
        let range = t.extent.start as usize..t.extent.end as usize;
        let crc_before = crc32fast::hash(&file[range.clone()]);
        other[range.clone()].iter_mut().for_each(|byte| *byte ^= index as u8);
        changed.push(ChangedTensor { index, crc_before, crc_after: crc32fast::hash(&other[range]) });
    }
    assert!(!d.is_intact(&other).expect("in memory"));
    for patch in d.patches(&file, &changed).expect("in memory") {
        other[patch.offset as usize..][..patch.bytes.len()].copy_from_slice(&patch.bytes);
    }
    assert!(check(&other).is_intact(&other).expect("in memory"));
    // A record that has no CRC gets none.
    let mut off = file.clone();
    let crc = crc32fast::hash(&file[d.tensors[0].extent.start as usize..][..4]);
    let places: Vec<u64> = d
        .patches(&file, &[ChangedTensor { index: 0, crc_before: crc, crc_after: !crc }])
        .expect("in memory")
        .iter()
        .map(|p| p.offset)
        .collect();
    for place in &places {
        off[*place as usize..][..4].fill(0);
    }
    let without = check(&off);
    assert!(places.len() >= 2 && without.kind == Kind::Keras);
    assert_eq!(without.patches(&off, &changed).expect("in memory"), []);
}

#[test]
fn what_has_a_filter_is_named() {
    for (name, how) in [("gzip.h5", "compressed with gzip"), ("checked.h5", "checksummed with fletcher32")] {
        let d = description(name);
        let said = format!("HDF5: 1 dataset has chunks {how}: kept as it is; save with compression=None to shrink it");
        assert_eq!((d.kind, d.note), (Kind::Opaque, Some(said)));
    }
    let mixed = description("mixed.h5");
    assert_eq!((mixed.kind, mixed.tensors.len()), (Kind::Hdf5, 1));
    assert!(mixed.note.is_some_and(|note| note.contains("1 dataset has chunks compressed with gzip")));
}

#[test]
fn chunks_are_never_proven_by_their_shape() {
    let d = description("chunks.earliest.h5");
    let chunks = d.tensors.iter().filter(|t| t.path.ends_with(']'));
    assert!(chunks.clone().count() > 10 && chunks.clone().all(|t| t.trained.is_none() && t.of.is_none()));
}

/// Bytes that no tensor is in.
fn metadata(d: &Description, len: usize) -> Vec<usize> {
    let mut places = Vec::new();
    let mut at = 0;
    for t in &d.tensors {
        places.extend(at..t.extent.start as usize);
        at = t.extent.end as usize;
    }
    places.extend(at..len);
    places
}

#[test]
fn truncated_files_are_opaque() {
    for (name, bytes) in files("hdf5") {
        for len in (0..bytes.len()).step_by(13).chain(0..bytes.len().min(256)) {
            assert_eq!(check(&bytes[..len]).kind, Kind::Opaque, "{name} cut to {len}");
        }
    }
}

#[test]
fn no_changed_byte_does_harm() {
    for name in ["chunks.latest.h5", "chunks.earliest.h5", "adam.weights.h5", "types.h5"] {
        let bytes = files("hdf5").remove(name).expect("corpus file");
        let mut changed = bytes.clone();
        for at in metadata(&check(&bytes), bytes.len()) {
            // Most bytes are unused, and are 0.
            let values = [0xff, 0, bytes[at].wrapping_add(1), bytes[at] ^ 0x80];
            // Of the others two values in turn: fuzzing tries all.
            let tried = if bytes[at] == 0 { &values[..1] } else { &values[2 * (at % 2)..][..2] };
            for value in tried.iter().copied() {
                changed[at] = value;
                check(&changed);
            }
            changed[at] = bytes[at];
        }
    }
}

#[test]
fn large_counts_and_cycles_end_soon() {
    let start = of_thread();
    for name in ["groups.h5", "chunks.earliest.h5", "adam.weights.h5"] {
        let bytes = files("hdf5").remove(name).expect("corpus file");
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
        // Addresses of the root's header, its tree and its heap, and of the first objects.
        let known: Vec<u64> = vec![word(64), word(80), word(88), 0, 1 << 60, u64::MAX, u64::MAX - 7];
        let mut changed = bytes.clone();
        let places = metadata(&check(&bytes), bytes.len());
        for at in places.into_iter().filter(|at| at % 8 == 0 && at + 8 <= bytes.len() && word(*at) != 0) {
            for value in known.iter().copied().chain([at as u64]) {
                changed[at..at + 8].copy_from_slice(&value.to_le_bytes());
                check(&changed);
            }
            changed[at..at + 8].copy_from_slice(&bytes[at..at + 8]);
        }
    }
    assert!(of_thread() - start < Duration::from_secs(120));
}

#[test]
fn a_dataset_over_metadata_is_refused() {
    let bytes = files("hdf5").remove("adam.weights.h5").expect("corpus file");
    let d = check(&bytes);
    let large = d.tensors.iter().max_by_key(|t| t.bytes()).expect("tensors");
    let old = large.extent.start.to_le_bytes();
    let at = bytes.windows(8).position(|window| window == old).expect("its address");
    for target in [0, 96, d.tensors[0].extent.start] {
        let mut lying = bytes.clone();
        lying[at..at + 8].copy_from_slice(&u64::to_le_bytes(target));
        let said = check(&lying);
        assert!(said.kind == Kind::Opaque && said.note.is_some_and(|note| note.contains("overlap")), "{target}");
    }
}

fn mutated() -> impl Strategy<Value = Vec<u8>> {
    let all: Vec<(Vec<u8>, Vec<usize>)> = (files("hdf5").into_values())
        .map(|file| {
            // Most bytes of metadata are unused, and are 0.
            let places = metadata(&check(&file), file.len()).into_iter().filter(|at| file[*at] != 0).collect();
            (file, places)
        })
        .collect();
    let edit = (any::<prop::sample::Index>(), any::<u8>(), 0..6u8, any::<prop::sample::Index>());
    (prop::sample::select(all), prop::collection::vec(edit, 1..6)).prop_map(|((mut file, places), edits)| {
        for (index, value, how, other) in edits {
            let at = *index.get(&places).min(&(file.len() - 1));
            match how {
                0 => file[at] = value,
                1 => file[at] ^= 1 << (value % 8),
                2 => file[at] = file[at].wrapping_add(1),
                3 => drop(file.remove(at)),
                4 => file.insert(at, value),
                // A word of another place: an address, a length.
                _ => {
                    let (to, from) = (at & !7, *other.get(&places) & !7);
                    if to.max(from) + 8 <= file.len() {
                        file.copy_within(from..from + 8, to);
                    }
                }
            }
        }
        file
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn mutations_never_panic(file in mutated()) {
        let d = check(&file);
        let changed: Vec<_> = (0..d.tensors.len())
            .map(|index| ChangedTensor { index, crc_before: 0, crc_after: 1 })
            .collect();
        let patches = d.patches(&file, &changed).expect("in memory");
        let outside = |p: &Patch, t: &Tensor| {
            p.offset + p.bytes.len() as u64 <= t.extent.start || t.extent.end <= p.offset
        };
        prop_assert!(patches.iter().all(|p| d.tensors.iter().all(|t| outside(p, t))));
    }
}
