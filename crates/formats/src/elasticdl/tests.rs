//! Files as ElasticDL's servers write them, and files that only look like one.

use proptest::prelude::*;

use super::super::protobuf::{put_head, put_number};
use super::super::{InOrder, Order, describe};
use super::*;
use codec::entropy::varint;

/// A field that holds these bytes.
pub(crate) fn field(number: u64, bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    put_head(number, bytes.len() as u64, &mut out);
    out.extend_from_slice(bytes);
    out
}

fn number(field: u64, value: u64) -> Vec<u8> {
    let mut out = Vec::new();
    put_number(field, value, &mut out);
    out
}

fn array(dtype: u64, dims: &[u64], content: &[u8]) -> Vec<u8> {
    let dims: Vec<u8> = dims.iter().flat_map(|dim| field(2, &number(1, *dim))).collect();
    [number(1, dtype), field(2, &dims), field(4, content)].concat()
}

fn entry(of: u64, name: &str, value: &[u8]) -> Vec<u8> {
    field(of, &[field(1, name.as_bytes()), field(2, value)].concat())
}

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// A variable of floats.
pub(crate) fn dense(name: &str, dims: &[u64], values: &[f32]) -> Vec<u8> {
    entry(3, name, &array(1, dims, &floats(values)))
}

/// A table of floats with these rows.
pub(crate) fn table(name: &str, rows: &[(u64, Vec<f32>)]) -> Vec<u8> {
    let content: Vec<u8> = rows.iter().flat_map(|(_, row)| floats(row)).collect();
    let width = rows.first().map_or(0, |(_, row)| row.len() as u64);
    let mut ids = Vec::new();
    rows.iter().for_each(|(id, _)| varint::put(*id, &mut ids));
    entry(4, name, &[field(1, &array(1, &[rows.len() as u64, width], &content)), field(2, &ids)].concat())
}

/// A table's description, as in every file.
pub(crate) fn info(name: &str, dim: u64) -> Vec<u8> {
    field(2, &[field(1, name.as_bytes()), number(2, dim), field(3, b"uniform"), number(4, 1)].concat())
}

pub(crate) fn model(version: u64, fields: &[Vec<u8>]) -> Vec<u8> {
    [number(1, version), fields.concat()].concat()
}

/// As written by the client of version 0.2.0rc3: up to the kernel's bytes.
const REAL_START: [u8; 37] =
    *b"\x08\x28\x12\x12\x0a\x03emb\x10\x03\x1a\x07uniform\x20\x01\x1a\x9e\x01\x0a\x0aout/kernel";

fn sample() -> Vec<u8> {
    let rows = [(7, vec![7.0, 7.5]), (3, vec![3.0, 3.5]), (400, vec![4.0, 4.5])];
    model(
        40,
        &[info("emb", 2), dense("out/kernel", &[2, 3], &[0.5; 6]), table("emb", &rows), dense("bias", &[1], &[2.0])],
    )
}

#[test]
fn a_real_file_begins_as_ours_do() {
    let ours = model(40, &[info("emb", 3), dense("out/kernel", &[8, 4], &[1.0; 32])]);
    assert_eq!(ours[..REAL_START.len()], REAL_START);
    assert_eq!(
        ours[REAL_START.len()..][..17],
        *b"\x12\x8f\x01\x08\x01\x12\x08\x12\x02\x08\x08\x12\x02\x08\x04\x22\x80"
    );
}

#[test]
fn tensors_are_found() {
    let file = sample();
    let d = describe(&file).unwrap();
    assert_eq!(d.kind, Kind::ElasticDl);
    let found: Vec<_> = d.tensors.iter().map(|t| (t.path.as_str(), t.shape.as_slice(), t.role)).collect();
    let expected: [(&str, &[u64], Role); 3] = [
        ("dense_parameters/out/kernel", &[2, 3], Role::Weight),
        ("embedding_tables/emb", &[3, 2], Role::Weight),
        ("dense_parameters/bias", &[1], Role::Weight),
    ];
    assert_eq!(found, expected);
    let content = |at: usize| &file[d.tensors[at].extent.start as usize..d.tensors[at].extent.end as usize];
    assert_eq!(content(0), floats(&[0.5; 6]));
    assert_eq!(content(1), floats(&[7.0, 7.5, 3.0, 3.5, 4.0, 4.5]));
    assert_eq!(content(2), floats(&[2.0]));
    assert_eq!((d.tables.len(), d.tables[0].tensor), (1, 1));
}

#[test]
fn state_of_an_optimizer_and_statistics_are_no_weights() {
    let rows = [(1, vec![1.0])];
    let file = model(
        1,
        &[
            table("emb", &rows),
            table("emb-momentum", &rows),
            table("emb-2", &rows),
            table("other-m", &rows),
            dense("bn/moving_mean", &[1], &[1.0]),
            dense("exp_avg.w", &[1], &[1.0]),
        ],
    );
    let d = describe(&file).unwrap();
    let roles: Vec<Role> = d.tensors.iter().map(|t| t.role).collect();
    use Role::*;
    assert_eq!(roles, [Weight, Optimizer, Optimizer, Weight, Other, Optimizer]);
}

/// The same content in another order.
#[test]
fn rows_in_any_order_read_the_same() {
    let row = |id: u64| (id, vec![id as f32, -(id as f32), 0.25 * id as f32]);
    let ids = [5u64, 1, 9, 2, 3, 100_000, 8, 0];
    let rows: Vec<_> = ids.iter().map(|id| row(*id)).collect();
    let mut sorted = rows.clone();
    sorted.sort_by_key(|(id, _)| *id);
    let (file, other) = (model(3, &[table("emb", &rows)]), model(3, &[table("emb", &sorted)]));
    let (d, o) = (describe(&file).unwrap(), describe(&other).unwrap());
    assert!(!Order::of(&d).is_kept() && Order::of(&o).is_kept());
    let in_order = InOrder::new(&file, &d);
    let extent = &d.tensors[0].extent;
    let whole = |src: &dyn ReadAt| {
        let mut bytes = vec![0; file.len()];
        src.read_exact_at(&mut bytes, 0).unwrap();
        bytes
    };
    let bytes = whole(&in_order);
    assert_eq!(bytes[extent.start as usize..extent.end as usize], other[extent.start as usize..extent.end as usize]);
    assert_eq!(bytes[..extent.start as usize], file[..extent.start as usize]);
    assert_eq!(bytes[extent.end as usize..], file[extent.end as usize..]);
    // Any piece of it is that piece, and the pieces go back to where they were.
    for from in 0..file.len() {
        for to in from..=file.len() {
            let mut piece = vec![0; to - from];
            in_order.read_exact_at(&mut piece, from as u64).unwrap();
            assert_eq!(piece, bytes[from..to]);
        }
    }
    let mut back = bytes.clone();
    let order = Order::of(&d);
    let put = |range: std::ops::Range<u64>, place: u64| -> Result<(), ()> {
        let run = &bytes[range.start as usize..range.end as usize];
        back[place as usize..place as usize + run.len()].copy_from_slice(run);
        Ok(())
    };
    order.runs(0..file.len() as u64, put).unwrap();
    assert_eq!(back, file);
    assert!(in_order.read_exact_at(&mut [0; 2], file.len() as u64 - 1).is_err());
}

#[test]
fn a_table_that_has_grown_is_seen_as_it_was() {
    let rows = |ids: &[u64], by: f32| ids.iter().map(|id| (*id, vec![*id as f32 + by, by])).collect::<Vec<_>>();
    let of = |ids: &[u64], other: &[u64], by| {
        model(1, &[table("emb", &rows(ids, by)), dense("w", &[1], &[by]), table("other", &rows(other, by))])
    };
    let (before, after) = (of(&[9, 2, 5], &[1, 2], 0.0), of(&[7, 5, 1, 9, 2], &[2, 3, 4], 0.5));
    let (old, new) = (describe(&before).unwrap(), describe(&after).unwrap());
    let (view, seen) = InOrder::as_later_state(&after, &new, &old);
    let values = |path: &str| {
        let tensor = seen.tensors.iter().find(|t| t.path == path)?;
        let mut bytes = vec![0; tensor.bytes() as usize];
        view.read_exact_at(&mut bytes, tensor.extent.start).unwrap();
        Some((tensor.shape.clone(), bytes))
    };
    assert_eq!(values("embedding_tables/emb"), Some((vec![3, 2], floats(&[2.5, 0.5, 5.5, 0.5, 9.5, 0.5]))));
    assert_eq!(values("dense_parameters/w"), Some((vec![1], floats(&[0.5]))));
    // Row 1 is not in it any more.
    assert_eq!(values("embedding_tables/other"), None);
    let mut whole = vec![0; after.len()];
    view.read_exact_at(&mut whole, 0).unwrap();
    assert!(view.read_exact_at(&mut [0; 1], view.size()).is_err());
}

#[test]
fn what_is_no_model_to_its_last_byte_is_none() {
    let good = sample();
    let other = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut file = good.clone();
        change(&mut file);
        describe(&file).unwrap().kind
    };
    assert_eq!(other(&|_| {}), Kind::ElasticDl);
    let rows = |ids: &[u64]| ids.iter().map(|id| (*id, vec![1.0])).collect::<Vec<_>>();
    for (why, file) in [
        ("no tensor", model(40, &[info("emb", 2)])),
        ("a version only", vec![0x08, 0x28]),
        ("an unknown field", model(1, &[dense("w", &[1], &[1.0]), field(5, b"x")])),
        ("two versions", [model(1, &[dense("w", &[1], &[1.0])]), number(1, 2)].concat()),
        ("a negative version", [dense("w", &[1], &[1.0]), number(1, u64::MAX)].concat()),
        ("a name twice", model(1, &[dense("w", &[1], &[1.0]), dense("w", &[1], &[1.0])])),
        ("a shape that does not fit", model(1, &[dense("w", &[2], &[1.0])])),
        ("huge dimensions", model(1, &[dense("w", &[1 << 40, 1 << 40], &[1.0])])),
        ("a negative dimension", model(1, &[dense("w", &[u64::MAX, 1], &[1.0])])),
        ("too many dimensions", model(1, &[dense("w", &[1; 65], &[1.0])])),
        ("an id twice", model(1, &[table("emb", &rows(&[1, 2, 1]))])),
        ("a negative id", model(1, &[table("emb", &rows(&[1, -1i64 as u64]))])),
        ("fewer ids than rows", model(1, &[entry(4, "e", &field(1, &array(1, &[1, 1], &floats(&[1.0]))))])),
        ("strings", model(1, &[entry(3, "w", &array(7, &[1], b"abcd"))])),
        ("an unknown type", model(1, &[entry(3, "w", &array(77, &[1], b"abcd"))])),
        (
            "a name that is not UTF-8",
            model(1, &[field(3, &[field(1, b"\xff"), field(2, &array(1, &[1], b"abcd"))].concat())]),
        ),
        ("a tensor without a name", model(1, &[field(3, &field(2, &array(1, &[1], b"abcd")))])),
        ("content twice", model(1, &[entry(3, "w", &[array(1, &[1], b"abcd"), field(4, b"abcd")].concat())])),
        ("zeros behind it", [good.clone(), vec![0; 8]].concat()),
        ("text", b"\x0ahello world, this is a line\n".to_vec()),
    ] {
        let d = describe(&file).unwrap();
        assert_eq!(d.kind, Kind::Opaque, "{why}");
        assert!(d.tensors.is_empty() && d.tables.is_empty());
    }
    for end in 0..good.len() {
        // The rest may end between two fields: then it is a smaller model.
        let d = describe(&&good[..end]).unwrap();
        assert!(d.kind == Kind::Opaque || d.tensors.len() < 3, "{end}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn damage_never_panics_and_never_lies(at in 0usize..200, byte: u8, cut in 0usize..300) {
        let mut file = sample();
        let at = at % file.len();
        file[at] = byte;
        file.truncate(cut);
        let d = describe(&file).unwrap();
        for t in &d.tensors {
            prop_assert!(t.extent.start < t.extent.end && t.extent.end <= file.len() as u64);
            prop_assert_eq!(t.shape.iter().product::<u64>() * t.dtype.size() as u64, t.bytes());
        }
        prop_assert!(d.tensors.windows(2).all(|w| w[0].extent.end <= w[1].extent.start));
        let mut bytes = vec![0; file.len()];
        InOrder::new(&file, &d).read_exact_at(&mut bytes, 0).unwrap();
        let (mut a, mut b) = (bytes, file);
        a.sort_unstable();
        b.sort_unstable();
        prop_assert_eq!(a, b);
    }
}

#[test]
fn variables_are_where_elasticdl_looks_for_them() {
    // Computed with its own code.
    for (name, places) in
        [("dense/kernel", [0, 1, 5]), ("dense/bias", [1, 0, 2]), ("out/kernel", [0, 0, 4]), ("out/bias", [1, 1, 1])]
    {
        assert_eq!([2, 3, 7].map(|count| shard_of(name, count)), places, "{name}");
        assert_eq!(shard_of(name, 1), 0);
    }
}

#[test]
fn names_are_read_as_they_are_written() {
    let shard = Shard { index: 2, count: 13, ending: "ckpt" };
    assert_eq!(Shard::parse("variables-2-of-13.ckpt"), Some(shard));
    assert_eq!(Shard::parse("variables-0-of-1.chkpt").map(|shard| shard.name()), Some("variables-0-of-1.chkpt".into()));
    for other in [
        "variables-2-of-2.ckpt", "variables-0-of-0.ckpt", "variables-+1-of-2.ckpt", "variables-01-of-2.ckpt",
        "variables-0-of-2.ckpt.tmp", "variables-0-of-2", "variables-0-of-99999999999.ckpt", "variables--1-of-2.ckpt",
        "model.ckpt",
    ] {
        assert_eq!(Shard::parse(other), None, "{other}");
    }
}
