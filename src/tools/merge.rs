//! `stepfs merge`: one checkpoint with the averaged weights of several.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};

use crate::store::durable::Io;
use crate::terminal::format::{name, progress, size};
use crate::terminal::log_to_stderr;
use formats::{ChangedTensor, Order, ReadAt, Role};

use super::checkpoint::{Checkpoint, Found, Part};
use super::output::{NewFile, Output};
use super::values::put;
use super::{Find, of_file};

/// Elements of a tensor that are averaged at once.
const ELEMENTS: usize = 1 << 18;

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
pub fn run(args: Args, find: &Find) -> Result<ExitCode> {
    log_to_stderr("error");
    let weights = args.weights_of_files()?;
    let inputs = args.files.iter().map(|path| Checkpoint::open(find(path)?.as_ref())).collect::<Result<Vec<_>>>()?;
    Output::refuse(&args.out, &inputs)?;
    let Some(last) = inputs.last() else { bail!("no checkpoints") };
    let merge = Merge { inputs: &inputs, weights: &weights };
    let averaged: Vec<_> = last.tensors().into_iter().filter(|(_, found)| is_averaged(found)).collect();
    merge.refuse_what_differs(last, &averaged)?;
    let bytes = last.parts.iter().map(|part| part.file.size()).sum();
    let bar = progress(bytes, true);
    let tensors = Output::whole(&Io::disk(), (&args.out, last.is_directory), |output| {
        let mut tensors = 0;
        for part in &last.parts {
            tensors += merge.write_part(&averaged, part, output)?;
            bar.inc(part.file.size());
        }
        Ok(tensors)
    })?;
    bar.finish_and_clear();
    let count = inputs.len();
    say!("{}: {tensors} tensors of {count} checkpoints averaged, {}", name(&args.out.to_string_lossy()), size(bytes));
    Ok(ExitCode::SUCCESS)
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

struct Merge<'a> {
    inputs: &'a [Checkpoint],
    weights: &'a [f64],
}

impl Merge<'_> {
    /// All checkpoints have the tensors to average, in one type and shape.
    fn refuse_what_differs(&self, last: &Checkpoint, averaged: &[(&str, Found)]) -> Result<()> {
        for (tensor_name, found) in averaged {
            if !Order::of(&found.part.description).is_kept() {
                bail!("{}: tables with rows of their own cannot be averaged", last.name);
            }
            for other in self.inputs {
                let Some(twin) = other.get(tensor_name) else {
                    bail!("{} has no {}, which {} has", other.name, name(tensor_name), last.name);
                };
                let words = |found: &Found| format!("{} {:?}", found.tensor.dtype.name(), found.tensor.shape);
                if words(&twin) != words(found) {
                    let (here, there) = (words(&twin), words(found));
                    bail!("{}: {} is {here}, and {there} in {}", other.name, name(tensor_name), last.name);
                }
            }
        }
        Ok(())
    }

    /// Copies a file, with averaged tensors and the checksums that follow from them; answers the number of tensors.
    fn write_part(&self, averaged: &[(&str, Found)], part: &Part, output: &mut Output) -> Result<usize> {
        let (file, path) = (output.create(&part.path, part.mode)?, &part.path);
        copy(part, &file)?;
        let mut changed = Vec::new();
        for (tensor_name, found) in averaged.iter().filter(|(_, found)| std::ptr::eq(found.part, part)) {
            let states = self.inputs.iter().filter_map(|input| input.get(tensor_name)).collect::<Vec<_>>();
            let (crc_before, crc_after) = self.average(tensor_name, &states, &file)?;
            changed.push(ChangedTensor { index: found.index, crc_before, crc_after });
        }
        for patch in part.description.patches(&part.file, &changed).map_err(of_file(path))? {
            file.write_all_at(&patch.bytes, patch.offset)?;
        }
        file.sync()?;
        Ok(changed.len())
    }

    /// Writes the mean of one tensor's states in the place of the last; answers the checksums of the last and of the mean.
    fn average(&self, tensor_name: &str, states: &[Found], to: &NewFile) -> Result<(u32, u32)> {
        let Some(last) = states.last() else { bail!("no states") };
        let (dtype, extent) = (last.tensor.dtype, &last.tensor.extent);
        let [mut before, mut after] = [0, 1].map(|_| last.part.description.checksum());
        let total: f64 = self.weights.iter().sum();
        let (mut at, len) = (0, last.tensor.bytes());
        let mut buf = Vec::new();
        while at < len {
            let count = (len - at).min((ELEMENTS * dtype.size()) as u64) as usize;
            buf.resize(count, 0);
            let mut sums = vec![0.0; count / dtype.size()];
            for (state, weight) in states.iter().zip(self.weights) {
                let read = state.part.file.read_exact_at(&mut buf, state.tensor.extent.start + at);
                read.map_err(of_file(&state.part.path)).with_context(|| name(tensor_name))?;
                let values = codec::lattice::values(dtype, &buf);
                sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += weight * value);
            }
            before.update(&buf);
            let mut bytes = Vec::with_capacity(count);
            sums.into_iter().for_each(|sum| put(dtype, sum / total, &mut bytes));
            after.update(&bytes);
            to.write_all_at(&bytes, extent.start + at)?;
            at += count as u64;
        }
        Ok((before.finalize(), after.finalize()))
    }
}

fn copy(part: &Part, to: &NewFile) -> Result<()> {
    let (from, mut at, len) = (&part.file, 0, part.file.size());
    let mut buf = vec![0; len.min(1 << 20) as usize];
    while at < len {
        let count = (len - at).min(buf.len() as u64) as usize;
        from.read_exact_at(&mut buf[..count], at).map_err(of_file(&part.path))?;
        to.write_all_at(&buf[..count], at)?;
        at += count as u64;
    }
    Ok(())
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
