//! ElasticDL's files: a table with rows in another order at every save, and a table larger than a tile.

use std::collections::BTreeMap;

use stepfs::archive::Archive;

use super::series::{Random, Rest};

const ROWS: usize = 12_000;
/// Rows of 60 bytes, which tiles cut in two.
const WIDTH: usize = 15;

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

fn tensor(rows: usize, values: &[f32]) -> Vec<u8> {
    let content: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let mut dims = Vec::new();
    for dim in [rows, values.len() / rows] {
        let mut size = vec![8];
        varint(dim as u64, &mut size);
        dims.extend(field(2, &size));
    }
    [vec![8, 1], field(2, &dims), field(4, &content)].concat()
}

fn entry(number: u64, name: &str, value: &[u8]) -> Vec<u8> {
    field(number, &[field(1, name.as_bytes()), field(2, value)].concat())
}

/// A table in training.
pub(crate) struct Table {
    rows: BTreeMap<u64, Vec<f32>>,
    random: Random,
    /// For the order, so that values do not depend on it.
    order: Random,
}

impl Table {
    /// A new table with this many rows.
    pub(crate) fn new(rows: usize) -> Table {
        let mut random = Random(11);
        let rows = (0..rows).map(|at| {
            let row = (0..WIDTH).map(|_| random.normal() as f32 / 16.0).collect();
            (at as u64 * 7 % 100_003, row)
        });
        let rows = rows.collect();
        Table { rows, random, order: Random(12) }
    }

    /// Every third row moves, and the model is saved; its rows in this order.
    pub(crate) fn save(&mut self, version: u64, shuffled: bool) -> Vec<u8> {
        for row in self.rows.values_mut().step_by(3) {
            row.iter_mut().for_each(|value| *value += 1e-3 * self.random.normal() as f32);
        }
        let mut ids: Vec<u64> = self.rows.keys().copied().collect();
        if shuffled {
            for at in (1..ids.len()).rev() {
                ids.swap(at, self.order.below(at as u64 + 1) as usize);
            }
        }
        let values: Vec<f32> = ids.iter().flat_map(|id| self.rows[id].iter().copied()).collect();
        let mut packed = Vec::new();
        ids.iter().for_each(|id| varint(*id, &mut packed));
        let mut out = vec![8];
        varint(version, &mut out);
        let slices = [field(1, &tensor(ids.len(), &values)), field(2, &packed)].concat();
        // Fields before it and behind it.
        [
            out,
            entry(3, "a", &tensor(40, &[0.25; 800])),
            entry(4, "emb", &slices),
            entry(3, "z", &tensor(9, &[1.5; 900])),
        ]
        .concat()
    }
}

pub(crate) fn name(version: u64) -> String {
    format!("version-{version}/variables-0-of-1.ckpt")
}

pub(crate) fn settled(settings: (&str, &str), shuffled: bool) -> Rest {
    let mut rest = Rest::with(|text| text.replace(settings.0, settings.1));
    let mut table = Table::new(ROWS);
    for version in 1..=4 {
        rest.write(&name(version), &table.save(version, shuffled));
    }
    rest.settle();
    rest
}

/// The whole file as a reader gets it, in pieces of this size.
fn whole(archive: &std::sync::Arc<Archive>, rest: &Rest, name: &str, piece: usize) -> Vec<u8> {
    let reader = archive.reader(&rest.stub(name).unwrap()).unwrap();
    let (mut all, mut buf) = (Vec::new(), vec![0; piece]);
    loop {
        match reader.read_at(all.len() as u64, &mut buf).unwrap() {
            0 => return all,
            count => all.extend_from_slice(&buf[..count]),
        }
    }
}

#[test]
fn rows_come_back_in_the_order_in_which_they_were_written() {
    for settings in [("cache_mib = 10240", "cache_mib = 10240"), ("cache_mib = 10240", "cache_mib = 0")] {
        let rest = settled(settings, true);
        let archive = rest.open();
        for version in 1..4 {
            let (name, written) = (name(version), &rest.written[&name(version)]);
            let (header, index) = (rest.object(&name).header().clone(), rest.object(&name).index().clone());
            assert_eq!((header.ordered, index.container.as_str()), (true, "elasticdl"));
            let table = index.tensors.iter().find(|t| t.path == "embedding_tables/emb").unwrap();
            assert!(table.coding.is_lossy() && table.tiles.len() > 1);
            assert!(version == 1 || table.stored() < (ROWS * WIDTH * 4 / 10) as u64, "{}", table.stored());
            let read = whole(&archive, &rest, &name, 100_000);
            assert_eq!(read, whole(&archive, &rest, &name, 7777));
            assert_eq!(read.len(), written.len());
            let (from, to) = (table.extent.start as usize, table.extent.end as usize);
            assert_eq!(read[..from], written[..from]);
            assert_eq!(read[to..], written[to..]);
            let floats = |bytes: &[u8]| -> Vec<f32> {
                bytes.chunks(4).map(|value| f32::from_le_bytes(value.try_into().unwrap())).collect()
            };
            let pairs = floats(&read[from..to]).into_iter().zip(floats(&written[from..to]));
            let error = pairs.map(|(a, b)| f64::from((a - b).abs())).fold(0.0, f64::max);
            assert!(error > 0.0 && error <= table.bound + 1e-9, "{error} {}", table.bound);
        }
    }
}

#[test]
fn exact_is_exact() {
    let rest = settled(("default_profile = \"balanced\"", "default_profile = \"exact\""), true);
    let archive = rest.open();
    for version in 1..4 {
        assert!(whole(&archive, &rest, &name(version), 50_000) == rest.written[&name(version)], "{version}");
    }
}

#[test]
fn rows_that_are_in_order_need_nothing() {
    let rest = settled(("cache_mib = 10240", "cache_mib = 10240"), false);
    let (shuffled, archive) = (settled(("cache_mib = 10240", "cache_mib = 10240"), true), rest.open());
    for version in 1..4 {
        assert!(!rest.object(&name(version)).header().ordered);
        assert_eq!(whole(&archive, &rest, &name(version), 50_000), rest.read(&name(version)).unwrap());
        // An order costs nothing but the ids, which are exact.
        let stored = |rest: &Rest| rest.object(&name(version)).index().tensors.iter().map(|t| t.stored()).sum::<u64>();
        assert_eq!(stored(&rest), stored(&shuffled));
    }
}

#[test]
fn what_a_parent_goes_from_under_keeps_its_order() {
    let rest = settled(("cache_mib = 10240", "cache_mib = 10240"), true);
    let archive = rest.open();
    let before = whole(&archive, &rest, &name(3), 50_000);
    archive.stop();
    drop(archive);
    for version in 1..3 {
        std::fs::remove_file(rest.path(&name(version))).unwrap();
    }
    rest.settle();
    assert!(rest.object(&name(3)).header().ordered);
    assert_eq!(rest.object(&name(3)).header().parent, None);
    assert_eq!(whole(&rest.open(), &rest, &name(3), 50_000), before);
}
