//! HDF5 files: arrays that h5py and Keras write, contiguous or in chunks without filters.
//!
//! The reader finds the places of elements and decodes none. It follows hard links from the root group, and visits
//! each object once, so a cycle of links ends. It leaves out links in a heap of their own, types other than plain
//! little-endian numbers, datasets in their headers, and newer indexes of chunks. It also leaves out filtered
//! datasets, whose chunks are not their elements. All these bytes stay exact. Checksums cover metadata only, so no
//! tensor's bytes change one. A tensor that overlaps metadata makes the file opaque.
//!
//! Bounds: 64 MiB of metadata, where each block, link, path and chunk counts some more; 64 levels of groups, 31 of
//! trees; paths of 4096 bytes; 2^17 chunks; 32 dimensions. Memory is at most a few times the metadata. Beyond a bound
//! a file is opaque.

mod attribute;
mod chunks;
mod dataset;
mod group;
mod header;
mod keras;
mod source;

use std::collections::HashMap;
use std::ops::Range;

use super::read::{Fail, bad, begins_with, refuse_if};
use super::{Description, Kind, ReadAt, Role, Tensor, named, path};
use codec::Dtype;

use dataset::{Array, Dataset};
use header::{Header, LAYOUT};
use keras::Adam;
use source::{MAGIC, Source};

pub(super) use keras::{describe as describe_keras, is_keras};

/// Most groups in each other.
const MAX_DEPTH: usize = 64;
const MAX_PATH: usize = 4096;
/// Longest name of an optimizer, in bytes.
const MAX_NAME: usize = 256;
/// Other paths of a dataset that are kept.
const MAX_ALIASES: usize = 16;

/// Describes the file. `None` if it does not begin like an HDF5 file.
pub(super) fn describe(src: &dyn ReadAt, size: u64) -> Result<Option<Description>, Fail> {
    if !begins_with(src, size, &MAGIC)? {
        return Ok(None);
    }
    let Contents { mut tensors, note, adam } = read(src, 0..size)?;
    let training = adam.relate(&mut tensors);
    Ok(Some(Description { note, ..Description::new(Kind::Hdf5, tensors, training) }))
}

/// The content of an HDF5 file.
struct Contents {
    /// By ascending extent.
    tensors: Vec<Tensor>,
    /// The note about filtered datasets, which are left out.
    note: Option<String>,
    /// The file's statement about Keras's optimizer.
    adam: Adam,
}

/// A dataset whose place is known.
struct Named {
    path: String,
    aliases: Vec<String>,
    array: Array,
}

/// Reads the file that is this range of the source.
fn read(src: &dyn ReadAt, range: Range<u64>) -> Result<Contents, Fail> {
    let (mut source, root) = Source::open(src, range)?;
    let mut found: Vec<Named> = Vec::new();
    // Objects by address, and the dataset that each is.
    let mut objects: HashMap<u64, Option<usize>> = HashMap::new();
    let mut filtered: Vec<&str> = Vec::new();
    let (mut optimizer, mut config) = (None, None);
    let mut in_heaps = 0;
    let mut rest = vec![(root, String::new(), 0)];
    while let Some((address, path, depth)) = rest.pop() {
        match objects.get(&address) {
            Some(None) => continue,
            Some(Some(number)) => {
                let aliases = &mut found[*number].aliases;
                if aliases.len() < MAX_ALIASES {
                    aliases.push(path);
                }
                continue;
            }
            None => {}
        }
        source.spend(64)?;
        objects.insert(address, None);
        let header = Header::read(&mut source, address)?;
        if header.has(LAYOUT) {
            match Dataset::of(&mut source, &header)? {
                Dataset::Found(array) => {
                    objects.insert(address, Some(found.len()));
                    found.push(Named { path, aliases: Vec::new(), array });
                }
                Dataset::Filtered(how) => filtered.push(how),
                Dataset::Other => {}
            }
            continue;
        }
        if path == keras::OPTIMIZER {
            optimizer = attribute::text(&mut source, &header, "name", MAX_NAME)?;
        } else if path.is_empty() {
            config = attribute::text(&mut source, &header, "training_config", keras::MAX_CONFIG as usize)?;
        }
        in_heaps += u64::from(group::is_in_heap(&header));
        let links = group::links(&mut source, &header)?;
        refuse_if(!links.is_empty() && depth == MAX_DEPTH, "HDF5: more than 64 groups in each other")?;
        for link in links.into_iter().rev() {
            let mut below = path.clone();
            if !below.is_empty() {
                below.push('/');
            }
            path::push_text(&mut below, &link.name);
            refuse_if(below.len() > MAX_PATH, "HDF5: a path of more than 4096 bytes")?;
            source.spend(below.len() as u64)?;
            rest.push((link.address, below, depth + 1));
        }
    }
    let note = note(&filtered, in_heaps);
    let adam = Adam::of(optimizer.as_deref(), config.as_deref());
    let tensors = tensors(&mut source, found)?;
    if tensors.is_empty() {
        return bad(note.unwrap_or_else(|| "HDF5: no dataset that stepfs looks into".to_string()));
    }
    disjoint(&tensors, &source.into_blocks())?;
    Ok(Contents { tensors, note, adam })
}

/// The words for datasets with filters, or else for groups that were left out.
fn note(filtered: &[&str], in_heaps: u64) -> Option<String> {
    let how = filtered.iter().find(|how| **how != dataset::UNNAMED).or(filtered.first());
    let advice = "save with compression=None to shrink it";
    match (how, filtered.len(), in_heaps) {
        (Some(how), 1, _) => Some(format!("HDF5: 1 dataset has chunks {how}: kept as it is; {advice}")),
        (Some(how), n, _) => Some(format!("HDF5: {n} datasets have chunks {how}: kept as they are; {advice}")),
        (None, _, 0) => None,
        (None, _, n) => {
            let groups = if n == 1 { "1 group keeps its".to_string() } else { format!("{n} groups keep their") };
            Some(format!("HDF5: {groups} links in a heap, which stepfs does not read; save with libver=\"earliest\""))
        }
    }
}

/// The tensors that datasets are, by ascending extent.
fn tensors(source: &mut Source, found: Vec<Named>) -> Result<Vec<Tensor>, Fail> {
    let mut tensors = Vec::new();
    for Named { path, aliases, array } in found {
        // Each of its names can take the role of a weight away.
        let roles = std::iter::once(&path).chain(&aliases).map(|path| role(path, array.dtype));
        let role = roles.min_by_key(|(role, _)| *role == Role::Weight).unwrap_or(named::UNKNOWN);
        let mut aliases = Some(aliases);
        for part in array.parts {
            let (path, shape) = match part.chunk {
                None => (path.clone(), array.shape.clone()),
                Some((offsets, shape)) => {
                    let offsets: Vec<String> = offsets.iter().map(u64::to_string).collect();
                    (format!("{path}[{}]", offsets.join(",")), shape)
                }
            };
            source.spend(path.len() as u64)?;
            let mut tensor = Tensor::found(path, (array.dtype, shape), role, part.extent);
            tensor.aliases = aliases.take().unwrap_or_default();
            tensor.is_part_of(&array.shape);
            tensors.push(tensor);
        }
    }
    tensors.sort_by_key(|t| t.extent.start);
    refuse_if(Description::has_twins(&tensors), "HDF5: two datasets have the same path")?;
    Ok(tensors)
}

fn role(path: &str, dtype: Dtype) -> (Role, &'static str) {
    named::role(path, dtype, "floating point, in an HDF5 file")
}

/// Sees that tensors overlap neither each other nor metadata. Both ascend by where they start.
fn disjoint(tensors: &[Tensor], blocks: &[Range<u64>]) -> Result<(), Fail> {
    refuse_if(tensors.windows(2).any(|pair| pair[1].extent.start < pair[0].extent.end), "HDF5: datasets overlap")?;
    let (mut next, mut end) = (0, 0);
    for tensor in tensors {
        while let Some(block) = blocks.get(next).filter(|block| block.start < tensor.extent.end) {
            end = end.max(block.end);
            next += 1;
        }
        refuse_if(end > tensor.extent.start, "HDF5: a dataset overlaps metadata")?;
    }
    Ok(())
}
