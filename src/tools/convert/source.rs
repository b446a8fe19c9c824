//! The tensors of a checkpoint as a program would load them, each whole, wherever its elements lie.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io::{self, BufReader};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use codec::{Dtype, cast};
use indicatif::ProgressBar;

use crate::terminal::format::name;
use crate::tools::checkpoint::{Checkpoint, Part};
use crate::tools::flow::in_order;
use crate::tools::output::NewFile;
use crate::tools::values::CHUNK;
use formats::{Checksum, Content, Elements, Key, Kind, Model, ReadAt, Role, dotted};

/// Elements without gaps that are read at once: they fit a core's second-level cache.
const ELEMENTS: u64 = 1 << 16;
/// The same with gaps, or in another order: the more, the longer are the runs that lie together in the file.
const SCATTERED: u64 = 1 << 20;
/// Gaps between elements, in elements, that are read and dropped.
const GAPS: u64 = 4;
/// What the index of a model in safetensors is called.
const SAFETENSORS: &str = ".safetensors.index.json";

/// A tensor that is to be copied.
pub(super) struct Source<'a> {
    /// From the root of the copy.
    pub(super) keys: Vec<Key>,
    /// In the copy.
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<u64>,
    pub(super) role: Role,
    pieces: Vec<Piece<'a>>,
}

/// A part of a tensor that lies in one file.
struct Piece<'a> {
    part: &'a Part,
    /// Where it begins in the tensor.
    offsets: Vec<u64>,
    elements: Elements,
}

/// The tensors of a checkpoint.
#[derive(Default)]
pub(super) struct Sources<'a> {
    pub(super) tensors: Vec<Source<'a>>,
    /// Number of values that are no tensors.
    pub(super) others: u64,
    /// Tensors that only an object's own code can read.
    pub(super) hidden: Vec<&'a str>,
    /// Checkpoint files that the index of their directory does not list, or that have no tensors.
    pub(super) unlisted: Vec<&'a Path>,
    /// The permissions that all files with these tensors give.
    pub(super) mode: u32,
    /// For each `.metadata`, by the number of a name there, the number of its tensor.
    wholes: HashMap<*const Model, HashMap<usize, usize>>,
}

impl<'a> Sources<'a> {
    /// Finds the tensors of all files, or of those that an index in the directory lists.
    ///
    /// # Errors
    /// A tensor that cannot be told exactly, or that is not whole; a file that should have tensors and cannot be read.
    pub(super) fn of(checkpoint: &'a Checkpoint) -> Result<Sources<'a>> {
        let listed = listed(checkpoint)?;
        let mut sources = Sources { mode: 0o777, ..Sources::default() };
        for part in &checkpoint.parts {
            let (path, described) = (part.path.display(), &part.description);
            let names = listed.as_ref().map(|files| files.get(&part.path));
            let is_expected = !described.tensors.is_empty() || has_ending(&part.path);
            // Other programs have files with the other endings, too, such as tokenizers.
            let is_damaged =
                described.kind == Kind::Opaque && part.path.extension().is_some_and(|ending| ending == "safetensors");
            let before = sources.tensors.len();
            match (names, described.kind) {
                (Some(None), _) if is_expected => sources.unlisted.push(&part.path),
                (Some(None), _) => {}
                (_, Kind::TorchZip | Kind::Safetensors | Kind::Dcp) => {
                    sources.add(part).with_context(|| path.to_string())?;
                    if !described.tensors.is_empty() {
                        sources.mode &= part.mode;
                    }
                }
                (_, kind) if !described.tensors.is_empty() => bail!(
                    "{path}: convert reads torch.save, safetensors and distributed checkpoints, and this is {}; name one file",
                    kind.name()
                ),
                // Without its tensors the copy would not be whole.
                (names, kind) if names.is_some() || is_damaged || checkpoint.parts.len() == 1 => {
                    let why = described.note.as_deref().unwrap_or(kind.name());
                    bail!("{path}: no tensors can be read: {why}; get the file again, or name one file");
                }
                _ if is_expected => sources.unlisted.push(&part.path),
                _ => {}
            }
            let added = &sources.tensors[before..];
            let found: HashSet<String> = added.iter().map(|source| dotted(&source.keys)).collect();
            if let Some(missing) = names.flatten().and_then(|names| names.iter().find(|of| !found.contains(*of))) {
                bail!("{path} has no {}, which the index lists; get both again, or name one file", name(missing));
            }
        }
        for source in &sources.tensors {
            let found: u64 = source.pieces.iter().map(|piece| count(&piece.elements.shape)).sum();
            if found != count(&source.shape) {
                bail!("{}: {} is not whole; name a directory with all files", checkpoint.name, dotted(&source.keys));
            }
        }
        Ok(sources)
    }

    fn add(&mut self, part: &'a Part) -> Result<()> {
        let content = Content::read(&part.file)?;
        let stored = &part.description.tensors;
        let mut seen = HashSet::new();
        let file = part.path.file_name().unwrap_or_default().to_string_lossy();
        if let Some(model) = part.model.as_ref().filter(|model| !self.wholes.contains_key(&Arc::as_ptr(model))) {
            let mut numbers = HashMap::new();
            for (name, named) in model.names().iter().enumerate() {
                let Some(whole) = &named.tensor else { continue };
                let (keys, shape) = (named.keys.clone(), whole.shape.clone());
                let dtype =
                    whole.dtype.with_context(|| format!("{}: a type that stepfs does not know", dotted(&keys)))?;
                numbers.insert(name, self.tensors.len());
                self.tensors.push(Source { keys, dtype, shape, role: Role::Other, pieces: Vec::new() });
            }
            self.wholes.insert(Arc::as_ptr(model), numbers);
        }
        for (keys, elements) in content.tensors {
            let at = stored.partition_point(|tensor| tensor.extent.end <= elements.at);
            let (dtype, shape) = (elements.dtype, elements.shape.clone());
            if let Some(model) = &part.model {
                // Others are in a value that torch has pickled by itself.
                let Some((name, role, offsets)) = model.chunk(&file, elements.at) else { continue };
                let source = &mut self.tensors[self.wholes[&Arc::as_ptr(model)][&name]];
                let inside = offsets
                    .iter()
                    .zip(&shape)
                    .zip(&source.shape)
                    .all(|((at, len), whole)| at.saturating_add(*len) <= *whole);
                if dtype != source.dtype || [offsets.len(), shape.len()] != [source.shape.len(); 2] || !inside {
                    bail!("{}: .metadata tells another type or shape", dotted(&source.keys));
                }
                source.role = role;
                source.pieces.push(Piece { part, offsets: offsets.to_vec(), elements });
            } else {
                let found = stored.get(at).filter(|tensor| tensor.extent.contains(&elements.at));
                let role = found.map_or(Role::Other, |tensor| tensor.role);
                let pieces = vec![Piece { part, offsets: vec![0; shape.len()], elements }];
                self.tensors.push(Source { keys, dtype, shape, role, pieces });
            }
            seen.insert(at);
        }
        let hidden = stored.iter().enumerate().filter(|(at, _)| !seen.contains(at));
        self.hidden.extend(hidden.map(|(_, tensor)| tensor.path.as_str()));
        self.others += content.others;
        Ok(())
    }
}

/// Whether programs call checkpoints so.
fn has_ending(path: &Path) -> bool {
    let ending = path.extension().and_then(|ending| ending.to_str());
    matches!(ending, Some("safetensors" | "pt" | "pth" | "bin" | "ckpt"))
}

/// The files that the indices of a directory list, such as `model.safetensors.index.json`, each with the names of its tensors;
/// `None` without an index. Where a model is there twice, the index of safetensors counts.
fn listed(checkpoint: &Checkpoint) -> Result<Option<HashMap<PathBuf, Vec<String>>>> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, PathBuf>,
    }
    let has_name = |part: &&Part, ending: &str| part.path.to_string_lossy().ends_with(ending);
    let indices = || checkpoint.parts.iter().filter(|part| has_name(part, ".index.json"));
    let first: HashSet<_> =
        indices().filter(|part| has_name(part, SAFETENSORS)).map(|part| part.path.parent()).collect();
    let mut listed = None;
    for part in indices() {
        let is_first = has_name(&part, SAFETENSORS);
        if !is_first && first.contains(&part.path.parent()) {
            continue;
        }
        let index: Index = match serde_json::from_reader(BufReader::new(&part.file)) {
            Ok(index) => index,
            // An index of something else.
            Err(_) if !is_first && !has_name(&part, ".bin.index.json") => continue,
            Err(error) => {
                return Err(error).with_context(|| format!("{}: no index of tensors", part.path.display()));
            }
        };
        for (tensor, file) in index.weight_map {
            let file = part.path.with_file_name(file);
            if !checkpoint.parts.iter().any(|part| part.path == file) {
                bail!("{}: {} lists {}, which is missing", checkpoint.name, part.path.display(), file.display());
            }
            listed.get_or_insert_with(HashMap::new).entry(file).or_insert_with(Vec::new).push(tensor);
        }
    }
    Ok(listed)
}

fn count(shape: &[u64]) -> u64 {
    shape.iter().product()
}

impl Source<'_> {
    /// Bytes of the copy.
    pub(super) fn bytes(&self) -> u64 {
        count(&self.shape) * self.dtype.size() as u64
    }

    /// Equal for tensors that are one, such as tied weights. `None` for those without elements or in several pieces.
    pub(super) fn identity(&self) -> Option<(usize, &Elements, Dtype)> {
        match &self.pieces[..] {
            [piece] if self.bytes() > 0 => Some((std::ptr::from_ref(piece.part) as usize, &piece.elements, self.dtype)),
            _ => None,
        }
    }

    /// Elements that are read at once.
    fn at_once(&self) -> u64 {
        let has_gaps =
            |Piece { elements: of, .. }: &Piece| *of != Elements::contiguous(of.dtype, of.shape.clone(), of.at);
        if self.pieces.iter().any(has_gaps) { SCATTERED } else { ELEMENTS }
    }

    /// Writes the values of a block to a file in which the tensor is at `at`; answers their CRC-32.
    fn write(
        &self,
        (start, len): Block,
        to: &NewFile,
        at: u64,
        (buf, out): &mut (Vec<u8>, Vec<u8>),
    ) -> Result<Checksum> {
        let mut crc = Checksum::new(false);
        let Some(of) = self.pieces.first().map(|piece| piece.elements.dtype) else { return Ok(crc) };
        if self.pieces.len() > 1 {
            // A damaged index may leave gaps between them.
            buf.clear();
        }
        buf.resize(count(&len) as usize * of.size(), 0);
        for piece in &self.pieces {
            let read = piece.read(&start, &len, buf);
            read.with_context(|| format!("{}: {}", piece.part.path.display(), dotted(&self.keys)))?;
        }
        let bytes = if of == self.dtype { buf } else { rounded(of, self.dtype, buf, out) };
        crc.update(bytes);
        let first = start.iter().zip(&self.shape).fold(0, |first, (start, len)| first * len + start);
        to.write_all_at(bytes, at + first * self.dtype.size() as u64)?;
        Ok(crc)
    }
}

/// Writes the values of tensors, each at a place of a file, in order and without gaps; answers their CRC-32s.
pub(super) fn write(to: &NewFile, sources: &[(&Source, u64)], bar: &ProgressBar) -> Result<Vec<u32>> {
    let all = sources.iter().enumerate().filter(|(_, (source, _))| source.bytes() > 0);
    let all =
        all.flat_map(|(number, (source, _))| blocks(&source.shape, source.at_once()).map(move |block| (number, block)));
    let made = in_order(all, |room, (number, block)| {
        let (source, at) = sources[number];
        bar.inc(count(&block.1) * source.dtype.size() as u64);
        source.write(block, to, at, room).map(|crc| (number, crc))
    })?;
    let mut crcs = vec![Checksum::new(false); sources.len()];
    made.iter().for_each(|(number, crc)| crcs[*number].combine(crc));
    Ok(crcs.iter().map(Checksum::finalize).collect())
}

/// A part of a tensor: where it begins, and its shape.
type Block = (Vec<u64>, Vec<u64>);

/// Parts of a tensor, of at most so many elements, that follow one another in the order of its elements.
fn blocks(shape: &[u64], most: u64) -> impl Iterator<Item = Block> {
    let inner = |dim: usize| count(&shape[dim..]);
    let split = (0..shape.len()).find(|dim| inner(dim + 1) <= most).unwrap_or(0);
    let rows = if shape.is_empty() { 1 } else { (most / inner(split + 1)).clamp(1, shape[split]) };
    let steps = shape.get(split).map_or(1, |len| len.div_ceil(rows));
    (0..count(&shape[..split]) * steps).map(move |number| {
        let (mut start, mut len, mut rest) = (vec![0; shape.len()], shape.to_vec(), number / steps);
        for dim in (0..split).rev() {
            (start[dim], len[dim], rest) = (rest % shape[dim], 1, rest / shape[dim]);
        }
        if let Some(all) = shape.get(split) {
            start[split] = number % steps * rows;
            len[split] = rows.min(all - start[split]);
        }
        (start, len)
    })
}

/// A dimension of elements that are copied: their number, and the distance of two in the file and in the copy.
#[derive(Clone, Copy)]
struct Dim {
    count: u64,
    from: u64,
    to: u64,
}

impl Piece<'_> {
    /// Copies what lies in a block of the tensor to its place in the block's bytes.
    fn read(&self, start: &[u64], len: &[u64], block: &mut [u8]) -> io::Result<()> {
        let Elements { dtype, shape, strides, at } = &self.elements;
        let (mut from, mut to, mut step) = (0, 0, 1);
        // The innermost first. Dimensions without a gap between them are one.
        let mut dims = vec![Dim { count: 1, from: 1, to: 1 }];
        for dim in (0..len.len()).rev() {
            let first = self.offsets[dim];
            let (low, high) = (start[dim].max(first), (start[dim] + len[dim]).min(first + shape[dim]));
            if low >= high {
                return Ok(());
            }
            from += (low - first) * strides[dim];
            to += (low - start[dim]) * step;
            let next = Dim { count: high - low, from: strides[dim], to: step };
            step *= len[dim];
            let below = dims.len() - 1;
            let inner = &mut dims[below];
            if next.count > 1 && (next.from, next.to) == (inner.from * inner.count, inner.to * inner.count) {
                inner.count *= next.count;
            } else if next.count > 1 {
                dims.push(next);
            }
        }
        // What lies together in the file is read at once.
        let near = dims.iter().enumerate().filter(|(_, dim)| dim.count > 1 && dim.from <= GAPS);
        let run = near.min_by_key(|(_, dim)| dim.from).map_or(0, |(at, _)| at);
        let run = dims.remove(run);
        let size = dtype.size();
        let mut near = Vec::new();
        for mut number in 0..dims.iter().map(|dim| dim.count).product() {
            let (mut from, mut to) = (from, to);
            for dim in &dims {
                (from, to) = (from + number % dim.count * dim.from, to + number % dim.count * dim.to);
                number /= dim.count;
            }
            let (place, to) = (at + from * size as u64, to as usize * size);
            if (run.from, run.to) == (1, 1) {
                self.part.file.read_exact_at(&mut block[to..to + run.count as usize * size], place)?;
                continue;
            }
            near.resize((run.count - 1) as usize * run.from as usize * size + size, 0);
            self.part.file.read_exact_at(&mut near, place)?;
            for element in 0..run.count as usize {
                let (from, to) = (element * run.from as usize * size, to + element * run.to as usize * size);
                block[to..to + size].copy_from_slice(&near[from..from + size]);
            }
        }
        Ok(())
    }
}

/// Values of another type, as torch rounds them: to the nearest, of two to the even one, doubles by way of floats.
fn rounded<'a>(of: Dtype, to: Dtype, bytes: &[u8], out: &'a mut Vec<u8>) -> &'a mut Vec<u8> {
    out.resize(bytes.len() / of.size() * to.size(), 0);
    let mut values = [0.0; CHUNK];
    for (bytes, out) in bytes.chunks(CHUNK * of.size()).zip(out.chunks_mut(CHUNK * to.size())) {
        let values = &mut values[..bytes.len() / of.size()];
        cast::widen(of, bytes, values);
        values.iter_mut().for_each(|value| *value = f64::from(*value as f32));
        cast::round(to, values, out);
    }
    out
}
