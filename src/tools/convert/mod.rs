//! `stepfs convert`: the tensors of a checkpoint in another format.

mod dcp;
mod pickle;
mod safetensors;
mod source;
mod torch;

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use codec::Dtype;

use crate::store::durable::Io;
use crate::terminal::format::{name, parse_size, progress, size};
use crate::terminal::log_to_stderr;
use formats::{Key, Role, dotted};

use super::Find;
use super::checkpoint::Checkpoint;
use super::output::Output;
use source::{Source, Sources};

/// Write the tensors of a checkpoint in another format, or without its optimizer.
///
/// IN is a file of torch.save or of safetensors, or a directory: of such files, or a distributed checkpoint (DCP) of torch. It
/// may be in a store (STORE:PATH) or on a mirror (URL:PATH). If a directory has an index (model.safetensors.index.json), the
/// files count that it lists. Nothing in IN is executed, so values that are no tensors are left out.
///
/// The name of OUT tells its format: .safetensors, or .pt, .pth, .bin and .ckpt for torch.save. In safetensors, keys of nested
/// dictionaries become one name with dots. OUT appears when it is complete and durable, or not at all.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  \
stepfs convert step_1000.pt -o model.safetensors --only weights --dtype bf16   to send away\n  \
stepfs convert s3://bucket/run-7:step_1000 -o step_1000.pt                     a DCP, from a mirror\n  \
stepfs convert step_1000.pt -o step_1000 --to dcp                              for other ranks\n  \
stepfs convert step_1000.pt -o hf --shard 5G --only weights --strip-prefix model\n\n\
`--only weights` to OUT of the same format is the checkpoint without its optimizer.")]
pub struct Args {
    /// The checkpoint.
    #[arg(value_name = "IN")]
    input: PathBuf,
    /// The new file or directory, which must not exist.
    #[arg(short, long, value_name = "OUT")]
    out: PathBuf,
    /// The format, if the name of OUT does not tell it; a DCP is a directory.
    #[arg(long, value_name = "FORMAT")]
    to: Option<Format>,
    /// weights: leave out all tensors that belong to an optimizer.
    #[arg(long, value_name = "WHAT")]
    only: Option<Only>,
    /// Round floating-point tensors to this type, as torch does, but none of an optimizer.
    #[arg(long, value_name = "TYPE")]
    dtype: Option<Float>,
    /// Put P and a dot before each name; its keys become one.
    #[arg(long, value_name = "P")]
    prefix: Option<String>,
    /// Cut P and a dot from each name that begins so; its keys become one.
    #[arg(long, value_name = "P")]
    strip_prefix: Option<String>,
    /// Write a directory of safetensors files with at most SIZE of tensors each, and their index.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    shard: Option<u64>,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Format {
    Torch,
    Safetensors,
    Dcp,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Only {
    Weights,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Float {
    Bf16,
    F16,
    F32,
}

impl Args {
    fn format(&self) -> Result<Format> {
        let ending = self.out.extension().and_then(|ending| ending.to_str());
        let format = match (self.to, ending) {
            (Some(format), _) => format,
            (None, Some("safetensors")) => Format::Safetensors,
            (None, Some("pt" | "pth" | "bin" | "ckpt")) => Format::Torch,
            _ if self.shard.is_some() => Format::Safetensors,
            _ => bail!("{}: name a file .safetensors or .pt, or tell the format with --to", self.out.display()),
        };
        if self.shard.is_some() && format != Format::Safetensors {
            bail!("--shard is for safetensors alone; leave it out");
        }
        if self.shard == Some(0) {
            bail!("--shard 0: name the most bytes of a file, such as 5G");
        }
        Ok(format)
    }

    /// The keys in the copy, and whether a prefix was cut.
    fn renamed(&self, keys: Vec<Key>) -> (Vec<Key>, bool) {
        let (whole, words) = (dotted(&keys), |prefix: &String| prefix.trim_end_matches('.').to_string());
        let (cut, put) = (self.strip_prefix.as_ref().map(words), self.prefix.as_ref().map(words));
        let cut = cut.and_then(|prefix| whole.strip_prefix(&prefix)?.strip_prefix('.'));
        let rest = cut.unwrap_or(&whole);
        match put {
            None if cut.is_none() => (keys, false),
            None => (vec![Key::Name(rest.to_string())], true),
            Some(prefix) if rest.is_empty() => (vec![Key::Name(prefix)], cut.is_some()),
            Some(prefix) => (vec![Key::Name(format!("{prefix}.{rest}"))], cut.is_some()),
        }
    }
}

/// Runs the command.
///
/// # Errors
/// A message for the user.
pub fn run(args: Args, find: &Find) -> Result<()> {
    log_to_stderr("error");
    let format = args.format()?;
    let input = [Checkpoint::open(find(&args.input)?.as_ref())?];
    let [checkpoint] = &input;
    Output::refuse(&args.out, &input)?;
    let Sources { mut tensors, others, hidden, unlisted, mode, .. } = Sources::of(checkpoint)?;
    let all = tensors.len();
    if args.only.is_some() {
        tensors.retain(|source| source.role.group() != Role::Optimizer);
    }
    let left_out = all - tensors.len();
    match hidden.first() {
        Some(first) if all == 0 => bail!(
            "all {} tensors are inside of objects, such as {}; let the program save model.state_dict()",
            hidden.len(),
            name(first)
        ),
        _ if tensors.is_empty() => bail!("no tensors are left to write; leave out --only"),
        _ => {}
    }
    let mut is_cut = args.strip_prefix.is_none();
    for source in &mut tensors {
        let (keys, cut) = args.renamed(std::mem::take(&mut source.keys));
        source.keys = keys;
        is_cut |= cut;
        if let Some(dtype) =
            args.dtype.filter(|_| source.dtype.is_lattice_float() && source.role.group() != Role::Optimizer)
        {
            source.dtype = match dtype {
                Float::Bf16 => Dtype::Bf16,
                Float::F16 => Dtype::F16,
                Float::F32 => Dtype::F32,
            };
        }
    }
    refuse(&tensors, format)?;
    if !is_cut {
        let shown = tensors.first().map_or(String::new(), |source| dotted(&source.keys));
        bail!("no name begins with the prefix that --strip-prefix names; the first is {}", name(&shown));
    }
    let bytes = tensors.iter().map(Source::bytes).sum();
    let bar = progress(bytes, true);
    let is_directory = format == Format::Dcp || args.shard.is_some();
    Output::whole(&Io::disk(), (&args.out, is_directory), |output| match format {
        Format::Dcp => dcp::write(output, mode, &tensors, &bar),
        Format::Safetensors => safetensors::write(output, mode, &tensors, args.shard, &bar),
        Format::Torch => {
            let file = output.create(Path::new(""), mode)?;
            torch::write(&file, &tensors, &bar)?;
            file.sync()
        }
    })?;
    bar.finish_and_clear();
    say!("{}: {} tensors, {}", name(&args.out), tensors.len(), size(bytes));
    if left_out > 0 {
        say!("left out: {left_out} tensors of optimizers");
    }
    if others > 0 {
        say!("left out: {others} values that are no tensors: nothing is unpickled");
    }
    if let Some(first) = hidden.first() {
        say!("left out: {} tensors inside of objects, such as {}: nothing is unpickled", hidden.len(), name(first));
    }
    if let Some(first) = unlisted.first() {
        let (count, first) = (unlisted.len(), name(first));
        say!("left out: {count} files that no index lists or that have no tensors, such as {first}");
    }
    Ok(())
}

/// Refuses tensors that the format cannot name.
fn refuse(tensors: &[Source], format: Format) -> Result<()> {
    if format != Format::Torch && tensors.iter().any(|source| source.keys.is_empty()) {
        bail!("the tensor has no name; give it one with --prefix");
    }
    let keys: HashSet<&[Key]> = tensors.iter().map(|source| &source.keys[..]).collect();
    let mut names = HashSet::new();
    let is_twice = |source: &&Source| {
        let has_above = (0..source.keys.len()).any(|len| keys.contains(&source.keys[..len]));
        has_above || !names.insert(dotted(&source.keys))
    };
    match tensors.iter().find(is_twice) {
        None => Ok(()),
        Some(source) => {
            bail!("two tensors have the name {}; convert one file of the directory", name(dotted(&source.keys)))
        }
    }
}
