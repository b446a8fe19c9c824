//! Speed of the published systems, one core, in bytes of checkpoint a second. `cargo bench --bench published [--
//! WORD...]` prints one JSON object for each system whose name has all these words. `fit` is a system's look at the
//! checkpoint, `encode` its encoding of the tiles after that, `both` the sum. Processor time, best of several rounds.

use std::hint::black_box;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use codec::{Dtype, TILE_BYTES};
use papers::registry::SystemId;
use papers::tile::{self, Before};
use papers::{Tensor, Tile};

const N: usize = TILE_BYTES / 4;
/// 32 MiB of weights, so that they come from memory as they do in use.
const TILES: usize = 64;
const WIDTH: u64 = 1024;
const ROUNDS: usize = 5;

/// Weights that moved, as bytes.
struct Weights {
    new: Vec<Arc<Vec<u8>>>,
    old: Vec<Arc<Vec<u8>>>,
}

impl Weights {
    /// Around .02, moved by 1e-4; the updates are as those of Adam, whose exponents spread over some octaves.
    fn new() -> Weights {
        let mut seed = 1u64;
        let mut unit = || {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((seed >> 12) as f64 + 0.5) / (1u64 << 52) as f64
        };
        let mut gauss = || (-2.0 * unit().ln()).sqrt() * (std::f64::consts::TAU * unit()).cos();
        let old: Vec<f32> = (0..TILES * N).map(|_| (0.02 * gauss()) as f32).collect();
        let new: Vec<f32> = old.iter().map(|old| old + (1e-4 * gauss()) as f32).collect();
        let tile = |values: &[f32]| Arc::new(values.iter().flat_map(|value| value.to_le_bytes()).collect());
        let bytes = |values: &[f32]| values.chunks(N).map(tile).collect();
        Weights { new: bytes(&new), old: bytes(&old) }
    }

    fn before(&self, number: usize) -> Before<'_> {
        Before { bytes: &self.old[number], bins: None }
    }
}

impl Tensor for Weights {
    fn name(&self) -> &str {
        "layer.weight"
    }

    fn rows(&self) -> (u64, u64) {
        ((TILES * N) as u64 / WIDTH, WIDTH)
    }

    fn tiles(&self) -> usize {
        TILES
    }

    fn tile(&self, number: usize) -> io::Result<Tile> {
        let values = tile::widen(Dtype::F32, &self.new[number]).expect("fp32");
        let previous = self.before(number).state(Dtype::F32);
        Ok(Tile { first: (number * N) as u64, values, previous, gradient: None })
    }
}

/// Processor time of this process so far: its pool has one thread, and nothing runs beside it.
fn processor_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a timespec of ours, and the call writes nothing else.
    let status = unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    assert_eq!(status, 0, "no clock of processor time");
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with("--")).collect();
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().expect("a thread");
    let weights = Weights::new();
    for id in SystemId::usual().filter(|id| words.iter().all(|word| id.to_string().contains(word))) {
        pool.install(|| measure(id, &weights));
    }
}

fn measure(id: SystemId, weights: &Weights) {
    let system = id.system();
    let mut best = [Duration::MAX; 4];
    let mut stored = 0;
    for _ in 0..ROUNDS {
        let start = processor_time();
        let fits = system.fit(&[weights], 1).expect("memory");
        let fitted = processor_time();
        let mut payloads = Vec::with_capacity(TILES);
        for number in 0..TILES {
            let (tile, mut payload) = (weights.tile(number).expect("memory"), Vec::new());
            let decoded = tile::encode(id, fits[0].as_ref(), Dtype::F32, &tile, &mut payload);
            black_box(decoded);
            payloads.push(payload);
        }
        let encoded = processor_time();
        for (number, payload) in payloads.iter().enumerate() {
            let before = Some(weights.before(number)).filter(|_| !payload.is_empty());
            black_box(tile::decode(Dtype::F32, payload, before, TILE_BYTES).expect("own payload"));
        }
        let decoded = processor_time();
        stored = payloads.iter().map(Vec::len).sum();
        for (best, took) in best.iter_mut().zip([fitted - start, encoded - fitted, encoded - start, decoded - encoded])
        {
            *best = took.min(*best);
        }
    }
    let [fit, encode, both, decode] = best.map(|took| (TILES * TILE_BYTES) as f64 / took.as_secs_f64());
    let bits = stored as f64 * 8.0 / (TILES * N) as f64;
    println!(
        "{{\"system\": \"{id}\", \"bits_per_element\": {bits:.4}, \"fit\": {fit:.0}, \"encode\": {encode:.0}, \
         \"both\": {both:.0}, \"decode\": {decode:.0}}}"
    );
}
