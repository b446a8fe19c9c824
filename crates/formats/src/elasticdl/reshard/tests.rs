use std::collections::BTreeMap;

use proptest::prelude::*;

use super::super::tests::{dense, info, model, table};
use super::*;

/// The content of files together: variables by name, rows by table and id.
#[derive(Debug, Default, PartialEq)]
struct Content {
    version: u64,
    dense: BTreeMap<String, (Vec<u64>, Vec<u8>)>,
    rows: BTreeMap<(String, u64), Vec<u8>>,
    infos: BTreeMap<String, Vec<u8>>,
}

fn content(files: &[Vec<u8>]) -> Content {
    let mut all = Content::default();
    for (index, file) in files.iter().enumerate() {
        let found = message::read(file, file.len() as u64).unwrap();
        let bytes = |range: &Range<u64>| file[range.start as usize..range.end as usize].to_vec();
        all.version = found.version;
        for d in &found.dense {
            assert_eq!(shard_of(&d.name, files.len() as u32) as usize, index);
            let twice = all.dense.insert(d.name.clone(), (d.array.dims.clone(), bytes(&d.array.content)));
            assert_eq!(twice, None);
        }
        for t in &found.tables {
            let values = bytes(&t.array.content);
            for (id, row) in t.ids.iter().zip(values.chunks(t.row() as usize)) {
                assert_eq!(id % files.len() as u64, index as u64);
                assert_eq!(all.rows.insert((t.name.clone(), *id), row.to_vec()), None);
            }
        }
        all.infos.extend(found.infos.iter().map(|info| (info.name.clone(), bytes(&info.message))));
    }
    all
}

fn reshard(files: &[Vec<u8>], count: u32) -> io::Result<Vec<Vec<u8>>> {
    let name = |at| format!("variables-{at}-of-{}.ckpt", files.len());
    let sources: Vec<Source> = files.iter().enumerate().map(|(at, file)| Source { name: name(at), file }).collect();
    let reshard = Reshard::new(&sources, count)?;
    let mut out = Vec::new();
    for index in 0..count {
        let mut bytes = Vec::new();
        reshard
            .write(index, &mut |piece| {
                bytes.extend_from_slice(piece);
                Ok(())
            })
            .unwrap();
        assert_eq!(bytes.len() as u64, reshard.size(index));
        out.push(bytes);
    }
    Ok(out)
}

/// Everything on one server.
fn whole(ids: &[u64], other: &[u64]) -> Vec<u8> {
    let rows = |ids: &[u64]| ids.iter().map(|id| (*id, vec![*id as f32, 1.0, -0.0])).collect::<Vec<_>>();
    let mut fields = vec![info("emb", 3), info("other", 3), dense("dense/kernel", &[2, 2], &[1.0, f32::NAN, 3.0, 4.0])];
    fields.extend([
        dense("dense/bias", &[1], &[1.0]),
        dense("out/kernel", &[1], &[2.0]),
        dense("out/bias", &[], &[3.0]),
    ]);
    fields.extend([("emb", ids), ("other", other)].iter().filter(|t| !t.1.is_empty()).map(|t| table(t.0, &rows(t.1))));
    model(40, &fields)
}

proptest! {
    #[test]
    fn nothing_is_lost_on_the_way_there_and_back(
        ids in prop::collection::hash_set(0u64..1 << 40, 0..60),
        other in prop::collection::hash_set(0u64..50, 0..30),
        counts in prop::collection::vec(1u32..9, 1..4),
    ) {
        let ids: Vec<u64> = ids.into_iter().collect();
        let start = vec![whole(&ids, &other.into_iter().collect::<Vec<_>>())];
        let expected = content(&start);
        let mut files = start;
        for count in counts {
            files = reshard(&files, count).unwrap();
            prop_assert_eq!(files.len(), count as usize);
            prop_assert_eq!(&content(&files), &expected);
        }
        let back = reshard(&files, 1).unwrap();
        prop_assert_eq!(&content(&back), &expected);
    }
}

#[test]
fn files_that_are_not_one_checkpoint_are_refused() {
    let row = |id: u64, width: usize| vec![(id, vec![1.0; width])];
    let w = |version| model(version, &[dense("w", &[1], &[1.0])]);
    for (files, words) in [
        (vec![w(40), model(41, &[dense("v", &[1], &[1.0])])], "of version 40 and variables-1-of-2.ckpt of version 41"),
        (vec![w(40), w(40)], "variable w is both in variables-0-of-2.ckpt and in variables-1-of-2.ckpt"),
        (vec![model(1, &[table("e", &row(7, 2))]), model(1, &[table("e", &row(7, 2))])], "row 7 of embedding table e"),
        (vec![model(1, &[table("e", &row(7, 2))]), model(1, &[table("e", &row(8, 3))])], "has other rows in"),
        (vec![model(1, &[table("e", &[row(7, 1), row(7, 1)].concat())])], "row 7 of embedding table e is both"),
        (vec![model(1, &[info("e", 2)]), model(1, &[info("e", 3)])], "embedding table e is not the same"),
        (vec![model(1, &[table("e", &row(-5i64 as u64, 1))])], "a row with a negative id"),
        (vec![b"PK\x03\x04 something else".to_vec()], "is no model as ElasticDL writes it"),
    ] {
        let Err(refusal) = reshard(&files, 2) else { panic!("{words}") };
        assert!(refusal.to_string().contains(words), "{refusal}");
    }
}
