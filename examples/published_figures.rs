//! Figures of the published systems that need real checkpoints and no mount, as JSON. `scripts/compare_papers.py`
//! puts them beside the papers'.
//!
//!     published_figures lc FILE...         LC-Checkpoint's figure 4: shares of buckets, promotion and Huffman codes
//!     published_figures rows FILE          Check-N-Run's figures 9 to 11: mean l2 error of rows by method, bits,
//!     bins, ratio
//!     published_figures modified FILE...   its figures 15 and 16 without quantization: rows modified, by policy
//!     published_figures stages BINS FILE...   Inshrinkerator's figure 12: bytes by stages of its delta encoder
//!     published_figures bins DIR FILE      its table 7: writes each method's decoded weights, for each number of
//!     bins
//!
//! Files are torch.save's or safetensors, each the successor of the one before. Only weights count.

use std::error::Error;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

use formats::{ReadAt, Role, describe};
use papers::check_n_run::{Method, Search, l2_distance, quantized, wants_baseline};
use papers::gobo::Gobo;
use papers::inshrinkerator::{Coding, Config, Inshrinkerator, Layer, kmeans};
use papers::lc::Lc;
use papers::{Policy, State, System, Tensor, Tile, tile};
use serde_json::{Value, json};

/// Elements of a tile of f32, as in an object.
const TILE: usize = 512 * 1024 / 4;
/// Bits of an f32.
const BITS: f64 = 32.0;

type Fallible<T> = Result<T, Box<dyn Error>>;

fn main() -> Fallible<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let answer = match words.as_slice() {
        ["lc", files @ ..] if files.len() > 1 => lc(files)?,
        ["rows", file] => rows(file)?,
        ["modified", files @ ..] if files.len() > 1 => modified(files)?,
        ["stages", bins, files @ ..] if files.len() > 1 => stages(bins.parse()?, files)?,
        ["bins", folder, file] => bins(Path::new(folder), file)?,
        _ => return Err("published_figures lc|rows|modified|stages|bins ...: see the head of its source".into()),
    };
    println!("{answer}");
    Ok(())
}

/// A weight of a checkpoint.
struct Weight {
    paths: Vec<String>,
    shape: Vec<u64>,
    values: Vec<f32>,
    gradient: Option<Vec<f32>>,
}

impl Weight {
    fn width(&self) -> usize {
        match self.shape.as_slice() {
            [_, rest @ ..] if !rest.is_empty() => rest.iter().product::<u64>() as usize,
            _ => self.values.len(),
        }
    }
}

/// The weights of a checkpoint that f32 holds, in the order of the file.
fn weights(path: &str) -> Fallible<Vec<Weight>> {
    let file = File::open(path)?;
    let description = describe(&file)?;
    let read = |tensor: &formats::Tensor| -> Fallible<Vec<f32>> {
        let mut bytes = vec![0; (tensor.extent.end - tensor.extent.start) as usize];
        file.read_exact_at(&mut bytes, tensor.extent.start)?;
        Ok(tile::widen(tensor.dtype, &Arc::new(bytes)).ok_or("a type that f32 does not hold")?.to_vec())
    };
    let mut found = Vec::new();
    for (index, tensor) in description.tensors.iter().enumerate() {
        if tensor.role != Role::Weight || tensor.lossless || !tile::is_for(tensor.dtype) {
            continue;
        }
        let gradient = description
            .tensors
            .iter()
            .find(|other| other.of == Some(index) && other.role == Role::FirstMoment && tile::is_for(other.dtype));
        let paths = [vec![tensor.path.clone()], tensor.aliases.clone()].concat();
        let gradient = gradient.map(read).transpose()?;
        found.push(Weight { paths, shape: tensor.shape.clone(), values: read(tensor)?, gradient });
    }
    if found.is_empty() {
        return Err(format!("{path}: no weights found").into());
    }
    Ok(found)
}

/// A weight beside its decoded state before, as a system sees it.
struct Seen<'a> {
    weight: &'a Weight,
    previous: Option<&'a [State]>,
}

impl Tensor for Seen<'_> {
    fn name(&self) -> &str {
        &self.weight.paths[0]
    }

    fn rows(&self) -> (u64, u64) {
        let width = self.weight.width();
        ((self.weight.values.len() / width.max(1)) as u64, width as u64)
    }

    fn tiles(&self) -> usize {
        self.weight.values.len().div_ceil(TILE)
    }

    fn tile(&self, number: usize) -> io::Result<Tile> {
        let range = number * TILE..self.weight.values.len().min((number + 1) * TILE);
        Ok(Tile {
            first: range.start as u64,
            values: self.weight.values[range.clone()].to_vec().into(),
            previous: self.previous.map(|states| states[number].clone()),
            gradient: self.weight.gradient.as_ref().map(|gradient| gradient[range].to_vec().into()),
        })
    }
}

/// States of all tiles of all weights.
type States = Vec<Vec<State>>;

/// Encodes a checkpoint. Returns all payloads, each decoded again and compared, and the decoded states.
fn encode(
    system: &dyn System,
    weights: &[Weight],
    before: Option<&States>,
    position: u32,
) -> Fallible<(Vec<Vec<u8>>, States)> {
    let seen: Vec<Seen> = weights
        .iter()
        .enumerate()
        .map(|(n, weight)| Seen { weight, previous: before.map(|states| states[n].as_slice()) })
        .collect();
    let tensors: Vec<&dyn Tensor> = seen.iter().map(|tensor| tensor as &dyn Tensor).collect();
    let fits = system.fit(&tensors, position)?;
    let (mut payloads, mut states) = (Vec::new(), Vec::new());
    for (tensor, fit) in tensors.iter().zip(&fits) {
        let mut after = Vec::new();
        for number in 0..tensor.tiles() {
            let tile = tensor.tile(number)?;
            let mut payload = Vec::new();
            let state = papers::encode(fit.as_ref(), &tile, &mut payload).ok_or("a value that is not finite")?;
            if papers::decode(system, &payload, tile.previous.as_ref(), tile.values.len())? != state {
                return Err(format!("{system:?} does not decode to what it encoded").into());
            }
            payloads.push(payload);
            after.push(state);
        }
        states.push(after);
    }
    Ok((payloads, states))
}

/// A first checkpoint in full precision.
fn whole(weights: &[Weight]) -> States {
    let tiles = |weight: &Weight| {
        let states = weight.values.chunks(TILE).map(|values| State { values: values.to_vec().into(), bins: None });
        states.collect()
    };
    weights.iter().map(tiles).collect()
}

/// Elements in all.
fn elements(weights: &[Weight]) -> usize {
    weights.iter().map(|weight| weight.values.len()).sum()
}

fn mean(values: impl IntoIterator<Item = f64>) -> f64 {
    let (sum, count) = values.into_iter().fold((0.0, 0), |(sum, count), value| (sum + value, count + 1));
    sum / f64::from(count.max(1))
}

/// Shares of fp32, means over the differences.
fn lc(files: &[&str]) -> Fallible<Value> {
    // Buckets that have elements, and bytes in all, of each difference.
    let chain = |bits: Option<u8>| -> Fallible<Vec<(u64, usize)>> {
        let system = Lc { bits, by_tensor: false };
        let mut states = whole(&weights(files[0])?);
        let mut found = Vec::new();
        for (position, file) in files.iter().enumerate().skip(1) {
            let (payloads, after) = encode(&system, &weights(file)?, Some(&states), position as u32)?;
            let buckets = Lc::buckets(&payloads[0])?;
            found.push((buckets, payloads.iter().map(Vec::len).sum()));
            states = after;
        }
        Ok(found)
    };
    let n = elements(&weights(files[0])?) as f64;
    let share = |bytes: usize| 8.0 * bytes as f64 / (BITS * n);
    // One more bucket for unchanged weights.
    let fixed = |bits: f64, buckets: f64| (bits * n + BITS * buckets) / (BITS * n);
    let all = chain(None)?;
    let e = |&(buckets, _): &(u64, usize)| fixed((buckets as f64 + 1.0).log2(), buckets as f64 + 1.0);
    let mut promoted = Vec::new();
    for bits in [2, 3, 4] {
        let found = chain(Some(bits))?;
        let eph = mean(found.iter().map(|&(_, bytes)| share(bytes)));
        promoted.push(json!({ "bits": bits, "ep": fixed(bits.into(), f64::from(1 << bits)), "eph": eph }));
    }
    Ok(json!({
        "differences": all.len(),
        "parameters": n,
        "buckets": mean(all.iter().map(|&(buckets, _)| buckets as f64 + 1.0)),
        "e": mean(all.iter().map(e)),
        "eh": mean(all.iter().map(|&(_, bytes)| share(bytes))),
        "promoted": promoted,
    }))
}

/// The matrices of Check-N-Run's figures: embeddings, or all if there are none.
fn tables(weights: &[Weight]) -> Vec<&Weight> {
    let embedding = |weight: &&Weight| Layer::of(&Seen { weight, previous: None }) == Layer::Embedding;
    let found: Vec<&Weight> = weights.iter().filter(embedding).collect();
    if found.is_empty() { weights.iter().filter(|weight| weight.shape.len() > 1).collect() } else { found }
}

/// Mean l2 errors, and gains over asymmetric quantization as parts of its error.
fn rows(file: &str) -> Fallible<Value> {
    let all = weights(file)?;
    let tables = tables(&all);
    let lengths: Vec<usize> =
        tables.iter().flat_map(|table| vec![table.width(); table.values.len() / table.width().max(1)]).collect();
    let x: Vec<f32> = tables.iter().flat_map(|table| table.values.iter().copied()).collect();
    let error = |method, bits| l2_distance(&x, &quantized(method, bits, &x, &lengths), &lengths);
    let mut answer = Vec::new();
    for bits in [2, 3, 4, 8] {
        let plain = error(Method::Asymmetric, bits);
        let gain = |search| 1.0 - error(Method::Adaptive(search), bits) / plain;
        let published = Search::published(bits);
        let mut one = json!({ "bits": bits, "symmetric": error(Method::Symmetric, bits), "asymmetric": plain });
        if bits < 8 {
            one["adaptive"] = json!(error(Method::Adaptive(published), bits));
            one["k_means"] = json!(l2_distance(&x, &clustered(&x, &lengths, 1 << bits), &lengths));
            let by_bins = |bins: u16| json!([bins, gain(Search { bins, percent: 100 })]);
            one["by_bins"] = (1..=10).map(|n| by_bins(5 * n)).collect();
            let by_ratio = |percent: u8| json!([percent, gain(Search { percent, ..published })]);
            one["by_ratio"] = (1..=10).map(|n| by_ratio(10 * n)).collect();
        }
        answer.push(one);
    }
    Ok(json!({ "rows": lengths.len(), "widths": tables.iter().map(|t| t.width()).collect::<Vec<_>>(), "bits": answer }))
}

/// Each row by k-means of its own, the values counting alike.
fn clustered(x: &[f32], lengths: &[usize], k: usize) -> Vec<f32> {
    let (mut answer, mut left) = (Vec::with_capacity(x.len()), x);
    for &length in lengths {
        let (row, rest) = left.split_at(length);
        left = rest;
        let mut sorted: Vec<f64> = row.iter().map(|&value| f64::from(value)).collect();
        sorted.sort_by(f64::total_cmp);
        let points: Vec<(f64, u64)> =
            sorted.chunk_by(|a, b| a == b).map(|equal| (equal[0], equal.len() as u64)).collect();
        let centroids = kmeans::cluster(&points, &kmeans::weights(&points, 1.0), k);
        answer.extend(row.iter().map(|&value| nearest(&centroids, value)));
    }
    answer
}

fn nearest(centroids: &[f64], value: f32) -> f32 {
    let distance = |centroid: &f64| (centroid - f64::from(value)).abs();
    let best = centroids.iter().min_by(|a, b| distance(a).total_cmp(&distance(b)));
    best.copied().unwrap_or(0.0) as f32
}

/// Size of each checkpoint, and of all that a restore needs, in parts of the embeddings, by policy.
fn modified(files: &[&str]) -> Fallible<Value> {
    let mut answer = json!({});
    for (name, policy) in
        [("one-shot", Policy::OneShot), ("consecutive", Policy::Consecutive), ("intermittent", Policy::Intermittent)]
    {
        let (mut baseline, mut previous): (Vec<Weight>, Vec<Weight>) = (Vec::new(), Vec::new());
        let (mut sizes, mut stored, mut kept) = (Vec::new(), Vec::new(), 0.0);
        // Since the baseline.
        let mut differences = Vec::new();
        for file in files {
            let now = weights(file)?;
            let is_full = baseline.is_empty() || policy == Policy::Intermittent && wants_baseline(&differences);
            let size = match policy {
                _ if is_full => 1.0,
                Policy::Consecutive => changed(&previous, &now)?,
                _ => changed(&baseline, &now)?,
            };
            kept = match policy {
                _ if is_full => 1.0,
                Policy::Consecutive => kept + size,
                _ => 1.0 + size,
            };
            sizes.push(size);
            stored.push(kept);
            if is_full {
                baseline = weights(file)?;
                differences.clear();
            } else {
                differences.push(size);
            }
            previous = now;
        }
        answer[name] = json!({ "sizes": sizes, "stored": stored });
    }
    Ok(answer)
}

/// Part of the embeddings' values that lie in changed rows.
fn changed(before: &[Weight], now: &[Weight]) -> Fallible<f64> {
    let (before, now) = (tables(before), tables(now));
    let (mut all, mut other) = (0, 0);
    for (before, now) in before.iter().zip(&now) {
        if before.shape != now.shape {
            return Err("tables of other shapes".into());
        }
        let width = now.width().max(1);
        let rows = before.values.chunks(width).zip(now.values.chunks(width));
        other += width * rows.filter(|(a, b)| a != b).count();
        all += now.values.len();
    }
    Ok(other as f64 / all.max(1) as f64)
}

/// Bytes of each checkpoint by the stages of the delta encoder.
fn stages(bins: u16, files: &[&str]) -> Fallible<Value> {
    let mut answer = json!({});
    let (mut raw, config) = (0, Config::new(bins));
    if !config.is_sound() {
        return Err("number of bins".into());
    }
    for (name, coding) in [("huffman", Coding::Huffman), ("rle", Coding::RunLength), ("rearranged", Coding::Rearranged)]
    {
        let system = Inshrinkerator::new(config).with_coding(coding);
        let (mut states, mut sizes) = (None, Vec::new());
        for (position, file) in files.iter().enumerate() {
            let weights = weights(file)?;
            raw = 4 * elements(&weights);
            let (payloads, after) = encode(&system, &weights, states.as_ref(), position as u32)?;
            sizes.push(payloads.iter().map(Vec::len).sum::<usize>());
            states = Some(after);
        }
        answer[name] = json!(sizes);
    }
    Ok(json!({ "raw": raw, "stages": answer }))
}

/// Numbers of bins that are tried.
const BINS: [u16; 14] = [2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192];

/// Writes the weights as each method leaves them, all values one after the other as f32.
fn bins(folder: &Path, file: &str) -> Fallible<Value> {
    let weights = weights(file)?;
    let mut written = Vec::new();
    let mut put = |method: &str, bins: u32, values: Vec<Vec<f32>>| -> Fallible<()> {
        let path = folder.join(format!("{method}-{bins}.f32"));
        let bytes: Vec<u8> = values.iter().flatten().flat_map(|value| value.to_le_bytes()).collect();
        std::fs::write(&path, bytes)?;
        written.push(json!({ "method": method, "bins": bins, "path": path }));
        Ok(())
    };
    for bins in BINS {
        // Without pruning, and without a minimum of bins for embeddings.
        let config = Config { prune: 0, embedding_bins: bins, ..Config::new(bins) };
        put("inshrinkerator", bins.into(), decoded(&Inshrinkerator::new(config), &weights)?)?;
        let uniform = weights.iter().map(|weight| evenly(&weight.values, bins.into())).collect();
        put("uniform", bins.into(), uniform)?;
    }
    for bits in 1..=8 {
        put("k-means", 1 << bits, decoded(&Gobo { bits }, &weights)?)?;
        let adaptive = |weight: &Weight| {
            let width = weight.width().max(1);
            let lengths = vec![width; weight.values.len() / width];
            quantized(Method::Adaptive(Search::published(bits)), bits, &weight.values, &lengths)
        };
        put("adaptive", 1 << bits, weights.iter().map(adaptive).collect())?;
    }
    let tensors: Vec<Value> =
        weights.iter().map(|weight| json!({ "paths": weight.paths, "shape": weight.shape })).collect();
    Ok(json!({ "tensors": tensors, "files": written }))
}

/// The decoded values of a single checkpoint.
fn decoded(system: &dyn System, weights: &[Weight]) -> Fallible<Vec<Vec<f32>>> {
    let (_, states) = encode(system, weights, None, 0)?;
    Ok(states.into_iter().map(|tiles| tiles.into_iter().flat_map(|tile| tile.values.to_vec()).collect()).collect())
}

/// So many even bins from the smallest to the largest value, as QD-Compressor has them.
fn evenly(x: &[f32], bins: u32) -> Vec<f32> {
    let (min, max) = x.iter().fold((f32::MAX, f32::MIN), |(min, max), &x| (min.min(x), max.max(x)));
    let step = (f64::from(max) - f64::from(min)) / f64::from(bins.max(2) - 1);
    let one = |&x: &f32| {
        let code = if step > 0.0 { ((f64::from(x) - f64::from(min)) / step).round() } else { 0.0 };
        (f64::from(min) + step * code) as f32
    };
    x.iter().map(one).collect()
}
