//! Speed of the codecs, one core, in decoded bytes a second.
//!
//! `cargo bench --bench codec` runs divan. `cargo bench --bench codec -- --json [WORD...]` prints one JSON object per
//! line for each measurement whose name has all these words: the best of several rounds. Each has its ratio to a memcpy
//! of the same tile in the same rounds. It counts the thread's processor time, so that other load on the machine costs
//! cache but not turns.

use std::hint::black_box;
use std::time::Duration;

use codec::Rows;
use codec::fused_decode::{self, From, LatticeRun, LogRun};
use codec::log::{Factors, FactorsBuilder, Grid};
use codec::moment::Rule;
use codec::rows::Base;
use codec::{Dtype, Integers, TILE_BYTES, lattice, log, lossless, moment, rows};

/// Elements of a tile of fp32.
const N: usize = TILE_BYTES / 4;

/// Rounds of the JSON mode, and how long each measures: enough to see past other load on the machine.
const ROUNDS: usize = 9;
const ROUND: Duration = Duration::from_millis(60);

/// Tiles worked on in turn: 32 MiB of weights, so that they come from memory as they do in use.
const TILES: usize = 64;
/// Of the others, which have more inputs each.
const SPECIAL_TILES: u64 = 16;

fn main() {
    if std::env::args().any(|arg| arg == "--json") {
        print_json();
    } else {
        divan::main();
    }
}

/// One tile's inputs and their payloads.
struct Tile {
    old: Vec<u8>,
    new: Vec<u8>,
    keyframe: Vec<u8>,
    g: f64,
    parent: Vec<i32>,
    parent_integers: Integers,
    a: Vec<i32>,
    payload: Vec<u8>,
    with_parent: Vec<u8>,
    alone: Vec<u8>,
}

struct Random(u64);

impl Random {
    fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 12) as f64 + 0.5) / (1u64 << 52) as f64
    }

    fn gauss(&mut self) -> f64 {
        let (u, v) = (self.unit(), self.unit());
        (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()
    }
}

impl Tile {
    /// Weights around .02 that move by 1e-4 in a step, quantized at `c` times the root mean square of that.
    fn new(seed: u64, c: f64) -> Tile {
        let mut random = Random(seed);
        let mut next = |from: Option<&[f32]>, sigma: f64| -> Vec<f32> {
            (0..N).map(|i| from.map_or(0.0, |from| from[i]) + (sigma * random.gauss()) as f32).collect()
        };
        let keyframe = next(None, 0.02);
        let old = next(Some(&keyframe), 1e-4);
        let new = next(Some(&old), 1e-4);
        let bytes = |values: Vec<f32>| values.into_iter().flat_map(f32::to_le_bytes).collect::<Vec<u8>>();
        let (keyframe, old, new) = (bytes(keyframe), bytes(old), bytes(new));
        let g = lattice::choose_g(Dtype::F32, &lattice::updates(Dtype::F32, &new, &old), c).expect("weights moved");
        let mut tile = Tile {
            old,
            new,
            keyframe,
            g,
            parent: vec![0; N],
            parent_integers: Integers::Wide(Vec::new()),
            a: vec![0; N],
            payload: Vec::new(),
            with_parent: Vec::new(),
            alone: Vec::new(),
        };
        let mut r = vec![0; TILE_BYTES];
        let keyframe = Some(tile.keyframe.as_slice());
        lattice::quantize(Dtype::F32, &tile.old, keyframe, g, &mut tile.parent, &mut r, &mut Vec::new())
            .expect("finite");
        tile.parent_integers = Integers::of(&tile.parent);
        tile.payload = Work::default().lattice_encode(&tile).to_vec();
        lattice::quantize(Dtype::F32, &tile.new, keyframe, g, &mut tile.a, &mut r, &mut Vec::new()).expect("finite");
        lossless::encode(Dtype::F32, &tile.new, Some(&tile.old), &mut tile.with_parent);
        lossless::encode(Dtype::F32, &tile.new, None, &mut tile.alone);
        tile
    }
}

/// Elements of a row of an embedding table, and of a weight's.
const EMBEDDING: usize = 64;
const WIDTH: usize = 1024;

/// Inputs of a tile that is no weight's, and their payloads.
struct Special {
    factors: Factors,
    /// Second moments, and their parent's q.
    v: Vec<u8>,
    parent_q: Vec<i32>,
    parent_integers: Integers,
    v_payload: Vec<u8>,
    v_alone: Vec<u8>,
    factors_only: Vec<u8>,
    /// First moments beside `v`.
    m: Vec<u8>,
    u_step: f64,
    m_payload: Vec<u8>,
    /// A table of which one row in five moved from its keyframe.
    table: Vec<u8>,
    keyframe: Vec<u8>,
    g: f64,
    zeros: Vec<i32>,
    table_payload: Vec<u8>,
}

/// Steps of second moments: an octave, and as many as leave the factors alone.
const OCTAVE: u32 = 1 << 16;
const COARSE: u32 = 1 << 18;

fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().copied().flat_map(f32::to_le_bytes).collect()
}

impl Special {
    /// Second moments: row scale times column scale times a lognormal, a hundred steps of beta .99 after the parent.
    /// Normal quotients. A table that moves by rows.
    fn new(seed: u64) -> Special {
        let mut random = Random(seed);
        let mut scales = |n: usize| (0..n).map(|_| (1.5 * random.gauss()).exp2()).collect::<Vec<f64>>();
        let (row, column) = (scales(N / WIDTH), scales(WIDTH));
        let mut near = |of: &dyn Fn(usize) -> f64, octaves: f64| -> Vec<f32> {
            (0..N).map(|i| (of(i) * (octaves * random.gauss()).exp2()) as f32).collect()
        };
        let old = near(&|i| 1e-9 * row[i / WIDTH] * column[i % WIDTH], 0.8);
        let new = near(&|i| old[i].into(), 0.4);
        let m: Vec<f32> = new.iter().map(|v| (f64::from(v.sqrt()) * 0.3 * random.gauss()) as f32).collect();
        let keyframe: Vec<f32> = (0..N).map(|_| (0.05 * random.gauss()) as f32).collect();
        let mut table = keyframe.clone();
        let mut moved = Vec::new();
        for row in table.chunks_mut(EMBEDDING) {
            if random.unit() > 0.2 {
                continue;
            }
            let scale = 1e-3 * (-5.0 * random.unit()).exp2();
            row.iter_mut().for_each(|w| *w += (scale * random.gauss()) as f32);
            moved.push(scale);
        }
        let (old, v, m) = (bytes_of(&old), bytes_of(&new), bytes_of(&m));
        let mut builder = FactorsBuilder::new(N / WIDTH, WIDTH);
        builder.add(Dtype::F32, 0, &old);
        let samples = moment::samples((Rule::Root, Dtype::F32), &m, &v);
        let u: Vec<f64> = samples.iter().map(|sample| sample.ratio).collect();
        let u_step = lattice::choose_g(Dtype::F32, &u, 1.0).expect("moments");
        let mut it = Special {
            factors: builder.finish(0),
            v,
            parent_q: vec![0; N],
            parent_integers: Integers::Wide(Vec::new()),
            v_payload: Vec::new(),
            v_alone: Vec::new(),
            factors_only: Vec::new(),
            m,
            u_step,
            m_payload: Vec::new(),
            table: bytes_of(&table),
            keyframe: bytes_of(&keyframe),
            g: rows::base_step(&moved).expect("rows moved"),
            zeros: vec![0; N],
            table_payload: Vec::new(),
        };
        let mut out = vec![0; TILE_BYTES];
        let grid = Grid { factors: &it.factors, first: 0 };
        log::quantize(Dtype::F32, &old, grid, OCTAVE, None, &mut it.parent_q, &mut out).expect("moments");
        it.parent_integers = Integers::of(&it.parent_q);
        let mut work = Work::default();
        it.factors_only = work.log_encode(&it, COARSE, false).to_vec();
        it.v_alone = work.log_encode(&it, OCTAVE, false).to_vec();
        it.v_payload = work.log_encode(&it, OCTAVE, true).to_vec();
        it.m_payload = work.moment_encode(&it).to_vec();
        it.table_payload = work.rows_encode(&it).to_vec();
        it
    }

    fn grid(&self) -> Grid<'_> {
        Grid { factors: &self.factors, first: 0 }
    }
}

/// Buffers used again for every tile, as the filesystem does.
#[derive(Default)]
struct Work {
    a: Vec<i32>,
    bytes: Vec<u8>,
    payload: Vec<u8>,
    exceptions: Vec<lattice::Exception>,
}

impl Work {
    fn clear(&mut self) {
        self.a.resize(N, 0);
        self.bytes.resize(TILE_BYTES, 0);
        self.payload.clear();
        self.exceptions.clear();
    }

    fn copy(&mut self, of: &[u8]) {
        self.clear();
        self.bytes.copy_from_slice(of);
        black_box(&self.bytes);
    }

    fn memcpy(&mut self, tile: &Tile) {
        self.copy(&tile.new);
    }

    fn quantize(&mut self, tile: &Tile) {
        self.clear();
        let keyframe = Some(tile.keyframe.as_slice());
        let (a, bytes) = (&mut self.a, &mut self.bytes);
        lattice::quantize(Dtype::F32, &tile.new, keyframe, tile.g, a, bytes, &mut self.exceptions).expect("finite");
        black_box(&self.bytes);
    }

    fn lattice_encode(&mut self, tile: &Tile) -> &[u8] {
        self.quantize(tile);
        lattice::encode_tile(&self.a, Some(&tile.parent), &self.exceptions, &mut self.payload).expect("fits");
        black_box(&self.payload)
    }

    fn reconstruct(&mut self, tile: &Tile) {
        self.clear();
        lattice::reconstruct(Dtype::F32, Some(&tile.keyframe), tile.g, &tile.a, &mut self.bytes).expect("lengths");
        black_box(&self.bytes);
    }

    fn lattice_decode(&mut self, tile: &Tile) {
        self.clear();
        let (k, from) = (Some(tile.keyframe.as_slice()), From::Integers(&tile.parent_integers));
        let run = LatticeRun { dtype: Dtype::F32, k, from, step: tile.g, payloads: &[(&tile.payload, tile.g)] };
        fused_decode::lattice(run, &mut self.bytes, &mut self.exceptions, None).expect("own payload");
        black_box(&self.bytes);
    }

    fn log_encode(&mut self, tile: &Special, unit: u32, parent: bool) -> &[u8] {
        self.clear();
        let (grid, keep) = (tile.grid(), parent.then_some(tile.parent_q.as_slice()));
        log::quantize(Dtype::F32, &tile.v, grid, unit, keep, &mut self.a, &mut self.bytes).expect("moments");
        black_box(&self.bytes);
        let parent = if parent { From::Integers(&tile.parent_integers) } else { From::Factors(grid) };
        log::encode_tile(&self.a, parent, &mut self.payload).expect("fits");
        black_box(&self.payload)
    }

    fn log_decode(&mut self, tile: &Special, unit: u32, parent: bool) {
        self.clear();
        let payload = match (parent, unit) {
            (true, _) => &tile.v_payload,
            (false, OCTAVE) => &tile.v_alone,
            _ => &tile.factors_only,
        };
        let from = if parent { From::Integers(&tile.parent_integers) } else { From::Factors(tile.grid()) };
        let run = LogRun { dtype: Dtype::F32, grid: tile.grid(), unit, from, payloads: &[payload] };
        fused_decode::log(run, &mut self.bytes, None).expect("own payload");
        black_box(&self.bytes);
    }

    fn moment_encode(&mut self, tile: &Special) -> &[u8] {
        self.clear();
        moment::quantize(
            (Rule::Root, Dtype::F32),
            &tile.m,
            &tile.v,
            (tile.u_step, 0.0),
            &mut self.a,
            &mut self.exceptions,
        )
        .expect("fits");
        lattice::encode_tile(&self.a, None, &self.exceptions, &mut self.payload).expect("fits");
        black_box(&self.payload)
    }

    fn moment_decode(&mut self, tile: &Special) {
        self.clear();
        fused_decode::moment((Rule::Root, Dtype::F32), &tile.v, tile.u_step, &tile.m_payload, &mut self.bytes)
            .expect("own payload");
        black_box(&self.bytes);
    }

    fn rows_encode(&mut self, tile: &Special) -> &[u8] {
        self.clear();
        let rows = Rows { width: EMBEDDING as u64, first: 0 };
        let base = Base { rows, k: Some(&tile.keyframe), g: tile.g, a: Some(&tile.zeros) };
        let (a, bytes) = (&mut self.a, &mut self.bytes);
        rows::quantize(Dtype::F32, &tile.table, base, 1.0, a, bytes, &mut self.exceptions).expect("finite");
        rows::encode_tile(&self.a, base.a, rows, &self.exceptions, &mut self.payload).expect("fits");
        black_box(&self.payload)
    }

    fn rows_decode(&mut self, tile: &Special) {
        self.clear();
        self.a.copy_from_slice(&tile.zeros);
        let rows = Rows { width: EMBEDDING as u64, first: 0 };
        rows::decode_tile_add(&tile.table_payload, &mut self.a, rows, &mut self.exceptions).expect("own payload");
        lattice::reconstruct(Dtype::F32, Some(&tile.keyframe), tile.g, &self.a, &mut self.bytes).expect("lengths");
        lattice::apply_exceptions(Dtype::F32, &self.exceptions, &mut self.bytes).expect("own exceptions");
        black_box(&self.bytes);
    }

    fn lossless_encode(&mut self, tile: &Tile, parent: bool) {
        self.clear();
        lossless::encode(Dtype::F32, &tile.new, parent.then_some(tile.old.as_slice()), &mut self.payload);
        black_box(&self.payload);
    }

    fn lossless_decode(&mut self, tile: &Tile, parent: bool) {
        self.clear();
        let payload = if parent { &tile.with_parent } else { &tile.alone };
        lossless::decode(Dtype::F32, payload, Some(&tile.old), &mut self.bytes).expect("own payload");
        black_box(&self.bytes);
    }
}

/// Steps in units of the update's root mean square: about 2 and .9 bits an element.
const STEPS: [(&str, f64); 2] = [("2 bits", 1.0), (".9 bits", 3.6)];

type Job<T = Tile> = (&'static str, fn(&mut Work, &T));

/// A job on one of the other tiles, and the size of the tile's payload.
type Measured = (Job<Special>, fn(&Special) -> usize);

const SPECIAL: [Measured; 10] = [
    (("log, factors only, encode", |work, tile| _ = work.log_encode(tile, COARSE, false)), |t| t.factors_only.len()),
    (("log, factors only, decode", |work, tile| work.log_decode(tile, COARSE, false)), |t| t.factors_only.len()),
    (("log, alone, encode", |work, tile| _ = work.log_encode(tile, OCTAVE, false)), |t| t.v_alone.len()),
    (("log, alone, decode", |work, tile| work.log_decode(tile, OCTAVE, false)), |t| t.v_alone.len()),
    (("log, with parent, encode", |work, tile| _ = work.log_encode(tile, OCTAVE, true)), |t| t.v_payload.len()),
    (("log, with parent, decode", |work, tile| work.log_decode(tile, OCTAVE, true)), |t| t.v_payload.len()),
    (("moment, encode", |work, tile| _ = work.moment_encode(tile)), |t| t.m_payload.len()),
    (("moment, decode", Work::moment_decode), |t| t.m_payload.len()),
    (("rows, encode", |work, tile| _ = work.rows_encode(tile)), |t| t.table_payload.len()),
    (("rows, decode", Work::rows_decode), |t| t.table_payload.len()),
];

const LATTICE: [Job; 4] = [
    ("encode", |work, tile| {
        work.lattice_encode(tile);
    }),
    ("decode", Work::lattice_decode),
    ("quantize", Work::quantize),
    ("reconstruct", Work::reconstruct),
];

const LOSSLESS: [Job; 4] = [
    ("encode with parent", |work, tile| work.lossless_encode(tile, true)),
    ("decode with parent", |work, tile| work.lossless_decode(tile, true)),
    ("encode alone", |work, tile| work.lossless_encode(tile, false)),
    ("decode alone", |work, tile| work.lossless_decode(tile, false)),
];

fn tiles(c: f64) -> Vec<Tile> {
    (0..TILES as u64).map(|seed| Tile::new(seed + 1, c)).collect()
}

/// Processor time of this thread so far.
fn processor_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a timespec of ours, and the call writes nothing else.
    let status = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    assert_eq!(status, 0, "no clock of processor time");
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Bytes a second of one round.
fn speed<T>(work: &mut Work, tiles: &[T], job: fn(&mut Work, &T)) -> f64 {
    let start = processor_time();
    let mut bytes = 0;
    loop {
        for tile in tiles {
            job(work, tile);
            bytes += TILE_BYTES;
        }
        let spent = processor_time() - start;
        if spent >= ROUND {
            return bytes as f64 / spent.as_secs_f64();
        }
    }
}

/// Prints one measurement, unless the words asked for are not in its name.
fn print<T>(
    (codec, job): (&str, &str),
    tiles: &[T],
    memcpy: fn(&mut Work, &T),
    run: fn(&mut Work, &T),
    stored: impl Fn(&T) -> usize,
) {
    let name = format!("{codec}, {job}");
    if !std::env::args().skip_while(|arg| arg != "--json").skip(1).all(|word| name.contains(&word)) {
        return;
    }
    let mut work = Work::default();
    let (mut best, mut copy) = (0f64, 0f64);
    for _ in 0..ROUNDS {
        copy = copy.max(speed(&mut work, tiles, memcpy));
        best = best.max(speed(&mut work, tiles, run));
    }
    let stored: usize = tiles.iter().map(stored).sum();
    let bits = stored as f64 * 8.0 / (tiles.len() * N) as f64;
    println!(
        "{{\"codec\": \"{codec}\", \"job\": \"{job}\", \"bits_per_element\": {bits:.4}, \
         \"bytes_per_second\": {best:.0}, \"memcpy_ratio\": {:.4}}}",
        best / copy
    );
}

fn print_json() {
    for (name, c) in STEPS {
        let tiles = tiles(c);
        for (job, run) in LATTICE {
            print((&format!("lattice, {name}"), job), &tiles, Work::memcpy, run, |tile| tile.payload.len());
        }
    }
    let tiles = tiles(1.0);
    for (job, run) in LOSSLESS {
        let stored = |tile: &Tile| {
            if job.ends_with("parent") { tile.with_parent.len() } else { tile.alone.len() }
        };
        print(("lossless", job), &tiles, Work::memcpy, run, stored);
    }
    let special: Vec<Special> = (0..SPECIAL_TILES).map(|seed| Special::new(seed + 1)).collect();
    for ((name, run), stored) in SPECIAL {
        let (codec, job) = name.rsplit_once(", ").unwrap_or((name, ""));
        print((codec, job), &special, |work, tile| work.copy(&tile.v), run, stored);
    }
}

/// One round over the tiles; the speed is of one tile.
fn bench(bencher: divan::Bencher<'_, '_>, c: f64, job: fn(&mut Work, &Tile)) {
    let tiles = tiles(c);
    let mut work = Work::default();
    let mut next = 0;
    bencher.counter(divan::counter::BytesCount::new(TILE_BYTES)).bench_local(|| {
        next = (next + 1) % tiles.len();
        job(&mut work, &tiles[next]);
    });
}

#[divan::bench(args = STEPS.iter().map(|s| s.0))]
fn lattice_encode(bencher: divan::Bencher<'_, '_>, step: &str) {
    bench(bencher, step_of(step), LATTICE[0].1);
}

#[divan::bench(args = STEPS.iter().map(|s| s.0))]
fn lattice_decode(bencher: divan::Bencher<'_, '_>, step: &str) {
    bench(bencher, step_of(step), LATTICE[1].1);
}

#[divan::bench(args = LOSSLESS.iter().map(|j| j.0))]
fn lossless(bencher: divan::Bencher<'_, '_>, job: &str) {
    let (_, run) = LOSSLESS.into_iter().find(|(name, _)| *name == job).expect("one of them");
    bench(bencher, 1.0, run);
}

#[divan::bench(args = SPECIAL.iter().map(|s| s.0.0))]
fn special(bencher: divan::Bencher<'_, '_>, name: &str) {
    let ((_, job), _) = SPECIAL.into_iter().find(|((job, _), _)| *job == name).expect("one of them");
    let tiles: Vec<Special> = (0..SPECIAL_TILES).map(|seed| Special::new(seed + 1)).collect();
    let (mut work, mut next) = (Work::default(), 0);
    bencher.counter(divan::counter::BytesCount::new(TILE_BYTES)).bench_local(|| {
        next = (next + 1) % tiles.len();
        job(&mut work, &tiles[next]);
    });
}

#[divan::bench]
fn memcpy(bencher: divan::Bencher<'_, '_>) {
    bench(bencher, 1.0, Work::memcpy);
}

fn step_of(name: &str) -> f64 {
    STEPS.into_iter().find(|(step, _)| *step == name).map_or(1.0, |(_, c)| c)
}
