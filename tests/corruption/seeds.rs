//! The first inputs of each target, from the files of `tests/corpus` and the objects of `tests/golden`.

use std::fs;
use std::path::{Path, PathBuf};

use stepfs::store::object::{FOOTER_BYTES, Footer, HEADER_BYTES, Header};

use super::targets::TARGETS;

/// Longer ones slow the fuzzer down more than they help it.
const MOST: usize = 13_000;

fn files(folder: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let mut rest = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(folder)];
    let mut found = Vec::new();
    while let Some(path) = rest.pop() {
        match path.is_dir() {
            true => rest.extend(fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path())),
            false => found.push((path.clone(), fs::read(path).unwrap())),
        }
    }
    found.sort();
    found
}

/// The bytes of `data.pkl` in a zip that is not compressed.
fn pickle(zip: &[u8]) -> Option<&[u8]> {
    let name = b"data.pkl";
    let at = zip.windows(name.len()).position(|window| window == name)?;
    let head = at.checked_sub(30 + zip[..at].iter().rev().position(|byte| *byte == 4)?.saturating_sub(26))?;
    let field = |place: usize| Some(usize::from(u16::from_le_bytes(zip.get(place..place + 2)?.try_into().ok()?)));
    let start = head + 30 + field(head + 26)? + field(head + 28)?;
    let end = start + zip.get(start..)?.windows(2).position(|window| window == b"PK")?;
    Some(&zip[start..end])
}

/// The index of an object, not compressed, with its header and the end of the payloads.
fn index(object: &[u8]) -> (Header, u64, Vec<u8>) {
    let header = Header::decode(object[..HEADER_BYTES].try_into().unwrap()).unwrap();
    let footer = Footer::decode(object[object.len() - FOOTER_BYTES..].try_into().unwrap()).unwrap();
    let stored = &object[footer.index_offset as usize..][..footer.index_stored as usize];
    (header, footer.index_offset, zstd::bulk::decompress(stored, footer.index_len as usize).unwrap())
}

/// Writes the first inputs if `STEPFS_SEEDS` names a folder; otherwise checks that they can be made.
#[test]
fn seeds_are_made_of_real_files() {
    let to = std::env::var_os("STEPFS_SEEDS").map(PathBuf::from);
    let mut made = std::collections::BTreeMap::new();
    let mut put = |target: &'static str, name: &str, bytes: &[u8]| {
        // The shortest files of HDF5 and TensorFlow are longer.
        if bytes.len() > if ["hdf5", "bundle"].contains(&target) { 3 * MOST } else { MOST } {
            return;
        }
        *made.entry(target).or_insert(0) += 1;
        if let Some(to) = &to {
            fs::create_dir_all(to.join(target)).unwrap();
            fs::write(to.join(target).join(name), bytes).unwrap();
        }
    };
    for (path, bytes) in files("corpus") {
        let name = path.file_name().unwrap().to_str().unwrap();
        if name.contains("safetensors") {
            put("safetensors", name, &bytes);
            put("safetensors_header", name, &[&[64, 0][..], bytes.get(8..).unwrap_or_default()].concat());
        } else if name == ".metadata" {
            put("dcp_metadata", "metadata", &bytes);
        } else if path.iter().any(|part| part.to_string_lossy().starts_with("hdf5")) {
            if name.ends_with(".h5") {
                put("hdf5", name, &bytes);
            }
        } else if name.contains(".npz") || name.starts_with("npz") {
            put("npz", name, &bytes);
        } else if path.iter().any(|part| part.to_string_lossy().starts_with("others")) {
            let is_zip = bytes.starts_with(b"PK\x03\x04");
            put(if is_zip { "nested" } else { "container" }, name, &bytes);
        } else if let Some(bundle) = name.strip_suffix(".index") {
            // The first block of the index has all entries, and ends with one place and their number.
            let end = bytes.windows(8).position(|bytes| bytes == [0, 0, 0, 0, 1, 0, 0, 0]).unwrap();
            let data = fs::read(path.with_file_name(format!("{bundle}.data-00000-of-00001"))).unwrap();
            put("bundle", bundle, &[&(end as u16).to_le_bytes()[..], &bytes[..end], &data].concat());
        } else if !name.ends_with(".json") && !name.contains(".data-") {
            put("container", name, &bytes);
            if let Some(pickle) = pickle(&bytes) {
                put("pickle", name, &[&[200, 64][..], pickle].concat());
            }
        }
    }
    for (path, bytes) in files("golden") {
        let name = path.file_name().unwrap().to_str().unwrap();
        match path.iter().any(|part| part == "objects") {
            true => {
                put("object_header", &format!("{name}-end"), &bytes[bytes.len() - FOOTER_BYTES..][..FOOTER_BYTES - 8]);
                put("object_header", name, &bytes[..HEADER_BYTES - 8]);
                let (header, end, text) = index(&bytes);
                let length = header.logical_len;
                let numbers = [&length.to_le_bytes()[..], &[0], &end.to_le_bytes(), &[0]].concat();
                put("object_index", name, &[&numbers[..], &text].concat());
                let payloads = &bytes[HEADER_BYTES..end as usize];
                let length = &(length as u32).to_be_bytes()[1..];
                let count = &(payloads.len() as u16).to_be_bytes();
                put("object_file", name, &[&[header.ordered.into()][..], length, count, payloads, &text].concat());
            }
            false if name == "stepfs.toml" => {
                put("settings", &path.iter().rev().nth(1).unwrap().to_string_lossy(), &bytes)
            }
            false if bytes.starts_with(b"stepfsST") => put("stub", name, &bytes[..200]),
            false => {}
        }
    }
    for (number, name) in
        ["balanced", "lc-3", "scar-10", "inshrinkerator-12bins-embedding32-prune30-sensitivity-protect0.5"]
            .iter()
            .enumerate()
    {
        put("profile_name", &number.to_string(), name.as_bytes());
    }
    let paths =
        ["run/checkpoint-10/optimizer.pt", "version-3/variables-0-of-2.ckpt", "epoch=3-step=40.ckpt", "a/1/b_rank_2"];
    for (number, path) in paths.iter().enumerate() {
        put("names", &number.to_string(), path.as_bytes());
    }
    let note = stepfs::store::StubNote {
        path: "run/step_1.pt".into(),
        object: stepfs::store::Id([3; 16]),
        times: stepfs::store::durable::Times { accessed: (1, 2), modified: (3, 4) },
    };
    let note = note.encode();
    put("note", "one", &note[..note.len() - 8]);
    // Two rows, a file and a link, and one object, without the record around them.
    let row = |name: &str, rest: &[u8]| [&[name.len() as u8][..], name.as_bytes(), rest].concat();
    let attributes = [0xa4, 0x03, 0, 0, 10];
    let file = [&[0][..], &attributes, &[5, 1], &[3; 16], &[7, 9]].concat();
    let link = [&[1][..], &attributes, &[1, b'x']].concat();
    let object = [&[3; 16][..], &[0, 100, 0, 1], &[4; 16]].concat();
    put("directory", "some", &[&[2][..], &row("a.pt", &file), &row("latest", &link), &[1], &object].concat());
    let mut restores = stepfs::store::Restores::default();
    (0..20).for_each(|at| restores.restored(at % 3, at as i64 * 1000, at as u32 / 2, "run/step_1.pt"));
    let restores = restores.encode();
    put("restores", "some", &restores[..restores.len() - 8]);
    // For these the fuzzer makes its own inputs from any bytes.
    for (target, _) in TARGETS {
        let bytes: Vec<u8> = (0..400u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        put(target, "any", &bytes);
    }
    assert_eq!(made.len(), TARGETS.len());
    assert!(made["pickle"] > 60 && made["object_index"] > 50, "{made:?}");
}
