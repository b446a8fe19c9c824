//! Files that are checkpoints, or look like them.

use std::path::Path;
use std::sync::LazyLock;

use codec::Dtype;
use formats::{ChangedTensor, Description, InOrder, Kind, Model, Order, ReadAt, Role, describe};
use safetensors::SafeTensors;

use super::input::Input;

/// Promises that every description keeps, for any input.
fn described(bytes: &[u8]) -> Description {
    let d = describe(&bytes).expect("bytes in memory have no errors of a device");
    let mut end = 0;
    for tensor in &d.tensors {
        assert!(tensor.extent.start >= end, "disjoint and ascending");
        assert!(tensor.extent.end > tensor.extent.start && tensor.extent.end <= bytes.len() as u64);
        end = tensor.extent.end;
        let elements: u64 = tensor.shape.iter().product();
        assert_eq!(elements * tensor.dtype.size() as u64, tensor.extent.end - tensor.extent.start);
        for other in [tensor.of, tensor.partner].into_iter().flatten() {
            assert_eq!(d.tensors[other].shape, tensor.shape, "{}: {}", tensor.path, tensor.why);
        }
        let partner = tensor.partner.map(|other| &d.tensors[other]);
        assert!(tensor.role != Role::FirstMoment || partner.is_some_and(|v| v.role == Role::SecondMoment));
        assert!(partner.is_none_or(|other| other.dtype == tensor.dtype));
    }
    let mut paths: Vec<_> = d.tensors.iter().map(|tensor| &tensor.path).collect();
    paths.sort();
    paths.dedup();
    assert_eq!(paths.len(), d.tensors.len(), "paths are unique");
    assert!(d.kind != Kind::Opaque || d.tensors.is_empty() && d.note.is_some());
    let _ = d.signature();
    let again = describe(&bytes).expect("bytes in memory have no errors of a device");
    assert_eq!((again.kind, &again.tensors), (d.kind, &d.tensors), "the same at every look");
    patched(bytes, &d);
    ordered(bytes, &d);
    d
}

/// Patches stay outside of tensors and inside the file.
fn patched(bytes: &[u8], d: &Description) {
    let intact = d.is_intact(&bytes).expect("bytes in memory have no errors of a device");
    let changed: Vec<ChangedTensor> = (d.tensors.iter().enumerate())
        .filter(|(_, tensor)| tensor.role == Role::Weight)
        .map(|(index, tensor)| {
            let crc = crc32fast::hash(&bytes[tensor.extent.start as usize..tensor.extent.end as usize]);
            ChangedTensor { index, crc_before: crc, crc_after: !crc }
        })
        .collect();
    let patches = d.patches(&bytes, &changed).expect("bytes in memory have no errors of a device");
    let mut end = 0;
    for patch in &patches {
        let range = patch.offset..patch.offset + patch.bytes.len() as u64;
        assert!(range.start >= end && range.end <= bytes.len() as u64);
        assert!(d.tensors.iter().all(|t| t.extent.end <= range.start || t.extent.start >= range.end));
        end = range.end;
    }
    let same: Vec<ChangedTensor> = changed.iter().map(|c| ChangedTensor { crc_after: c.crc_before, ..*c }).collect();
    let none = d.patches(&bytes, &same).expect("bytes in memory have no errors of a device");
    if intact {
        assert!(none.iter().all(|patch| bytes[patch.offset as usize..].starts_with(&patch.bytes)), "nothing changed");
    }
}

/// The ordered file is a permutation, and converts back to the file.
fn ordered(bytes: &[u8], d: &Description) {
    let own: &(dyn ReadAt + Sync) = &bytes;
    let view = InOrder::new(own, d);
    let mut sorted = vec![0; bytes.len()];
    view.read_exact_at(&mut sorted, 0).expect("bytes in memory have no errors of a device");
    let mut back = vec![0xee; bytes.len()];
    Order::of(d)
        .runs(0..bytes.len() as u64, |range, place| {
            let run = &sorted[range.start as usize..range.end as usize];
            back[place as usize..][..run.len()].copy_from_slice(run);
            Ok::<(), ()>(())
        })
        .expect("nothing fails");
    assert!(back == bytes, "rows go back to where they were");
}

/// A file of any format, raw.
pub(crate) fn container(data: &[u8]) {
    described(data);
}

/// The pickle in a sound zip, so that no checksum stops the fuzzer.
pub(crate) fn pickle(data: &[u8]) {
    let mut input = Input::new(data);
    let lengths = [input.byte(), input.byte()];
    let storages = lengths.map(|length| vec![length; usize::from(length)]);
    let pickle = input.rest();
    described(&zip_with(pickle, &storages));
}

/// A zip of torch's layout around a pickle.
pub(crate) fn zip_with(pickle: &[u8], storages: &[Vec<u8>]) -> Vec<u8> {
    let storages = storages.iter().enumerate().map(|(number, bytes)| (format!("a/data/{number}"), bytes.as_slice()));
    zip_of(std::iter::once(("a/data.pkl".to_string(), pickle)).chain(storages))
}

/// A zip of stored records.
fn zip_of<'a>(records: impl Iterator<Item = (String, &'a [u8])>) -> Vec<u8> {
    let (mut out, mut directory) = (Vec::new(), Vec::new());
    let mut count = 0u16;
    for (name, payload) in records {
        let (crc, length) = (crc32fast::hash(payload), payload.len() as u32);
        let at = out.len() as u32;
        let mut common = vec![0u8; 26];
        common[10..14].copy_from_slice(&crc.to_le_bytes());
        common[14..18].copy_from_slice(&length.to_le_bytes());
        common[18..22].copy_from_slice(&length.to_le_bytes());
        common[22..24].copy_from_slice(&(name.len() as u16).to_le_bytes());
        out.extend_from_slice(b"PK\x03\x04");
        out.extend_from_slice(&common);
        out.extend_from_slice(name.as_bytes());
        out.extend_from_slice(payload);
        directory.extend_from_slice(b"PK\x01\x02\0\0");
        directory.extend_from_slice(&common);
        directory.extend_from_slice(&[0; 10]);
        directory.extend_from_slice(&at.to_le_bytes());
        directory.extend_from_slice(name.as_bytes());
        count += 1;
    }
    let (at, length) = (out.len() as u32, directory.len() as u32);
    out.extend_from_slice(&directory);
    out.extend_from_slice(b"PK\x05\x06\0\0\0\0");
    out.extend_from_slice(&count.to_le_bytes());
    out.extend_from_slice(&count.to_le_bytes());
    out.extend_from_slice(&length.to_le_bytes());
    out.extend_from_slice(&at.to_le_bytes());
    out.extend_from_slice(&[0, 0]);
    out
}

/// A raw `.metadata` of a distributed checkpoint, beside a sound file of a rank. Whatever it says, no tensor moves.
pub(crate) fn dcp_metadata(data: &[u8]) {
    const FILE: &str = "__0_0.distcp";
    static CHUNKS: &[u8] = include_bytes!("../../../tests/corpus/dcp/__0_0.distcp");
    static BEFORE: LazyLock<Description> = LazyLock::new(|| describe(&CHUNKS).expect("bytes can be read"));
    let Ok(model) = Model::read(&data) else { return };
    let mut after = BEFORE.clone();
    after.name_chunks(Path::new(FILE), &model);
    assert_eq!(after.tensors.len(), BEFORE.tensors.len());
    for (a, b) in after.tensors.iter().zip(&BEFORE.tensors) {
        assert_eq!((&a.extent, a.dtype, &a.shape), (&b.extent, b.dtype, &b.shape));
        assert!([a.of, a.partner].into_iter().flatten().all(|other| after.tensors[other].shape == a.shape));
    }
}

/// A raw zip of torch zips; and raw members in a sound zip. The patched zip is sound, whatever the weights become.
pub(crate) fn nested(data: &[u8]) {
    let check = |file: &[u8]| {
        let d = described(file);
        if d.kind == Kind::Nested && d.is_intact(&file).expect("bytes in memory have no errors of a device") {
            patched_is_sound(file.to_vec(), &d);
        }
    };
    if data.starts_with(b"PK\x03\x04") {
        return check(data);
    }
    let mut input = Input::new(data);
    let storages = [vec![7; usize::from(input.byte())], vec![9; usize::from(input.byte())]];
    let inner = zip_with(input.rest(), &storages);
    let records = [("data", &b"{}"[..]), ("policy.pth", &inner), ("policy.optimizer.pth", &inner), ("more.pth", data)];
    check(&zip_of(records.iter().map(|(name, bytes)| (name.to_string(), *bytes))));
}

/// A raw zip of arrays, or arrays in a sound zip, some with a header that may lie. The patched file is sound, whatever
/// the weights become.
pub(crate) fn npz(data: &[u8]) {
    if data.starts_with(b"PK\x03\x04") {
        described(data);
        return;
    }
    let mut input = Input::new(data);
    let mut records: Vec<(String, Vec<u8>)> = Vec::new();
    for number in 0..1 + input.upto(3) {
        let ending = input.pick(&[".npy", ".exp_avg.npy", ".exp_avg_sq.npy", ".weight.npy", ""]);
        let name = input.pick(&["model", "fc", "optimizer"]);
        let header = match input.flag() {
            true => input.bytes(200).to_vec(),
            false => {
                let descr = input.pick(&["<f4", "<f2", "<f8", "|u1", ">f4", "<c8", "|V2", "|O"]);
                let order = input.pick(&["False", "True"]);
                let (rows, columns) = (input.upto(9), input.upto(9));
                format!("{{'descr': '{descr}', 'fortran_order': {order}, 'shape': ({rows}, {columns}), }}").into_bytes()
            }
        };
        let mut array = b"\x93NUMPY\x01\x00".to_vec();
        array.extend_from_slice(&(header.len() as u16).to_le_bytes());
        array.extend_from_slice(&header);
        let length = input.upto(700);
        array.extend_from_slice(&input.filled(length));
        // Half of them share a name without its ending.
        let number = if input.flag() { String::new() } else { number.to_string() };
        records.push((format!("{name}{number}{ending}"), array));
    }
    let file = zip_of(records.iter().map(|(name, array)| (name.clone(), array.as_slice())));
    let d = described(&file);
    if d.kind != Kind::Npz {
        return;
    }
    patched_is_sound(file, &d);
}

/// A raw HDF5 file; and the same in a sound zip of Keras, which names the optimizer.
pub(crate) fn hdf5(data: &[u8]) {
    let alone = described(data);
    let config = br#"{"compile_config": {"optimizer": {"class_name": "Adam", "config": {}}}}"#;
    let records = [("config.json", &config[..]), ("model.weights.h5", data)];
    let file = zip_of(records.iter().map(|(name, bytes)| (name.to_string(), *bytes)));
    let zipped = described(&file);
    if alone.kind != Kind::Hdf5 {
        return;
    }
    assert_eq!((zipped.kind, zipped.tensors.len()), (Kind::Keras, alone.tensors.len()));
    for (one, other) in alone.tensors.iter().zip(&zipped.tensors) {
        let bytes = |file: &[u8], t: &formats::Tensor| file[t.extent.start as usize..t.extent.end as usize].to_vec();
        assert!(one.path == other.path && bytes(data, one) == bytes(&file, other));
    }
    patched_is_sound(file, &zipped);
}

/// The CRCs of a zip are right, whatever its weights become.
fn patched_is_sound(mut file: Vec<u8>, d: &Description) {
    assert!(d.is_intact(&file).expect("bytes in memory have no errors of a device"));
    let mut changed = Vec::new();
    let original = file.clone();
    for (index, tensor) in d.tensors.iter().enumerate().filter(|(_, tensor)| tensor.role == Role::Weight) {
        let bytes = &mut file[tensor.extent.start as usize..tensor.extent.end as usize];
        let crc_before = crc32fast::hash(bytes);
        bytes.iter_mut().for_each(|byte| *byte ^= 0x5a);
        changed.push(ChangedTensor { index, crc_before, crc_after: crc32fast::hash(bytes) });
    }
    for patch in d.patches(&original, &changed).expect("bytes in memory have no errors of a device") {
        file[patch.offset as usize..][..patch.bytes.len()].copy_from_slice(&patch.bytes);
    }
    let again = described(&file);
    assert_eq!((again.kind, &again.tensors), (d.kind, &d.tensors));
    assert!(
        again.is_intact(&file).expect("bytes in memory have no errors of a device"),
        "a CRC of the patched file is wrong"
    );
}

/// A raw safetensors file. stepfs reads every file that the format's own library reads, and reads the same.
pub(crate) fn safetensors(data: &[u8]) {
    let d = described(data);
    let Ok(theirs) = SafeTensors::deserialize(data) else { return };
    let known = |dtype: safetensors::Dtype| Dtype::from_name(&dtype.to_string());
    let refused = |why: &str| d.note.as_deref().is_some_and(|note| note.contains(why));
    if d.kind != Kind::Safetensors {
        // Shorter than any file with a tensor; limits that the library lacks; cases that JSON leaves open.
        let limits = ["64 dimensions", "same name", "recursion limit", "none of the formats"];
        assert!(limits.iter().any(|why| refused(why)), "{:?}", d.note);
        return;
    }
    for (name, view) in theirs.tensors() {
        let Some(dtype) = known(view.dtype()).filter(|_| !view.data().is_empty()) else { continue };
        let ours = d.tensors.iter().find(|tensor| tensor.path == name).expect("it has the tensor as well");
        let shape: Vec<usize> = ours.shape.iter().map(|dim| *dim as usize).collect();
        assert_eq!((ours.dtype, shape.as_slice()), (dtype, view.shape()));
        assert!(&data[ours.extent.start as usize..ours.extent.end as usize] == view.data());
    }
}

/// A header of safetensors, with as many bytes behind it as the first two say.
pub(crate) fn safetensors_header(data: &[u8]) {
    let Some((length, header)) = data.split_first_chunk::<2>() else { return };
    let length = u16::from_le_bytes(*length) % 4099;
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header);
    file.resize(file.len() + usize::from(length), 7);
    safetensors(&file);
}

/// A model of ElasticDL, valid or nearly: variables and tables of any size, ids in any order.
pub(crate) fn elasticdl_model(data: &[u8]) {
    let mut input = Input::new(data);
    let mut file = Vec::new();
    put_number(1, u64::from(input.byte()), &mut file);
    let mut sound = true;
    let mut ids_seen = 0;
    for number in 0..1 + input.upto(3) {
        let name = format!("t{number}");
        let width = 1 + input.upto(5) as u64;
        let rows = 1 + input.upto(9) as u64;
        let content = input.filled((4 * rows * width) as usize);
        let array = tensor(1, &[rows, width], &content);
        if input.flag() {
            let mut ids: Vec<u64> = (0..rows).map(|_| u64::from(input.byte()) << (8 * input.upto(6))).collect();
            let count = ids.len();
            let mut list = Vec::new();
            ids.iter().for_each(|id| put_varint(*id, &mut list));
            ids.sort_unstable();
            ids.dedup();
            sound &= ids.len() == count;
            ids_seen += count;
            let mut info = Vec::new();
            put_field(1, name.as_bytes(), &mut info);
            put_number(2, width, &mut info);
            put_field(3, b"uniform", &mut info);
            put_number(4, 1, &mut info);
            put_field(2, &info, &mut file);
            let mut slices = Vec::new();
            put_field(1, &array, &mut slices);
            put_field(2, &list, &mut slices);
            put_entry(4, &name, &slices, &mut file);
        } else {
            put_entry(3, &name, &array, &mut file);
        }
    }
    // Perhaps cut short by a byte.
    let extra = input.bytes(3);
    file.extend_from_slice(extra);
    let d = described(&file);
    if d.kind == Kind::ElasticDl {
        assert!(sound, "an id twice in a table");
        assert!(d.tables.len() <= ids_seen);
    }
}

fn put_varint(mut value: u64, out: &mut Vec<u8>) {
    while value > 0x7f {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn put_number(field: u64, value: u64, out: &mut Vec<u8>) {
    put_varint(field << 3, out);
    put_varint(value, out);
}

fn put_field(field: u64, bytes: &[u8], out: &mut Vec<u8>) {
    put_varint(field << 3 | 2, out);
    put_varint(bytes.len() as u64, out);
    out.extend_from_slice(bytes);
}

fn put_entry(field: u64, name: &str, value: &[u8], out: &mut Vec<u8>) {
    let mut entry = Vec::new();
    put_field(1, name.as_bytes(), &mut entry);
    put_field(2, value, &mut entry);
    put_field(field, &entry, out);
}

fn tensor(dtype: u64, dims: &[u64], content: &[u8]) -> Vec<u8> {
    let (mut shape, mut out) = (Vec::new(), Vec::new());
    for dim in dims {
        let mut one = Vec::new();
        put_number(1, *dim, &mut one);
        put_field(2, &one, &mut shape);
    }
    put_number(1, dtype, &mut out);
    put_field(2, &shape, &mut out);
    put_field(4, content, &mut out);
    out
}
