//! Bundles of TensorFlow (tests/corpus/bundle, made by make_bundle.py).

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use proptest::prelude::*;

use super::{corpus, files};
use crate::{ChangedTensor, Description, Kind, Role, Siblings, Tensor, Use, describe_at, siblings};
use codec::hash::castagnoli;

const VALUE: &str = "/.ATTRIBUTES/VARIABLE_VALUE";

/// Checks what holds for any input.
fn check(data: &[u8], index: &[u8]) -> Description {
    let d = describe_at(Path::new("a.data-00000-of-00001"), &data, |_| Ok(index)).expect("in memory");
    let mut end = 0;
    for t in &d.tensors {
        assert!(t.extent.start >= end && t.extent.end > t.extent.start);
        end = t.extent.end + t.tail();
        assert!(end <= data.len() as u64 && [0, 128].contains(&t.tail()));
        assert!(t.lossless || t.tail() > 0, "what changes needs a tail");
        for other in [t.of, t.partner].into_iter().flatten() {
            assert_eq!(d.tensors[other].shape, t.shape, "{}: {}", t.path, t.why);
        }
    }
    assert!(d.kind == Kind::Bundle || d.kind == Kind::Opaque && d.tensors.is_empty() && d.note.is_some());
    let mut held = d.clone();
    held.hold_unsteady(&data).expect("in memory");
    for (index, tensor) in held.tensors.iter().enumerate().filter(|(_, tensor)| !tensor.lossless) {
        let changed = ChangedTensor { index, crc_before: 1, crc_after: 0xabc };
        let patches = d.patches(&data, &[changed]).expect("the tail is steady");
        assert!(patches.iter().all(|p| p.offset == tensor.extent.end && p.bytes.len() == 128));
    }
    d
}

fn bundles() -> BTreeMap<String, (Vec<u8>, Vec<u8>)> {
    let mut all = files("bundle");
    let names: Vec<String> = all.keys().filter_map(|name| name.strip_suffix(".index").map(String::from)).collect();
    let mut take = |name: String| all.remove(&name).expect("both files");
    names
        .into_iter()
        .map(|name| {
            let data = take(format!("{name}.data-00000-of-00001"));
            let index = take(format!("{name}.index"));
            (name, (data, index))
        })
        .collect()
}

fn described(name: &str) -> (Description, Vec<u8>, Vec<u8>) {
    let (data, index) = bundles().remove(name).expect("corpus");
    let d = check(&data, &index);
    assert_eq!(d.kind, Kind::Bundle, "{:?}", d.note);
    (d, data, index)
}

fn whole<'a>(data: &'a [u8], tensor: &Tensor) -> &'a [u8] {
    &data[tensor.extent.start as usize..(tensor.extent.end + tensor.tail()) as usize]
}

#[derive(serde::Deserialize)]
struct View {
    shape: Vec<u64>,
    dtype: String,
    crc: u32,
}

#[test]
fn tensors_are_those_that_tensorflow_sees() {
    let views = std::fs::read(corpus("bundle").join("views.json")).expect("corpus");
    let views: HashMap<String, HashMap<String, View>> = serde_json::from_slice(&views).expect("JSON");
    assert!(views.len() >= 7);
    for (name, view) in views {
        let (d, data, _) = described(&name);
        assert!(d.is_intact(&data).expect("in memory") && d.has_checksums(), "{name}");
        assert_eq!(d.tensors.len(), view.len(), "{name}");
        let found: HashMap<(Vec<u64>, u32), &Tensor> =
            d.tensors.iter().map(|t| ((t.shape.clone(), crc32fast::hash(whole(&data, t))), t)).collect();
        for (key, View { shape, dtype, crc }) in view {
            let tensor = found[&(shape, crc)];
            assert_eq!(format!("{:?}", tensor.dtype).to_lowercase(), dtype.replace("int", "i").replace("float", "f"));
            let own = key.strip_suffix(VALUE).expect("all of them");
            // A name that Keras gave, or else the key. TensorFlow calls each variable without a name `Variable`.
            assert!(tensor.path == own || !tensor.path.contains("_variables/"), "{}", tensor.path);
        }
    }
}

/// The roles of all tensors of the optimizer that have the shape of the first kernel.
fn state_of(name: &str) -> Vec<(Role, Use, bool)> {
    let (d, ..) = described(name);
    let kernel = d.tensors.iter().position(|t| t.path == "sequential/dense/kernel").expect("its name");
    assert!(d.tensors[kernel].is_weight() && d.tensors[kernel].trained.is_some(), "{name}");
    let noise = d.tensors.iter().find(|t| t.path.starts_with("noise") || t.path == "Variable").expect("there");
    assert!(noise.trained.is_none(), "nothing proves a variable beside the model");
    for t in d.tensors.iter().filter(|t| t.path.contains("/moving_")) {
        assert!(!t.is_weight(), "{}: {}", t.path, t.why);
    }
    let same = |t: &&Tensor| t.shape == [8, 32] && t.path.contains("sequential_dense_kernel");
    d.tensors.iter().filter(same).map(|t| (t.role, t.used, t.of == Some(kernel))).collect()
}

#[test]
fn kerass_optimizers_are_known_by_the_object_graph() {
    use Role::{FirstMoment, Momentum, SecondMoment};
    let pair = |used| [(FirstMoment, used, true), (SecondMoment, used, true)];
    assert_eq!(state_of("adam-2"), pair(Use::ByRole));
    assert_eq!(state_of("adamax-1"), pair(Use::Norm));
    assert_eq!(state_of("sgd-1"), [(Momentum, Use::ByRole, true)]);
    assert_eq!(state_of("rmsprop-1"), [(SecondMoment, Use::ByRole, true), (Momentum, Use::ByRole, true)]);
}

#[test]
fn state_of_an_optimizer_that_stepfs_does_not_know_is_exact() {
    for name in ["nadam-1", "amsgrad-1"] {
        let (d, ..) = described(name);
        let state: Vec<&Tensor> = d.tensors.iter().filter(|t| t.role == Role::Optimizer).collect();
        assert!(state.len() >= 12 && state.iter().all(|t| t.of.is_none() && t.partner.is_none()), "{name}");
        // Its parameters are listed, whatever its state is.
        assert_eq!(d.tensors.iter().filter(|t| t.trained.is_some()).count(), 6, "{name}");
    }
    let (d, ..) = described("graph-1");
    let roles: HashMap<&str, Role> = d.tensors.iter().map(|t| (t.path.as_str(), t.role)).collect();
    let expected = [Role::Weight, Role::Optimizer, Role::Optimizer];
    assert_eq!(["dense/kernel", "dense/kernel/Adam", "dense/kernel/Adam_1"].map(|name| roles[name]), expected);
}

#[test]
fn altered_tensors_keep_the_checksums_of_the_index() {
    for (name, (data, index)) in bundles() {
        let d = check(&data, &index);
        let (mut after, mut changed) = (data.clone(), Vec::new());
        for (number, t) in d.tensors.iter().enumerate().filter(|(_, t)| t.tail() > 0) {
            let range = t.extent.start as usize..t.extent.end as usize;
            after[range.clone()].iter_mut().step_by(7).for_each(|byte| *byte ^= 0x35);
            let crcs = [&data, &after].map(|file| castagnoli(0, &file[range.clone()]));
            changed.push(ChangedTensor { index: number, crc_before: crcs[0], crc_after: crcs[1] });
        }
        // Moments may begin with zeros.
        let mut held = d.clone();
        held.hold_unsteady(&data).expect("in memory");
        changed.retain(|c| !held.tensors[c.index].lossless);
        assert!(!changed.is_empty() && !d.is_intact(&after).expect("in memory"), "{name}");
        for t in held.tensors.iter().filter(|t| t.lossless) {
            let range = t.extent.start as usize..t.extent.end as usize;
            after[range.clone()].copy_from_slice(&data[range]);
        }
        for patch in d.patches(&data, &changed).expect("in memory") {
            let range = patch.offset as usize..patch.offset as usize + patch.bytes.len();
            for (before, after) in data[range.clone()].chunks(4).zip(patch.bytes.chunks(4)) {
                assert!(before[0] ^ after[0] < 4 && before[1..] == after[1..]);
            }
            after[range].copy_from_slice(&patch.bytes);
        }
        assert!(d.is_intact(&after).expect("in memory"), "{name}");
        assert_eq!(check(&after, &index).signature(), d.signature());
    }
}

#[test]
fn both_of_a_pair_or_none_may_change() {
    let (d, mut data, _) = described("adam-2");
    let second = d.tensors.iter().find(|t| t.role == Role::SecondMoment && t.tail() > 0).expect("one");
    data[second.extent.end as usize..][..128].fill(0);
    let mut held = d.clone();
    held.hold_unsteady(&data).expect("in memory");
    let more: Vec<&str> = (held.tensors.iter().zip(&d.tensors))
        .filter(|(held, before)| held.lossless && !before.lossless)
        .map(|(held, _)| held.path.as_str())
        .collect();
    assert_eq!(more.len(), 2, "{more:?}");
    assert!(more.contains(&second.path.as_str()));
}

#[test]
fn names_tell_what_a_file_is() {
    let Siblings { index, files } = siblings(Path::new("run/ckpt-7.data-00001-of-00002")).expect("one");
    assert_eq!(index, PathBuf::from("run/ckpt-7.index"));
    let both = ["run/ckpt-7.data-00000-of-00002", "run/ckpt-7.data-00001-of-00002"].map(PathBuf::from);
    assert_eq!(files.expect("its name shows them"), both);
    for other in ["a.data", "a.data-0-of-1", "a.data-00001-of-00001", "a.data-00000-of-99999", "a.data-+0000-of-00001"]
    {
        assert_eq!(siblings(Path::new(other)), None, "{other}");
    }
    let none = |_: &Path| Err::<Vec<u8>, _>(std::io::ErrorKind::NotFound.into());
    let d = describe_at(Path::new("a.data-00000-of-00001"), &vec![0; 64], none).expect("in memory");
    assert!(d.kind == Kind::Opaque && d.note.is_some_and(|note| note.contains(".index")));
}

#[test]
fn a_damaged_index_names_nothing() {
    let (_, data, index) = described("adam-1");
    for end in 0..index.len() {
        assert_eq!(check(&data, &index[..end]).kind, Kind::Opaque, "cut at {end}");
    }
    for at in 0..index.len() {
        let mut changed = index.clone();
        changed[at] ^= 0x11;
        check(&data, &changed);
    }
    for end in 0..data.len() {
        assert_eq!(check(&data[..end], &index).kind, Kind::Opaque, "cut at {end}");
    }
    for at in 0..data.len() {
        let mut changed = data.clone();
        changed[at] ^= 0xff;
        check(&changed, &index);
    }
}

fn varint(mut number: u64, out: &mut Vec<u8>) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

fn put_block(block: &[u8], out: &mut Vec<u8>) -> Vec<u8> {
    let mut handle = Vec::new();
    varint(out.len() as u64, &mut handle);
    varint(block.len() as u64, &mut handle);
    let checked = [block, &[0]].concat();
    let crc = castagnoli(0, &checked).rotate_right(15).wrapping_add(0xa282_ead8);
    out.extend([&checked[..], &crc.to_le_bytes()].concat());
    handle
}

/// An index with one block of entries, its checksums right.
fn table(entries: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    let end = [0u32, 1].map(u32::to_le_bytes).concat();
    let handle = put_block(&[entries, &end].concat(), &mut out);
    let root = put_block(&[&[0, 1, handle.len() as u8, b'z'], &handle[..], &end].concat(), &mut out);
    let mut footer = [&[0, 0], &root[..]].concat();
    footer.resize(40, 0);
    out.extend(footer);
    out.extend(0xdb47_7524_8b80_fb57u64.to_le_bytes());
    out
}

fn record(key: &[u8], value: &[u8]) -> Vec<u8> {
    let mut out = vec![0];
    varint(key.len() as u64, &mut out);
    varint(value.len() as u64, &mut out);
    [&out, key, value].concat()
}

const HEADER: &[u8] = b"\x00\x00\x02\x08\x01";

fn tensor(dims: &[u64], offset: u64, size: u64) -> Vec<u8> {
    let mut shape = Vec::new();
    for dim in dims {
        let mut message = vec![8];
        varint(*dim, &mut message);
        shape.extend([&[0x12, message.len() as u8], &message[..]].concat());
    }
    let mut out = vec![8, 1, 0x12];
    varint(shape.len() as u64, &mut out);
    out.extend(shape);
    for (field, number) in [(0x20, offset), (0x28, size)] {
        out.push(field);
        varint(number, &mut out);
    }
    [&out[..], &[0x35, 1, 2, 3, 4]].concat()
}

#[test]
fn hostile_indexes_are_refused_in_words() {
    let data = vec![0x3f; 4096];
    let good = [HEADER, &record(b"a", &tensor(&[32, 32], 0, 4096))].concat();
    let d = check(&data, &table(&good));
    assert_eq!((d.kind, d.tensors.len()), (Kind::Bundle, 1));
    assert!(!d.is_intact(&data).expect("in memory"), "its CRC is another one");
    let of = |entries: &[Vec<u8>]| table(&[HEADER.to_vec(), entries.concat()].concat());
    let large = 1 << 62;
    for (what, index) in [
        ("no header", table(&record(b"a", &tensor(&[32, 32], 0, 4096)))),
        ("nothing", table(&[])),
        ("two at one place", of(&[record(b"a", &tensor(&[2], 0, 8)), record(b"b", &tensor(&[2], 4, 8))])),
        ("one name twice", of(&[record(b"a", &tensor(&[2], 0, 8)), record(b"a", &tensor(&[2], 8, 8))])),
        ("beyond the end", of(&[record(b"a", &tensor(&[32, 32], 1, 4096))])),
        ("an end that wraps around", of(&[record(b"a", &tensor(&[2], u64::MAX - 4, 8))])),
        ("another length than the shape's", of(&[record(b"a", &tensor(&[32, 31], 0, 4096))])),
        ("a shape that wraps around", of(&[record(b"a", &tensor(&[large, large, 4], 0, 16))])),
        ("dimensions without end", of(&[record(b"a", &tensor(&[1; 255], 0, 4))])),
        ("a key that begins before it", of(&[vec![9, 1, 0, b'a']])),
        ("a value that never ends", of(&[vec![0, 1, 0xff, 0xff, 0xff, 0xff, 0x0f, b'a']])),
        ("a graph that is cut short", of(&[graph(&[5, 0, 0, 0, 0, 10])])),
    ] {
        let d = check(&data, &index);
        assert_eq!((d.kind, d.tensors.len()), (Kind::Opaque, 0), "{what}");
    }
}

/// The entry of an object graph at the end of 4096 bytes.
fn graph(text: &[u8]) -> Vec<u8> {
    let mut value = vec![8, 7, 0x12, 0];
    for (field, number) in [(0x20, 4096 - text.len() as u64), (0x28, text.len() as u64)] {
        value.push(field);
        varint(number, &mut value);
    }
    record(b"_CHECKPOINTABLE_OBJECT_GRAPH", &value)
}

#[test]
fn an_object_graph_that_contains_itself_ends() {
    // Each object is its own optimizer, list and parameter.
    let child = |name: &str| [&[0x0a, name.len() as u8 + 4, 8, 0, 0x12, name.len() as u8], name.as_bytes()].concat();
    let names = ["_variables", "_trainable_variables", "_iterations"];
    let node = names.map(child).concat();
    let node = [&[0x0a, node.len() as u8], &node[..]].concat();
    let mut text = Vec::new();
    varint(node.len() as u64 * 20, &mut text);
    text.extend([0; 4]);
    text.extend(node.repeat(20));
    let mut data = vec![0x3f; 4096];
    data.splice(4096 - text.len().., text.iter().copied());
    let index = table(&[HEADER, &record(b"a", &tensor(&[2], 0, 8)), &graph(&text)].concat());
    assert_eq!(check(&data, &index).tensors.len(), 1);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, failure_persistence: None, ..ProptestConfig::default() })]

    /// Entries with right checksums, but with bytes of any value in them, and a changed graph.
    #[test]
    fn mutations_never_panic(
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        in_data in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..8),
    ) {
        static FILES: std::sync::LazyLock<(Vec<u8>, Vec<u8>)> =
            std::sync::LazyLock::new(|| bundles().remove("adam-1").expect("corpus"));
        let (mut data, index) = FILES.clone();
        // The first block has all entries. It ends with one place and their number.
        let end = index.windows(9).position(|bytes| bytes[..8] == [0, 0, 0, 0, 1, 0, 0, 0]).expect("its end");
        let mut entries = index[..end].to_vec();
        for (at, value) in edits {
            let at = at.index(entries.len());
            entries[at] = value;
        }
        for (at, value) in in_data {
            let at = at.index(data.len());
            data[at] = value;
        }
        check(&data, &table(&entries));
    }
}
