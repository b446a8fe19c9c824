//! Cost of the published systems on one core: seconds for Inshrinkerator's clusters, MB/s of f32 for encoding and
//! decoding.
//!
//!     cargo run --release --example published_speed [MILLIONS | FILE.safetensors]
//!
//! Of so many million bell-shaped weights (default 100), or of all f32 tensors of a file, one after the other.
//! Everything runs on one thread; times are that thread's processor time, so that other load costs cache but not
//! turns.

use std::error::Error;
use std::io;
use std::path::Path;

use safetensors::tensor::{Dtype, SafeTensors};
use stepfs::published::check_n_run::{CheckNRun, Method, Search};
use stepfs::published::delta_dnn::DeltaDnn;
use stepfs::published::gobo::Gobo;
use stepfs::published::inshrinkerator::sketch::{Histogram, Sketch};
use stepfs::published::inshrinkerator::{Config, Inshrinkerator, kmeans};
use stepfs::published::qd_compressor::QdCompressor;
use stepfs::published::{State, System, Tensor, Tile};

/// Elements of a tile of f32.
const TILE: usize = 512 * 1024 / 4;
/// Values that systems are timed with; the clusters get all.
const MOST: usize = 8_000_000;
/// Width of a row where none is of interest.
const WIDTH: usize = 64;
/// The change from one state to the next, as a part of the weights.
const UPDATE: f32 = 0.02;

fn main() -> Result<(), Box<dyn Error>> {
    let argument = std::env::args().nth(1).unwrap_or_else(|| "100".to_string());
    let values = match argument.parse::<usize>() {
        Ok(millions) => weights(millions * 1_000_000, 0.02, 1),
        Err(_) => read(Path::new(&argument))?,
    };
    println!("{} million values", values.len() / 1_000_000);
    clusters(&values);
    let most = &values[..values.len().min(MOST)];
    for width in [16, 64, 256, 1024] {
        for bits in [2, 3, 4, 8] {
            let Some(system) = CheckNRun::new(bits) else { continue };
            let bins = if bits <= 3 { 25 } else { 45 };
            measure(&system, most, width)?;
            if bits < 8 {
                measure(&system.with(Method::Adaptive(Search { bins, percent: 100 })), most, width)?;
            }
        }
    }
    let mut others: Vec<Box<dyn System>> = Vec::new();
    for bins in [8, 32] {
        others.extend(Inshrinkerator::new(Config::new(bins)).map(|system| Box::new(system) as Box<dyn System>));
    }
    others.extend(QdCompressor::new(8, 256).map(|system| Box::new(system) as Box<dyn System>));
    others.extend(DeltaDnn::new(1e-4).map(|system| Box::new(system) as Box<dyn System>));
    others.extend(Gobo::new(3).map(|system| Box::new(system) as Box<dyn System>));
    others.iter().try_for_each(|system| measure(system.as_ref(), most, WIDTH))?;
    Ok(())
}

/// Quantiles and clusters of all values.
fn clusters(values: &[f32]) {
    let from = processor_time();
    let mut sketch = Sketch::default();
    sketch.add(values.iter().map(|value| value.abs()));
    let quantile = sketch.quantile(0.3);
    println!("quantile {quantile:.4}: {:.2} s", processor_time() - from);
    for bins in [8, 32] {
        let from = processor_time();
        let mut histogram = Histogram::default();
        histogram.add(values);
        let counted = processor_time();
        let points = histogram.points();
        let centroids = kmeans::cluster(&points, &kmeans::weights(&points, 0.5), bins);
        let end = processor_time();
        println!(
            "{} clusters of {} buckets: {:.2} s, of which counting {:.2} s",
            centroids.len(),
            points.len(),
            end - from,
            counted - from
        );
    }
}

/// Some values as rows of one tensor, and the state before as it was decoded.
struct Weights<'a> {
    values: &'a [f32],
    width: usize,
    previous: Option<Vec<State>>,
}

impl Tensor for Weights<'_> {
    fn name(&self) -> &str {
        "mlp.weight"
    }

    fn rows(&self) -> (u64, u64) {
        ((self.values.len() / self.width) as u64, self.width as u64)
    }

    fn tiles(&self) -> usize {
        self.values.len().div_ceil(TILE)
    }

    fn tile(&self, number: usize) -> io::Result<Tile> {
        let range = number * TILE..self.values.len().min((number + 1) * TILE);
        Ok(Tile {
            first: range.start as u64,
            values: self.values[range].to_vec().into(),
            previous: self.previous.as_ref().map(|states| states[number].clone()),
            gradient: None,
        })
    }
}

/// Two states of a chain: the second is a difference to the first.
fn measure(system: &dyn System, values: &[f32], width: usize) -> Result<(), Box<dyn Error>> {
    let values = &values[..values.len() / width * width];
    let (mut states, mut line) = (None, format!("{:<26} rows of {width:>4}:", system.name()));
    let noise = weights(values.len(), UPDATE, 2);
    let later: Vec<f32> = values.iter().zip(&noise).map(|(value, noise)| value + 0.02 * noise).collect();
    for (word, values) in [("first", values), ("next", &later)] {
        let tensor = Weights { values, width, previous: states.take() };
        let mb = values.len() as f64 * 4e-6;
        let from = processor_time();
        let fit = system.fit(&[&tensor], 0)?.remove(0);
        let fitted = processor_time() - from;
        let (mut encoding, mut decoding, mut bytes, mut after) = (0.0, 0.0, 0, Vec::new());
        for number in 0..tensor.tiles() {
            let tile = tensor.tile(number)?;
            let mut payload = Vec::new();
            let from = processor_time();
            let state = system.encode(&fit, &tile, &mut payload).ok_or("not finite")?;
            let encoded = processor_time();
            let decoded = system.decode(&payload, tile.previous.as_ref(), tile.values.len())?;
            decoding += processor_time() - encoded;
            encoding += encoded - from;
            bytes += payload.len();
            if decoded != state {
                return Err(format!("{} does not decode to what it encoded", system.name()).into());
            }
            after.push(state);
        }
        line += &format!(
            "  {word}: fit {:>6.0} encode {:>5.0} decode {:>5.0} MB/s, {:.2} bits",
            mb / fitted.max(1e-9),
            mb / encoding,
            mb / decoding,
            8.0 * bytes as f64 / values.len().max(1) as f64
        );
        states = Some(after);
    }
    println!("{line}");
    Ok(())
}

/// Bell-shaped values of this deviation: sums of four uniform ones.
fn weights(count: usize, deviation: f32, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let one = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let mixed = (state ^ state >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let parts = [mixed >> 48, mixed >> 32 & 0xffff, mixed >> 16 & 0xffff, mixed & 0xffff];
        // Each of them has variance 1/12, in units of 2^16.
        (parts.iter().sum::<u64>() as f32 / 65536.0 - 2.0) * 1.732 * deviation
    };
    (0..count).map(one).collect()
}

/// All f32 tensors of a file.
fn read(path: &Path) -> Result<Vec<f32>, Box<dyn Error>> {
    let bytes = std::fs::read(path)?;
    let mut values = Vec::new();
    for (_, view) in SafeTensors::deserialize(&bytes)?.tensors() {
        if view.dtype() == Dtype::F32 {
            values.extend(view.data().as_chunks::<4>().0.iter().map(|&word| f32::from_le_bytes(word)));
        }
    }
    Ok(values)
}

/// Seconds of processor time that this thread has had.
fn processor_time() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes one timespec, which is there.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}
