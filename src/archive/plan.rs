//! Chooses how each tensor of a file is encoded, from samples of it, of the state after it and of the base.

use std::collections::HashMap;
use std::fs::File;
use std::io;

use crate::codec::{TILE_BYTES, lattice, lossless};
use crate::container::{Description, ReadAt, Role, Tensor};
use crate::recall::Chain;
use crate::recall::tile;
use crate::store::Profile;
use crate::store::object::{Coding, TensorEntry};

/// Tensors below this many bytes go into the skeleton, bit-exact: an entry in the index costs about 100 bytes.
const MIN_TENSOR_BYTES: u64 = 4096;
/// Tensors of at least this many bytes have edges in the skeleton: 12 KiB are 0.15% of them.
const MIN_EDGES_BYTES: u64 = 8 << 20;
/// A read of 4 KiB that begins in the header before a tensor reaches so far into the tensor, in whole pages.
const HEAD_BYTES: u64 = 8192;
/// The page that a header begins in holds less than this of the tensor before it.
const TAIL_BYTES: u64 = 4096;
/// Elements taken from each of `SAMPLES` places to measure a tensor's update. The root mean square of 65,536 is good
/// to 1% even where a few rows move a hundred times more than the others.
const SAMPLE_ELEMENTS: usize = 4096;
const SAMPLES: usize = 16;
/// Tiles decoded of the base to measure a tensor's update, spread over the tensor.
const SAMPLE_TILES: usize = 3;
/// The lattice's step in root mean squares of the update: half a percent behind the run after nine restores at 6.5%
/// of the weights' bytes (DESIGN section 5; LC-Checkpoint's 3 bits lose as much at 7.1%).
const STEP_PER_RMS: f64 = 1.0;
/// The update since the base counts at most this many times the update to the state after: a base that lies far back
/// must not make this state coarser than training needs.
const MOST_OF_NEXT: f64 = 1.5;
/// A chain keeps its step while the one wanted is within this factor of it: a change costs a twelfth of a bit.
const KEEP_WITHIN: f64 = 1.15;

/// How one tensor is to be encoded.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    /// Index in the description.
    pub(super) index: usize,
    /// The tensor, with the extent that gets tiles.
    pub(super) tensor: Tensor,
    pub(super) coding: Coding,
    /// What to use when a lattice turns out not to fit (NaN, infinity).
    pub(super) fallback: Coding,
}

impl Plan {
    /// Whether the tensor is, or may become, a difference to the base.
    pub(super) fn needs_base(&self) -> bool {
        self.coding.parent().is_some() || self.fallback.parent().is_some()
    }
}

/// What a plan is made from.
pub(super) struct Material<'a> {
    pub(super) source: &'a File,
    pub(super) description: &'a Description,
    /// The state after this one, as written, with its tensors.
    pub(super) newer: (&'a (dyn ReadAt + Sync), &'a Description),
    /// The archived state that this one becomes a difference to.
    pub(super) base: Option<&'a Chain>,
    /// The lineage has archived states. Its first one is lossless; without a base, a later one is a lattice keyframe.
    pub(super) goes_on: bool,
    pub(super) profile: Profile,
}

/// One entry per tensor that gets tiles of its own, in file order. All other bytes are skeleton.
pub(super) fn plan(material: &Material) -> io::Result<Vec<Plan>> {
    let newer: HashMap<&str, &Tensor> = material.newer.1.tensors.iter().map(|t| (t.path.as_str(), t)).collect();
    let base: HashMap<&str, (u32, &TensorEntry)> = match material.base {
        Some(chain) => {
            let tensors = chain.leaf().index().tensors.iter().enumerate();
            tensors.map(|(at, t)| (t.path.as_str(), (at as u32, t))).collect()
        }
        None => HashMap::new(),
    };
    let mut plans = Vec::new();
    for (index, tensor) in material.description.tensors.iter().enumerate() {
        let tensor = without_edges(tensor);
        let len = tensor.extent.end - tensor.extent.start;
        if len < MIN_TENSOR_BYTES {
            continue;
        }
        let twin = newer.get(tensor.path.as_str()).filter(|t| t.dtype == tensor.dtype && t.shape == tensor.shape);
        let parent = base.get(tensor.path.as_str()).copied();
        let parent = parent.filter(|(_, p)| p.dtype == tensor.dtype && p.extent.end - p.extent.start == len);
        let fallback = lossless_coding(material, &tensor, parent)?;
        let quantize = material.profile == Profile::Balanced && material.goes_on && may_quantize(&tensor);
        let lattice = match (quantize, twin) {
            (true, Some(twin)) => lattice_coding(material, &tensor, &without_edges(twin), parent)?,
            _ => None,
        };
        plans.push(Plan { index, tensor, coding: lattice.unwrap_or(fallback), fallback });
    }
    Ok(plans)
}

/// A tensor whose first and last pages are left to the skeleton, when it is so large that this costs nothing. Whoever
/// looks for one tensor in a torch zip reads the headers of all: the pages that hold them hold the edges of tensors too,
/// and would each cost a tile.
fn without_edges(tensor: &Tensor) -> Tensor {
    let mut tensor = tensor.clone();
    if tensor.extent.end - tensor.extent.start >= MIN_EDGES_BYTES {
        tensor.extent = tensor.extent.start + HEAD_BYTES..tensor.extent.end - TAIL_BYTES;
    }
    tensor
}

/// Only what is known to be a weight, and has a shape that bears error: vectors (norms, biases) cost nothing to keep.
fn may_quantize(tensor: &Tensor) -> bool {
    tensor.role == Role::Weight && tensor.dtype.is_lattice_float() && tensor.shape.len() >= 2
}

/// Alone or as difference to the base, whichever is estimated to be smaller.
fn lossless_coding(material: &Material, tensor: &Tensor, parent: Option<(u32, &TensorEntry)>) -> io::Result<Coding> {
    let (Some((parent, _)), Some(chain)) = (parent, material.base) else {
        return Ok(Coding::Lossless);
    };
    let middle = tiles(tensor) / 2;
    let data = read_tile(material.source, tensor, middle)?;
    let base = tile::decode(chain, parent as usize, middle)?;
    let delta = lossless::estimate(tensor.dtype, &data, Some(&base));
    let alone = lossless::estimate(tensor.dtype, &data, None);
    Ok(if delta < alone { Coding::LosslessDelta { parent } } else { Coding::Lossless })
}

/// The lattice for a weight, or `None` where lossless is right: the first of its lineage, or nothing has moved.
fn lattice_coding(
    material: &Material,
    tensor: &Tensor,
    twin: &Tensor,
    parent: Option<(u32, &TensorEntry)>,
) -> io::Result<Option<Coding>> {
    let next = next_update(material, tensor, twin)?;
    let (Some((parent, entry)), Some(chain)) = (parent, material.base) else {
        // A new chain of a known lineage.
        return Ok(next.and_then(|rms| step(tensor, rms)).map(|step| Coding::LatticeKey { step }));
    };
    let last = last_update(material, tensor, chain, parent, entry.coding.step())?;
    let rms = match (last, next) {
        (Some(last), Some(next)) => Some(last.min(MOST_OF_NEXT * next)),
        (Some(last), None) => Some(last),
        (None, next) => next,
    };
    let wanted = rms.and_then(|rms| step(tensor, rms));
    let Some(before) = entry.coding.step() else {
        // The base is exact: any step will do. Where nothing moves, a lossless difference costs nothing.
        return Ok(wanted.map(|step| Coding::Lattice { parent, step }));
    };
    let keep = |wanted: &f64| (1.0 / KEEP_WITHIN..KEEP_WITHIN).contains(&(wanted / before)) || next.is_none();
    Ok(Some(Coding::Lattice { parent, step: wanted.filter(|wanted| !keep(wanted)).unwrap_or(before) }))
}

fn step(tensor: &Tensor, rms: f64) -> Option<f64> {
    lattice::choose_g(tensor.dtype, &[rms], STEP_PER_RMS)
}

/// Root mean square of the update from the base's state, as it was written, to this one. The base is known with an
/// error that is uniform over its step, so a twelfth of its square is taken off: without that, steps would grow from
/// state to state by feeding on their own error. `None`: what there is may be that error alone.
fn last_update(
    material: &Material,
    tensor: &Tensor,
    chain: &Chain,
    parent: u32,
    step: Option<f64>,
) -> io::Result<Option<f64>> {
    let tiles = tiles(tensor);
    let mut updates = Vec::new();
    for sample in 0..SAMPLE_TILES.min(tiles) {
        let number = (2 * sample + 1) * tiles / (2 * SAMPLE_TILES.min(tiles));
        let now = read_tile(material.source, tensor, number)?;
        let then = tile::decode(chain, parent as usize, number)?;
        updates.extend(lattice::updates(tensor.dtype, &now, &then));
    }
    let noise = step.map_or(0.0, |step| step * step / 12.0);
    let power = mean_square(&updates);
    Ok((power > 2.0 * noise && power.is_finite()).then(|| (power - noise).sqrt()))
}

/// Root mean square of the update to the state after this one; `None` when nothing moves.
fn next_update(material: &Material, tensor: &Tensor, twin: &Tensor) -> io::Result<Option<f64>> {
    let size = tensor.dtype.size() as u64;
    let elements = (tensor.extent.end - tensor.extent.start) / size;
    let take = (SAMPLE_ELEMENTS as u64).min(elements);
    let places = if elements <= take * SAMPLES as u64 { elements.div_ceil(take) } else { SAMPLES as u64 };
    let mut updates = Vec::with_capacity((take * places) as usize);
    let (mut now, mut then) = (Vec::new(), Vec::new());
    for place in 0..places {
        let first = if places == 1 { 0 } else { place * (elements - take) / (places - 1) };
        now.resize((take * size) as usize, 0);
        then.resize((take * size) as usize, 0);
        material.source.read_exact_at(&mut now, tensor.extent.start + first * size)?;
        material.newer.0.read_exact_at(&mut then, twin.extent.start + first * size)?;
        updates.extend(lattice::updates(tensor.dtype, &then, &now));
    }
    let power = mean_square(&updates);
    Ok((power > 0.0 && power.is_finite()).then(|| power.sqrt()))
}

fn mean_square(values: &[f64]) -> f64 {
    values.iter().map(|value| value * value).sum::<f64>() / values.len().max(1) as f64
}

fn tiles(tensor: &Tensor) -> usize {
    (tensor.extent.end - tensor.extent.start).div_ceil(TILE_BYTES as u64) as usize
}

/// Reads a tile of a tensor as written.
pub(super) fn read_tile(source: &dyn ReadAt, tensor: &Tensor, tile: usize) -> io::Result<Vec<u8>> {
    let start = tensor.extent.start + tile as u64 * TILE_BYTES as u64;
    let mut data = vec![0; (tensor.extent.end - start).min(TILE_BYTES as u64) as usize];
    source.read_exact_at(&mut data, start)?;
    Ok(data)
}
