//! `stepfs merge`: one checkpoint with the averaged weights of several.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, bail};
use codec::cast;
use codec::entropy::simd::{Level, multiversion};
use indicatif::ProgressBar;

use crate::store::durable::Io;
use crate::terminal::format::{count, name, progress, size};
use crate::terminal::log_to_stderr;
use formats::{ChangedTensor, Checksum, Order, ReadAt, Role};

use super::checkpoint::{Checkpoint, Found, Part, form, is_alike};
use super::flow::{in_order, spans};
use super::output::{NewFile, Output};
use super::values::CHUNK;
use super::{Find, of_file};

/// Elements of a tensor that are averaged at once: their sums fit a core's second-level cache.
const ELEMENTS: usize = 1 << 15;

/// Write one checkpoint with the averaged weights of several.
///
/// FILES are checkpoints of one model, oldest first: files, or directories of files that are split alike, also in a store
/// (STORE:PATH) or on a mirror (URL:PATH). OUT is a copy of the last one. In it each floating-point tensor that belongs to no optimizer is the weighted mean of all, computed in
/// double precision and rounded once. Everything else is the last one's: optimizers, integers, text.
///
/// OUT appears when it is complete and durable, or not at all.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  \
stepfs merge step_800.pt step_900.pt step_1000.pt -o mean.pt\n  \
stepfs merge --ema 0.8 step_*.pt -o ema.pt                 each file counts .8 of the next\n  \
stepfs merge --decay checkpoint-* -o merged                as if the rate had decayed (1 - sqrt)\n\n\
The shell sorts step_10 before step_9: number with zeros, or name the files in order.")]
pub struct Args {
    /// Checkpoints, oldest first.
    #[arg(required = true, num_args = 2.., value_name = "FILES")]
    files: Vec<PathBuf>,
    /// The new file or directory, which must not exist.
    #[arg(short, long, value_name = "OUT")]
    out: PathBuf,
    /// A weight for each file, separated by commas; their sum is made 1 [default: equal].
    #[arg(long, value_name = "LIST", value_delimiter = ',', group = "how")]
    weights: Vec<f64>,
    /// An exponential average: each file counts so much of the next.
    #[arg(long, value_name = "SHARE", group = "how")]
    ema: Option<f64>,
    /// Weights that stand for a learning rate that decays as 1 - sqrt over the files (WSM, Tian et al. 2025).
    #[arg(long, group = "how")]
    decay: bool,
}

/// Runs the command.
///
/// # Errors
/// A message for the user.
pub fn run(args: Args, find: &Find) -> Result<()> {
    log_to_stderr("error");
    let weights = args.weights_of_files()?;
    let inputs = args.files.iter().map(|path| Checkpoint::open(find(path)?.as_ref())).collect::<Result<Vec<_>>>()?;
    Output::refuse(&args.out, &inputs)?;
    let Some(last) = inputs.last() else { bail!("no checkpoints") };
    let means = means(last, &inputs, &weights)?;
    let bytes = last.parts.iter().map(|part| part.file.size()).sum();
    let bar = progress(bytes, true);
    Output::whole(&Io::disk(), (&args.out, last.is_directory), |output| {
        last.parts.iter().try_for_each(|part| write_part(&means, part, output, &bar))
    })?;
    bar.finish_and_clear();
    let not_finite = || means.iter().filter(|mean| mean.is_not_finite.load(Ordering::Relaxed));
    if let Some(first) = not_finite().next() {
        let (count, first) = (count(not_finite().count(), "tensor"), name(first.name));
        say_error!(
            "stepfs: not all values are finite in {count} of the mean ({first}): one of the checkpoints diverged"
        );
    }
    let (tensors, count) = (means.len(), inputs.len());
    say!("{}: {tensors} tensors of {count} checkpoints averaged, {}", name(&args.out), size(bytes));
    Ok(())
}

impl Args {
    /// Of each file its share; their sum is 1 up to rounding.
    fn weights_of_files(&self) -> Result<Vec<f64>> {
        let count = self.files.len();
        let weights: Vec<f64> = match self.ema {
            Some(share) if share > 0.0 && share < 1.0 => {
                (0..count).map(|at| share.powi((count - 1 - at) as i32)).collect()
            }
            Some(share) => bail!("--ema {share}: name a share between 0 and 1, such as 0.8"),
            None if self.decay => decay(count),
            None if self.weights.is_empty() => vec![1.0; count],
            None => self.weights.clone(),
        };
        if weights.len() != count {
            bail!("--weights has {} numbers for {count} files; name one for each", weights.len());
        }
        let sum: f64 = weights.iter().sum();
        if !weights.iter().all(|weight| weight.is_finite()) || sum == 0.0 || !sum.is_finite() {
            bail!("--weights: the numbers must be finite, and their sum not 0");
        }
        Ok(weights)
    }
}

/// The weights under which a mean of states stands for training with a rate that decays as 1 - sqrt: the update that led to
/// state i counts 1 - sqrt(i / n) (WSM, section 3).
fn decay(count: usize) -> Vec<f64> {
    let rate = |at: usize| 1.0 - (at as f64 / count as f64).sqrt();
    (0..count).map(|at| rate(at) - rate(at + 1)).collect()
}

/// A tensor to average.
struct Mean<'a> {
    name: &'a str,
    last: Found<'a>,
    /// The states with their weights.
    states: Vec<(Found<'a>, f64)>,
    /// Some of its values are not finite.
    is_not_finite: AtomicBool,
}

/// The tensors to average, which all checkpoints have in one type and shape.
fn means<'a>(last: &'a Checkpoint, inputs: &'a [Checkpoint], weights: &[f64]) -> Result<Vec<Mean<'a>>> {
    let mut means = Vec::new();
    for (of, found) in last.tensors().into_iter().filter(|(_, found)| is_averaged(found)) {
        if !Order::of(&found.part.description).is_kept() {
            bail!("{}: tables with rows of their own cannot be averaged", last.name);
        }
        let mut states = Vec::new();
        for (other, weight) in inputs.iter().zip(weights) {
            let Some(twin) = other.get(of) else {
                bail!("{} has no {}, which {} has", other.name, name(of), last.name);
            };
            if !is_alike(twin.tensor, found.tensor) {
                let (here, there) = (form(twin.tensor), form(found.tensor));
                bail!("{}: {} is {here}, and {there} in {}", other.name, name(of), last.name);
            }
            states.push((twin, *weight));
        }
        means.push(Mean { name: of, last: found, states, is_not_finite: AtomicBool::new(false) });
    }
    Ok(means)
}

/// Copies a file, with averaged tensors and the checksums that follow from them.
fn write_part(means: &[Mean], part: &Part, output: &mut Output, bar: &ProgressBar) -> Result<()> {
    let (file, path) = (output.create(&part.path, part.mode)?, &part.path);
    let mut means: Vec<&Mean> = means.iter().filter(|mean| std::ptr::eq(mean.last.part, part)).collect();
    means.sort_by_key(|mean| mean.last.index);
    // In the file's order the means, and what lies between them.
    let (mut ranges, mut end) = (Vec::new(), 0);
    for (at, mean) in means.iter().enumerate() {
        let extent = mean.last.tensor.extent.clone();
        ranges.push((None, end..extent.start));
        end = extent.end;
        ranges.push((Some(at), extent));
    }
    ranges.push((None, end..part.file.size()));
    let all = ranges.into_iter().flat_map(|(mean, range)| spans(range).map(move |span| (mean, span)));
    let made = in_order(all, |room, (mean, span)| {
        bar.inc(span.end - span.start);
        write_span(part, mean.map(|at| means[at]), span, &file, room).map(|crcs| (mean, crcs))
    })?;
    let mut crcs = vec![[0, 1].map(|_| part.description.checksum()); means.len()];
    for (mean, [before, after]) in made {
        if let Some(at) = mean {
            crcs[at][0].combine(&before);
            crcs[at][1].combine(&after);
        }
    }
    let changed = means.iter().zip(&crcs).map(|(mean, [before, after])| ChangedTensor {
        index: mean.last.index,
        crc_before: before.finalize(),
        crc_after: after.finalize(),
    });
    for patch in part.description.patches(&part.file, &changed.collect::<Vec<_>>()).map_err(of_file(path))? {
        file.write_all_at(&patch.bytes, patch.offset)?;
    }
    file.sync()
}

/// Writes a mean, or a copy of the last file, in this span of it; answers the checksums of the last and of the mean.
fn write_span(
    part: &Part,
    mean: Option<&Mean>,
    span: Range<u64>,
    to: &NewFile,
    (bytes, sums): &mut (Vec<u8>, Vec<f64>),
) -> Result<[Checksum; 2]> {
    let mut crcs = [0, 1].map(|_| part.description.checksum());
    let size = mean.map_or(size_of::<f64>(), |mean| mean.last.tensor.dtype.size());
    for at in span.clone().step_by(ELEMENTS * size) {
        bytes.resize((span.end - at).min((ELEMENTS * size) as u64) as usize, 0);
        match mean {
            None => part.file.read_exact_at(bytes, at).map_err(of_file(&part.path))?,
            Some(mean) => mean.fill(at, bytes, sums, &mut crcs)?,
        }
        to.write_all_at(bytes, at)?;
    }
    Ok(crcs)
}

impl Mean<'_> {
    /// Fills `bytes` with the mean from a place of the last file on.
    fn fill(&self, at: u64, bytes: &mut [u8], sums: &mut Vec<f64>, crcs: &mut [Checksum; 2]) -> Result<()> {
        let last = self.last.tensor;
        let (level, dtype, mut values) = (Level::detect(), last.dtype, [0.0; CHUNK]);
        sums.clear();
        sums.resize(bytes.len() / dtype.size(), 0.0);
        for (state, weight) in &self.states {
            let read = state.part.file.read_exact_at(bytes, state.tensor.extent.start + (at - last.extent.start));
            read.map_err(of_file(&state.part.path)).with_context(|| name(self.name))?;
            for (bytes, sums) in bytes.chunks(CHUNK * dtype.size()).zip(sums.chunks_mut(CHUNK)) {
                let values = &mut values[..sums.len()];
                cast::widen(dtype, bytes, values);
                add(level, values, *weight, sums);
            }
        }
        crcs[0].update(bytes);
        divide(level, sums, self.states.iter().map(|(_, weight)| weight).sum());
        if sums.iter().any(|value| !value.is_finite()) {
            self.is_not_finite.store(true, Ordering::Relaxed);
        }
        cast::round(dtype, sums, bytes);
        crcs[1].update(bytes);
        Ok(())
    }
}

multiversion! {
    fn add(values: &[f64], weight: f64, sums: &mut [f64]) {
        sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += weight * value);
    }
}

multiversion! {
    fn divide(sums: &mut [f64], total: f64) {
        sums.iter_mut().for_each(|sum| *sum /= total);
    }
}

/// Weights, averages of them, and other floats, such as the statistics of a normalization; not an optimizer's state.
fn is_averaged(found: &Found) -> bool {
    found.tensor.dtype.is_lattice_float() && found.tensor.role.group() != Role::Optimizer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_decaying_rate_has_a_whole_sum() {
        let weights = decay(4);
        assert!((weights.iter().sum::<f64>() - 1.0).abs() < 1e-12);
        assert!(weights.windows(2).all(|pair| pair[0] > pair[1]), "{weights:?}");
    }
}
