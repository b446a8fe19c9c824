//! 1,000 nodes with 1,000 checkpoints each, in memory: `cargo test --release --lib -- --ignored --nocapture thousand_nodes`.

use std::sync::Mutex;
use std::time::Instant;

use super::*;
use crate::remote::journal::{Encoding, Kind, Record, Shown};
use crate::remote::view::View;

const NODES: u64 = 1_000;
const CHECKPOINTS: u64 = 1_000;
/// The object of a checkpoint of 1 GB, at 4% of its size.
const OBJECT_BYTES: u64 = 40 << 20;
/// Days of a month, and the seconds between two looks of a node whose programs look at nothing.
const DAYS: f64 = 30.0;
const IDLE_SECONDS: f64 = 30.0;

/// US dollars of S3 Standard in us-east-1 (https://aws.amazon.com/s3/pricing): a thousand requests that put or list, a
/// thousand that get, and a GB for a month.
const PUT_OR_LIST: f64 = 0.005;
const GET: f64 = 0.0004;
const STORAGE: f64 = 0.023;

fn id(node: u64, number: u64) -> Id {
    let mut id = [1; 16];
    id[..8].copy_from_slice(&(node << 32 | number).to_le_bytes());
    // Ids are random, so they do not compress.
    let half = xxh3_64(&id[..8]).to_le_bytes();
    id[8..].copy_from_slice(&half);
    Id(id)
}

fn checkpoint(node: u64, number: u64) -> [Record; 2] {
    let (id, parent) = (id(node, number), (!number.is_multiple_of(32)).then(|| id(node, number - 1)));
    let hash = u128::from(xxh3_64(&id.0)) << 64 | u128::from(xxh3_64(&id.0[..9]));
    let time = number * NODES + node + 1;
    let content = Content::Object { owner: name(node), id };
    let modified_ns = 1_700_000_000_000_000_000 + time as i64 * 987_654_321;
    let (mode, uid, gid, len, identity) = (0o644, 1000, 1000, 1 << 30, 100_000 + time);
    let shown = Shown { mode, uid, gid, len, modified_ns, identity, content };
    let path = format!("run/step_{number:06}/rank_{node:04}.pt").into();
    [Record::Object(Encoding { id, parent, hash, len: OBJECT_BYTES, lossy: true }), Record::Put { time, path, shown }]
}

fn name(node: u64) -> String {
    format!("host-{node:04}-1a2b3c4d")
}

fn segment(node: u64, sequence: u64, kind: Kind, records: Vec<Record>) -> Segment {
    Segment { kind, store: id(node, 0), node: name(node), epoch: 1_700_000_000, sequence, records }
}

fn put(place: &Memory, segment: &Segment) {
    place.set(&segment.name(), Some(segment.encode().unwrap()));
    let former =
        segment.sequence.checked_sub(1).map(|sequence| super::super::journal::Place { sequence, ..segment.place() });
    former.into_iter().for_each(|former| place.set(&former.head(&segment.node), None));
    place.set(&segment.place().head(&segment.node), Some(Vec::new()));
}

fn resident_bytes() -> u64 {
    let pages: u64 = fs::read_to_string("/proc/self/statm").unwrap().split(' ').nth(1).unwrap().parse().unwrap();
    pages * 4096
}

fn bytes_of(place: &Memory) -> u64 {
    place.names().iter().filter(|(name, _)| name.contains("/journal/")).map(|(_, bytes)| bytes.len() as u64).sum()
}

#[test]
#[ignore = "takes a minute and a few GB; prints figures"]
fn a_thousand_nodes_with_a_thousand_checkpoints() {
    let place = Memory::default();
    for node in 0..NODES {
        let records = (0..CHECKPOINTS - 1).flat_map(|number| checkpoint(node, number)).collect();
        put(&place, &segment(node, 0, Kind::Snapshot, records));
    }
    let (journals, before, begun) = (bytes_of(&place), resident_bytes(), Instant::now());
    let view: Mutex<View> = Mutex::default();
    Reader::refresh(&place, &view).unwrap();
    println!(
        "a new node reads all: {} requests, {:.0} MB, {:.1?}; its view takes {:.2} GB",
        place.requests(),
        journals as f64 / 1e6,
        begun.elapsed(),
        (resident_bytes() - before) as f64 / 1e9
    );
    assert_eq!(lock(&view).files().count() as u64, NODES * (CHECKPOINTS - 1));
    let requests = |act: &dyn Fn()| {
        let before = place.requests();
        act();
        place.requests() - before
    };
    let idle = requests(&|| Reader::look(&place, &view).unwrap());
    println!("a look without news: {idle} request");
    let news = segment(7, 1, Kind::Changes, checkpoint(7, CHECKPOINTS - 1).into());
    let news_bytes = news.encode().unwrap().len();
    put(&place, &news);
    let one = requests(&|| Reader::look(&place, &view).unwrap());
    println!("a look with a checkpoint of one node: {one} requests, {news_bytes} bytes");
    for node in (0..NODES).filter(|node| *node != 7) {
        put(&place, &segment(node, 1, Kind::Changes, checkpoint(node, CHECKPOINTS - 1).into()));
    }
    let begun = Instant::now();
    let all = requests(&|| Reader::look(&place, &view).unwrap());
    println!("a look with a checkpoint of each node: {all} requests, {:.1?}", begun.elapsed());
    assert_eq!(lock(&view).files().count() as u64, NODES * CHECKPOINTS);
    // Far below a request for each node.
    assert!(idle == 1 && one <= 2 && all <= NODES + 1, "{idle} {one} {all}");
    price(idle, all - 1);
}

/// What a month costs in which all nodes put all their checkpoints. Half of the objects are there on average.
fn price(idle: u64, gets: u64) {
    let nodes = NODES as f64;
    let looks = nodes * idle as f64 * DAYS * 86_400.0 / IDLE_SECONDS;
    // An object, a segment, a head; a list before each of these pushes: of the closed file, its object, and its removal.
    // Deleting costs nothing.
    let parts = OBJECT_BYTES.div_ceil(8 << 20) + 2;
    let puts = nodes * CHECKPOINTS as f64 * (parts + 2) as f64;
    let lists = looks + 3.0 * nodes * CHECKPOINTS as f64;
    let gets = nodes * CHECKPOINTS as f64 * gets as f64;
    let stored = nodes * CHECKPOINTS as f64 * OBJECT_BYTES as f64 / 1e9 / 2.0;
    let dollars = [puts / 1e3 * PUT_OR_LIST, lists / 1e3 * PUT_OR_LIST, gets / 1e3 * GET, stored * STORAGE];
    println!(
        "a month: {:.0} million puts ${:.0}, {:.0} million lists ${:.0}, {:.0} million gets ${:.0}, {stored:.0} GB ${:.0}",
        puts / 1e6,
        dollars[0],
        lists / 1e6,
        dollars[1],
        gets / 1e6,
        dollars[2],
        dollars[3]
    );
}
