//! `stepfs reshard`: the new version is whole, or it has no name.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use stepfs::cli::reshard;
use stepfs::store::durable::{CrashPoint, Io};

use super::image::{Image, Luck};
use super::recorder::{Op, Recorder};
use super::series::Random;
use super::series::directory;

fn varint(mut value: u64, out: &mut Vec<u8>) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn field(number: u64, bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    varint(number << 3 | 2, &mut out);
    varint(bytes.len() as u64, &mut out);
    [out, bytes.to_vec()].concat()
}

/// A variable of an ElasticDL server, one number a row.
fn variable(name: &str, values: &[f32]) -> Vec<u8> {
    let content: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let mut size = vec![8];
    varint(values.len() as u64, &mut size);
    let dims = [field(2, &size), field(2, &[8, 1])].concat();
    let tensor = [vec![8, 1], field(2, &dims), field(4, &content)].concat();
    field(3, &[field(1, name.as_bytes()), field(2, &tensor)].concat())
}

fn files(directory: &Path) -> BTreeMap<String, Vec<u8>> {
    let Ok(entries) = fs::read_dir(directory) else { return BTreeMap::new() };
    let file = |entry: std::io::Result<fs::DirEntry>| {
        let entry = entry.unwrap();
        (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap())
    };
    entries.map(file).collect()
}

#[test]
fn a_crash_leaves_a_resharded_version_whole_or_without_its_name() {
    let dir = directory();
    let root = fs::canonicalize(dir.path()).unwrap();
    let from = root.join("version-3");
    fs::create_dir(&from).unwrap();
    let mut message = vec![8, 3];
    for name in ["a", "b", "c", "d"] {
        message.extend(variable(name, &[0.5; 3000]));
    }
    fs::write(from.join("variables-0-of-1.ckpt"), message).unwrap();
    let recorder = Arc::new(Recorder::new(&root, Default::default()));
    let to = root.join("version-4");
    reshard(&Io::new(Arc::clone(&recorder) as _), (from.to_str().unwrap(), 2), &to).unwrap();
    let whole = files(&to);
    assert_eq!(whole.len(), 2);
    let record = recorder.record().clone();
    for point in [CrashPoint::ReshardWritten, CrashPoint::ReshardInPlace] {
        assert!(record.log.iter().any(|entry| entry.point == Some(point)), "{point:?}: {}", point.sentence());
    }
    let (mut random, mut with, mut without) = (Random(5), 0, 0);
    for done in 0..=record.log.len() {
        let lucks = [Luck::None, Luck::All, Luck::Names, Luck::Bytes].into_iter();
        for luck in lucks.chain((0..4).map(|_| Luck::Some(random.next()))) {
            let dir = directory();
            Image::after(&record, done, luck).write(dir.path());
            let found = files(&dir.path().join("version-4"));
            match dir.path().join("version-4").exists() {
                true => assert!(found == whole, "after {done}, {luck:?}: {:?}", found.keys()),
                false => without += 1,
            }
            with += usize::from(!found.is_empty());
            assert_eq!(files(&dir.path().join("version-3")).len(), 1);
            if done == record.log.len() {
                assert!(!found.is_empty(), "it was there when the command returned");
            }
        }
    }
    assert!(matches!(record.log.last().unwrap().op, Op::Remove { .. } | Op::Sync { .. }));
    assert!(with > 0 && without > 0, "{with} with it, {without} without");
}
