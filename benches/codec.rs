//! Speed of the codecs, one core, in decoded bytes a second.
//!
//! `cargo bench --bench codec` runs divan; `cargo bench --bench codec -- --json [WORD...]` prints one JSON object per
//! line for each measurement (whose name has all these words), best of several rounds, with the ratio to a memcpy of the same tile measured in the same rounds. It counts the
//! thread's processor time, so that other load on the machine costs cache but not turns.

use std::hint::black_box;
use std::time::Duration;

use stepfs::codec::{Dtype, TILE_BYTES, lattice, lossless};

/// Elements of a tile of fp32.
const N: usize = TILE_BYTES / 4;

/// Rounds of the JSON mode, and how long each measures: enough to see past other load on the machine.
const ROUNDS: usize = 9;
const ROUND: Duration = Duration::from_millis(60);

/// Tiles worked on in turn: 32 MiB of weights, so that they come from memory as they do in use.
const TILES: usize = 64;

fn main() {
    if std::env::args().any(|arg| arg == "--json") {
        print_json();
    } else {
        divan::main();
    }
}

/// One tile's inputs and what they encode to.
struct Tile {
    old: Vec<u8>,
    new: Vec<u8>,
    keyframe: Vec<u8>,
    g: f64,
    parent: Vec<i32>,
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
            a: vec![0; N],
            payload: Vec::new(),
            with_parent: Vec::new(),
            alone: Vec::new(),
        };
        let mut r = vec![0; TILE_BYTES];
        let keyframe = Some(tile.keyframe.as_slice());
        lattice::quantize(Dtype::F32, &tile.old, keyframe, g, &mut tile.parent, &mut r, &mut Vec::new())
            .expect("finite");
        tile.payload = Work::default().lattice_encode(&tile).to_vec();
        lattice::quantize(Dtype::F32, &tile.new, keyframe, g, &mut tile.a, &mut r, &mut Vec::new()).expect("finite");
        lossless::encode(Dtype::F32, &tile.new, Some(&tile.old), &mut tile.with_parent);
        lossless::encode(Dtype::F32, &tile.new, None, &mut tile.alone);
        tile
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

    fn memcpy(&mut self, tile: &Tile) {
        self.clear();
        self.bytes.copy_from_slice(&tile.new);
        black_box(&self.bytes);
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

    fn add(&mut self, tile: &Tile) {
        self.clear();
        self.a.copy_from_slice(&tile.parent);
        lattice::decode_tile_add(&tile.payload, &mut self.a, &mut self.exceptions).expect("own payload");
        black_box(&self.a);
    }

    fn lattice_decode(&mut self, tile: &Tile) {
        self.add(tile);
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

type Job = (&'static str, fn(&mut Work, &Tile));

const LATTICE: [Job; 5] = [
    ("encode", |work, tile| {
        work.lattice_encode(tile);
    }),
    ("decode", Work::lattice_decode),
    ("quantize", Work::quantize),
    ("decode and add", Work::add),
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
fn speed(work: &mut Work, tiles: &[Tile], job: fn(&mut Work, &Tile)) -> f64 {
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

fn print_json() {
    let print = |codec: &str, job: &str, tiles: &[Tile], run: fn(&mut Work, &Tile), stored: &dyn Fn(&Tile) -> usize| {
        let name = format!("{codec}, {job}");
        if !std::env::args().skip_while(|arg| arg != "--json").skip(1).all(|word| name.contains(&word)) {
            return;
        }
        let mut work = Work::default();
        let (mut best, mut memcpy) = (0f64, 0f64);
        for _ in 0..ROUNDS {
            memcpy = memcpy.max(speed(&mut work, tiles, Work::memcpy));
            best = best.max(speed(&mut work, tiles, run));
        }
        let stored: usize = tiles.iter().map(stored).sum();
        let bits = stored as f64 * 8.0 / (tiles.len() * N) as f64;
        println!(
            "{{\"codec\": \"{codec}\", \"job\": \"{job}\", \"bits_per_element\": {bits:.4}, \
             \"bytes_per_second\": {best:.0}, \"memcpy_ratio\": {:.4}}}",
            best / memcpy
        );
    };
    for (name, c) in STEPS {
        let tiles = tiles(c);
        for (job, run) in LATTICE {
            print(&format!("lattice, {name}"), job, &tiles, run, &|tile| tile.payload.len());
        }
    }
    let tiles = tiles(1.0);
    for (job, run) in LOSSLESS {
        let stored = |tile: &Tile| {
            if job.ends_with("parent") { tile.with_parent.len() } else { tile.alone.len() }
        };
        print("lossless", job, &tiles, run, &stored);
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

#[divan::bench]
fn memcpy(bencher: divan::Bencher<'_, '_>) {
    bench(bencher, 1.0, Work::memcpy);
}

fn step_of(name: &str) -> f64 {
    STEPS.into_iter().find(|(step, _)| *step == name).map_or(1.0, |(_, c)| c)
}
