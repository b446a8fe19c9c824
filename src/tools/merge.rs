//! `stepfs merge`: one checkpoint with the averaged weights of several.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, anyhow, bail};
use codec::Dtype;
use half::{bf16, f16};

use crate::store::durable::{CrashPoint, DeviceFile, Io, parent};
use crate::terminal::format::{name, progress, size};
use crate::terminal::interrupt::interrupted;
use crate::terminal::log_to_stderr;
use formats::{ChangedTensor, Order, ReadAt, Role};

use super::checkpoint::{Checkpoint, Found, Part};
use super::of_file;

const STEP: CrashPoint = CrashPoint::ExportWritten;
/// Elements of a tensor that are averaged at once.
const ELEMENTS: usize = 1 << 18;

/// Write one checkpoint with the averaged weights of several.
///
/// FILES are checkpoints of one model, oldest first: files, or directories of files that are split alike. OUT is a copy of
/// the last one. In it each floating-point tensor that belongs to no optimizer is the weighted mean of all, computed in
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
pub fn run(args: Args) -> Result<ExitCode> {
    log_to_stderr("error");
    let weights = args.weights_of_files()?;
    let inputs = args.files.iter().map(|path| Checkpoint::open(path)).collect::<Result<Vec<_>>>()?;
    if fs::symlink_metadata(&args.out).is_ok() {
        bail!("{} exists; name a new file or directory", args.out.display());
    }
    let stop = interrupted()?;
    let merge = Merge { io: Io::disk(), inputs: &inputs, weights: &weights, stop: &stop };
    let (tensors, bytes) = merge.write(&args.out)?;
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
    io: Io,
    inputs: &'a [Checkpoint],
    weights: &'a [f64],
    stop: &'a AtomicBool,
}

impl Merge<'_> {
    /// Writes the merged checkpoint; answers the number of averaged tensors, and the bytes of all files.
    fn write(&self, out: &Path) -> Result<(usize, u64)> {
        let Some(last) = self.inputs.last() else { bail!("no checkpoints") };
        self.refuse_what_differs(last)?;
        let lens = last.parts.iter().map(|part| part.file.size());
        let bytes = lens.sum();
        let bar = progress(bytes, true);
        let staging = staging(out);
        if fs::symlink_metadata(&staging).is_ok() {
            bail!("{} is in the way: another merge writes it, or was killed; remove it then", staging.display());
        }
        let write = || -> Result<usize> {
            let mut tensors = 0;
            if last.is_directory {
                fs::create_dir(&staging).map_err(of_file(&staging))?;
            }
            for part in &last.parts {
                let target = if last.is_directory { staging.join(&part.path) } else { staging.clone() };
                self.io.make_dirs(parent(&target), 0o777, STEP).map_err(of_file(&target))?;
                tensors += self.write_part(last, part, &target)?;
                bar.inc(part.file.size());
            }
            if last.is_directory {
                self.io.sync_dir(&staging, STEP).map_err(of_file(&staging))?;
            }
            self.io.publish(&staging, out, CrashPoint::ExportInPlace).map_err(of_file(out))?;
            Ok(tensors)
        };
        let written = write().inspect_err(|_| {
            let _ = if last.is_directory { fs::remove_dir_all(&staging) } else { fs::remove_file(&staging) };
        });
        bar.finish_and_clear();
        Ok((written?, bytes))
    }

    /// All checkpoints have the tensors to average, in one type and shape.
    fn refuse_what_differs(&self, last: &Checkpoint) -> Result<()> {
        for (tensor_name, found) in last.tensors().into_iter().filter(|(_, found)| is_averaged(found)) {
            if !Order::of(&found.part.description).is_kept() {
                bail!("{}: tables with rows of their own cannot be averaged", last.path.display());
            }
            for other in self.inputs {
                let Some(twin) = other.get(tensor_name) else {
                    bail!("{} has no {}, which {} has", other.path.display(), name(tensor_name), last.path.display());
                };
                let words = |found: &Found| format!("{} {:?}", found.tensor.dtype.name(), found.tensor.shape);
                if words(&twin) != words(&found) {
                    let (here, there) = (words(&twin), words(&found));
                    bail!(
                        "{}: {} is {here}, and {there} in {}",
                        other.path.display(),
                        name(tensor_name),
                        last.path.display()
                    );
                }
            }
        }
        Ok(())
    }

    /// Copies a file, with averaged tensors and the checksums that follow from them; answers the number of tensors.
    fn write_part(&self, last: &Checkpoint, part: &Part, target: &Path) -> Result<usize> {
        let file = self.io.create(target, STEP).map_err(of_file(target))?;
        let mode = part.file.metadata().map_err(of_file(target))?.permissions().mode() & 0o777;
        fs::set_permissions(target, fs::Permissions::from_mode(mode)).map_err(of_file(target))?;
        self.copy(&part.file, &file).with_context(|| format!("{}", target.display()))?;
        let mut changed = Vec::new();
        for (tensor_name, found) in last.tensors().into_iter().filter(|(_, found)| is_averaged(found)) {
            if !std::ptr::eq(found.part, part) {
                continue;
            }
            let states = self.inputs.iter().filter_map(|input| input.get(tensor_name)).collect::<Vec<_>>();
            let (crc_before, crc_after) = self.average(&states, &file).with_context(|| name(tensor_name))?;
            let index = part.description.tensors.iter().position(|tensor| std::ptr::eq(tensor, found.tensor));
            changed.extend(index.map(|index| ChangedTensor { index, crc_before, crc_after }));
        }
        for patch in part.description.patches(&part.file, &changed).map_err(of_file(target))? {
            file.write_all_at(&patch.bytes, patch.offset, STEP).map_err(of_file(target))?;
        }
        file.sync(STEP).map_err(of_file(target))?;
        Ok(changed.len())
    }

    fn copy(&self, from: &File, to: &DeviceFile) -> Result<()> {
        let (mut at, len) = (0, from.size());
        let mut buf = vec![0; len.min(1 << 20) as usize];
        while at < len {
            self.check()?;
            let count = (len - at).min(buf.len() as u64) as usize;
            from.read_exact_at(&mut buf[..count], at)?;
            to.write_all_at(&buf[..count], at, STEP)?;
            at += count as u64;
        }
        Ok(())
    }

    /// Writes the mean of one tensor's states in the place of the last; answers the checksums of the last and of the mean.
    fn average(&self, states: &[Found], to: &DeviceFile) -> Result<(u32, u32)> {
        let Some(last) = states.last() else { bail!("no states") };
        let (dtype, extent) = (last.tensor.dtype, &last.tensor.extent);
        let [mut before, mut after] = [0, 1].map(|_| last.part.description.checksum());
        let total: f64 = self.weights.iter().sum();
        let (mut at, len) = (0, last.tensor.bytes());
        let mut buf = Vec::new();
        while at < len {
            self.check()?;
            let count = (len - at).min((ELEMENTS * dtype.size()) as u64) as usize;
            buf.resize(count, 0);
            let mut sums = vec![0.0; count / dtype.size()];
            for (state, weight) in states.iter().zip(self.weights) {
                state.part.file.read_exact_at(&mut buf, state.tensor.extent.start + at)?;
                let values = codec::lattice::values(dtype, &buf);
                sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += weight * value);
            }
            before.update(&buf);
            let mut bytes = Vec::with_capacity(count);
            sums.into_iter().for_each(|sum| put(dtype, sum / total, &mut bytes));
            after.update(&bytes);
            to.write_all_at(&bytes, extent.start + at, STEP)?;
            at += count as u64;
        }
        Ok((before.finalize(), after.finalize()))
    }

    fn check(&self) -> Result<()> {
        if self.stop.load(Ordering::Relaxed) { Err(anyhow!("interrupted; nothing was written")) } else { Ok(()) }
    }
}

/// Weights, averages of them, and other floats, such as the statistics of a normalization; not an optimizer's state.
fn is_averaged(found: &Found) -> bool {
    found.tensor.dtype.is_lattice_float() && found.tensor.role.group() != Role::Optimizer
}

/// Adds the nearest value of a type.
fn put(dtype: Dtype, value: f64, out: &mut Vec<u8>) {
    match dtype {
        Dtype::F16 => out.extend(f16::from_f64(value).to_le_bytes()),
        Dtype::Bf16 => out.extend(bf16::from_f64(value).to_le_bytes()),
        Dtype::F32 => out.extend((value as f32).to_le_bytes()),
        _ => out.extend(value.to_le_bytes()),
    }
}

/// The place of OUT until it is whole.
fn staging(out: &Path) -> PathBuf {
    let mut name = out.file_name().unwrap_or_default().to_os_string();
    name.push(".stepfs-merge");
    parent(out).join(name)
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
