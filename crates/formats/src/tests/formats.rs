//! Legacy files of torch.save, npy and npz: like other formats where they hold the same, and safe where they lie.

use std::time::Duration;

use super::hostile::tensor_ops;
use super::*;

#[test]
fn legacy_files_and_arrays_are_described_as_python_sees_them() {
    assert_eq!(described_as_python_sees("formats").len(), 13);
}

#[test]
fn patched_arrays_are_what_numpy_writes() {
    assert_eq!(patched_as_written("formats_pairs"), 2);
}

/// The description of a tensor, with paths in place of indices.
type Said = (Dtype, Vec<u64>, Role, Use, Option<&'static str>, Option<String>, Option<String>);

fn said(d: &Description) -> BTreeMap<String, Said> {
    let path = |index: Option<usize>| index.map(|index| d.tensors[index].path.clone());
    let said = |t: &Tensor| (t.dtype, t.shape.clone(), t.role, t.used, t.trained, path(t.of), path(t.partner));
    d.tensors.iter().map(|t| (t.path.clone(), said(t))).collect()
}

#[test]
fn a_legacy_file_says_what_the_zip_of_the_same_tensors_says() {
    let files = files("formats");
    let (zip, mut legacy) = (check(&files["trained.pt"]), check(&files["trained.legacy.pt"]));
    assert_eq!((zip.kind, legacy.kind), (Kind::TorchZip, Kind::TorchLegacy));
    let paths = |d: &Description| d.tensors.iter().map(|t| t.path.clone()).collect::<Vec<_>>();
    assert_ne!(paths(&zip), paths(&legacy), "the payloads are in another order");
    assert_eq!(said(&legacy), said(&zip));
    let paired = said(&legacy);
    assert_eq!(paired["optimizer/state/6/exp_avg"].5.as_deref(), Some("model/3.weight"));
    assert_eq!((zip.optimizers(), zip.signature()), (legacy.optimizers(), legacy.signature()));
    // The mappings of weights follow their tensors.
    let optimizers = zip.optimizers().to_vec();
    legacy.tensors.iter_mut().for_each(|t| t.trained = None);
    legacy.prove(&optimizers);
    let proven = |d: &Description| d.tensors.iter().filter(|t| t.trained.is_some()).count();
    assert_eq!(
        (proven(&legacy), legacy.tensors.iter().filter(|t| t.trained.is_some() && !t.is_weight()).count()),
        (14, 0)
    );
}

#[test]
fn an_npz_says_what_safetensors_of_the_same_names_says() {
    let files = files("formats");
    let (npz, other) = (check(&files["trained.npz"]), check(&files["trained.safetensors"]));
    assert_eq!((npz.kind, other.kind), (Kind::Npz, Kind::Safetensors));
    assert_eq!(said(&npz), said(&other));
    let proven = npz.tensors.iter().filter(|t| t.trained.is_some()).count();
    assert_eq!((proven, npz.signature()), (14, other.signature()));
}

#[test]
fn an_array_by_itself_is_never_a_weight() {
    let mut d = check(&files("formats")["array.npy"]);
    let trained = Trained { count: 1, shapes: BTreeMap::from([(vec![3, 4], 1)]) };
    d.prove(&[trained]);
    assert!(d.tensors.iter().all(|t| !t.is_weight() && t.trained.is_none()));
}

#[test]
fn what_numpy_compressed_or_pickled_is_left_out() {
    let file = files("formats").remove("trained.npz").expect("corpus file");
    let whole = check(&file);
    // Of one record the header no longer tells an array: it lies between tensors then.
    let mut odd = file.clone();
    let start = whole.tensors[3].extent.start as usize;
    let at = odd[..start].windows(6).rposition(|w| w == b"\x93NUMPY").expect("header");
    odd[at] = b'?';
    let d = check(&odd);
    assert_eq!((d.kind, d.tensors.len()), (Kind::Npz, whole.tensors.len() - 1));
    assert_eq!(d.note.as_deref(), Some("npz: 1 records are no array that stepfs looks into"));
    assert!(!d.is_intact(&odd).expect("in memory"));
    assert!(whole.is_intact(&file).expect("in memory") && whole.has_checksums());
}

/// A legacy file around an object pickle, with a list of keys and payloads.
fn legacy(system: &[u8], object: &[u8], keys: &[&str], payloads: &[(i64, &[u8])]) -> Vec<u8> {
    let mut out = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.\x80\x02M\xe9\x03.".to_vec();
    out.extend([b"\x80\x02", system, b"."].concat());
    out.extend([b"\x80\x02", object, b".\x80\x02]q\x00("].concat());
    for key in keys {
        out.extend([&b"X"[..], &(key.len() as u32).to_le_bytes(), key.as_bytes()].concat());
    }
    out.extend(b"e.");
    for (count, payload) in payloads {
        out.extend([&count.to_le_bytes()[..], payload].concat());
    }
    out
}

/// An object with tensors of four floats in these storages.
fn tensors(keys: &[usize]) -> Vec<u8> {
    let mut object = b"}(".to_vec();
    for key in keys {
        object.extend([b"U\x01w", tensor_ops(*key).as_slice()].concat());
    }
    object.push(b'u');
    object
}

const FOUR: (i64, &[u8]) = (4, &[1; 16]);
const SYSTEM: &[u8] = b"}(U\x0dlittle_endian\x88u";

#[test]
fn a_legacy_file_made_by_hand_is_read() {
    let whole = legacy(SYSTEM, &tensors(&[7, 8]), &["8", "7"], &[FOUR, FOUR]);
    let d = check(&whole);
    let found: Vec<_> = d.tensors.iter().map(|t| (t.path.as_str(), t.bytes())).collect();
    assert_eq!((d.kind, found), (Kind::TorchLegacy, vec![("w#2", 16), ("w", 16)]));
    for len in 0..whole.len() {
        assert_eq!(check(&whole[..len]).kind, Kind::Opaque, "cut to {len}");
    }
    // Another object may follow.
    let twice = check(&[&whole[..], &whole].concat());
    assert_eq!((twice.kind, twice.tensors.len()), (Kind::TorchLegacy, 2));
    let framed = [&b"\x80\x04\x95\x0d\0\0\0\0\0\0\0"[..], &whole[2..]].concat();
    assert_eq!(check(&framed).tensors.len(), 2);
}

#[test]
fn legacy_files_that_lie_are_opaque() {
    let one = tensors(&[7]);
    let lies: [(&str, Vec<u8>); 9] = [
        ("a number of elements", legacy(SYSTEM, &one, &["7"], &[(5, &[1; 20])])),
        ("a negative number", legacy(SYSTEM, &one, &["7"], &[(-4, &[1; 16])])),
        ("a huge number", legacy(SYSTEM, &one, &["7"], &[(i64::MAX, &[1; 16])])),
        ("a key that is listed twice", legacy(SYSTEM, &one, &["7", "7"], &[FOUR, FOUR])),
        ("one twice, one never", legacy(SYSTEM, &tensors(&[7, 8]), &["7", "7"], &[FOUR, FOUR])),
        ("a key of no tensor", legacy(SYSTEM, &one, &["9"], &[FOUR])),
        ("no payload", legacy(SYSTEM, &one, &["7"], &[])),
        ("a longer key", legacy(SYSTEM, &one, &[&"7".repeat(2000)], &[FOUR])),
        ("another protocol", {
            let mut file = legacy(SYSTEM, &one, &["7"], &[FOUR]);
            file[18] = 0xea;
            file
        }),
    ];
    for (lie, file) in lies {
        let d = check(&file);
        assert_eq!(d.kind, Kind::Opaque, "{lie}");
    }
    let odd = replaced(&one, b"FloatStorage", b"OddStorage");
    assert_eq!(check(&legacy(SYSTEM, &odd, &["7"], &[FOUR])).kind, Kind::Opaque);
    let missing = check(&legacy(SYSTEM, &tensors(&[7, 8]), &["7"], &[FOUR]));
    assert_eq!((missing.kind, missing.tensors.len(), missing.note.is_some()), (Kind::TorchLegacy, 1, true));
    let big = check(&legacy(b"}(U\x0dlittle_endian\x89u", &one, &["7"], &[FOUR]));
    assert_eq!((big.kind, big.tensors.len(), big.note.is_some()), (Kind::Opaque, 0, true));
}

#[test]
fn many_legacy_storages_are_read_in_linear_time() {
    let numbers: Vec<usize> = (0..60_000).collect();
    let keys: Vec<String> = numbers.iter().rev().map(usize::to_string).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    let file = legacy(SYSTEM, &tensors(&numbers), &keys, &vec![FOUR; numbers.len()]);
    let start = of_thread();
    let d = check(&file);
    assert!(of_thread() - start < Duration::from_secs(10));
    assert_eq!((d.kind, d.tensors.len()), (Kind::TorchLegacy, numbers.len()));
}

#[test]
fn a_part_of_a_legacy_storage_has_no_shape() {
    let square = replaced(&tensors(&[7]), b"K\x04\x85K\x01\x85", b"K\x02K\x02\x86K\x02K\x01\x86");
    let shape_of = |view: &[u8]| {
        let object = replaced(&square, b"cpuK\x04t", &[b"cpuK\x04", view, b"t"].concat());
        check(&legacy(SYSTEM, &object, &["7"], &[FOUR])).tensors[0].shape.clone()
    };
    assert_eq!((shape_of(b"N"), shape_of(b"(U\x018K\x00K\x04t")), (vec![2, 2], vec![4]));
}

/// The bytes with the first `old` replaced.
fn replaced(bytes: &[u8], old: &[u8], new: &[u8]) -> Vec<u8> {
    let at = bytes.windows(old.len()).position(|w| w == old).expect("there");
    [&bytes[..at], new, &bytes[at + old.len()..]].concat()
}

#[test]
fn opaque_files_are_named_by_their_format() {
    let note = |bytes: &[u8]| check(bytes).note.unwrap_or_default();
    assert!(note(b"GGUF and more").starts_with("GGUF, a model for inference: kept as it is; "));
    assert!(note(b"nothing that anybody knows").starts_with("a format that stepfs does not know: kept as it is; "));
}

#[test]
fn two_names_of_moments_are_no_weights() {
    let names = [
        "params/a/kernel", "opt/0/mu/a/kernel", "mu/a", "nu/a", "m.b.weight", "v.b.weight", "c.m", "c.v", "m.d.weight",
    ];
    let d = check(&of_names(&names));
    let weights: Vec<&str> = d.tensors.iter().filter(|t| t.role == Role::Weight).map(|t| t.path.as_str()).collect();
    assert_eq!(weights, ["params/a/kernel", "m.d.weight"]);
}

/// A safetensors file with one number for each name.
fn of_names(names: &[&str]) -> Vec<u8> {
    let places: Vec<String> = (0..names.len())
        .map(|i| {
            format!("\"{}\":{{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[{},{}]}}", names[i], 4 * i, 4 * i + 4)
        })
        .collect();
    let header = format!("{{{}}}", places.join(","));
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &vec![0; 4 * names.len()]].concat()
}

#[test]
fn a_slot_that_nobody_knows_makes_it_another_optimizer() {
    let roles = |own: [&str; 2], more: &str| {
        let names = ["a.weight", own[0], own[1], more];
        let d = check(&of_names(&names));
        let role = |name: &str| d.tensors.iter().find(|t| t.path == name).map(|t| t.role);
        own.map(|name| role(name).expect("in the file"))
    };
    let behind = ["optimizer.a.weight.exp_avg", "optimizer.a.weight.exp_avg_sq"];
    let slashes = ["optimizer/a.weight/exp_avg", "optimizer/a.weight/exp_avg_sq"];
    let in_front = ["optimizer.state.exp_avg.a.weight", "optimizer.state.exp_avg_sq.a.weight"];
    let adam = [Role::FirstMoment, Role::SecondMoment];
    for (own, known, unknown) in [
        (behind, "optimizer.a.weight.step", "optimizer.a.weight.exp_avg_diff"),
        (slashes, "optimizer/a.weight/step", "optimizer/a.weight/GG"),
        (in_front, "optimizer.state.step.a.weight", "optimizer.state.exp_avg_diff.a.weight"),
    ] {
        assert_eq!(roles(own, known), adam, "{known}");
        assert_eq!(roles(own, "optimizer.b.weight.exp_avg_diff"), adam);
        assert_eq!(roles(own, unknown), [Role::Other; 2], "{unknown}");
    }
}
