//! Chooses how each tensor of a file is encoded, from samples of it, of the state after it and of the base.

use std::collections::HashMap;
use std::io;

use crate::codec::{Dtype, TILE_BYTES, lattice, lossless};
use crate::container::{Description, ReadAt, Role, Tensor};
use crate::entropy::ints;
use crate::recall::Chain;
use crate::recall::tile::{self, State};
use crate::store::Profile;
use crate::store::object::{Coding, TensorEntry};

/// Tensors below this many bytes go into the skeleton, bit-exact: an entry in the index costs about 100 bytes.
const MIN_TENSOR_BYTES: u64 = 4096;
/// Elements taken from each of `SAMPLES` places to measure a tensor's update. The root mean square of 65,536 is good
/// to 1% even where a few rows move a hundred times more than the others.
const SAMPLE_ELEMENTS: usize = 4096;
const SAMPLES: usize = 16;
/// The lattice's step in root mean squares of the update: half a percent behind the run after nine restores at 6.5%
/// of the weights' bytes (DESIGN section 5; LC-Checkpoint's 3 bits lose as much at 7.1%).
const STEP_PER_RMS: f64 = 1.0;
/// A chain's step is halved when it is coarser than this many steps of the one wanted, so that it stays within
/// 0.75 and 1.5 of it while updates shrink.
const HALVE_ABOVE: f64 = 1.5;

/// How one tensor is to be encoded.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    /// Index in the description.
    pub(super) tensor: usize,
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
    pub(super) source: &'a (dyn ReadAt + Sync),
    pub(super) description: &'a Description,
    /// The state after this one, as written, with its tensors.
    pub(super) newer: (&'a (dyn ReadAt + Sync), &'a Description),
    /// The archived state that this one becomes a difference to.
    pub(super) base: Option<&'a Chain>,
    /// The lineage has archived states, but this one starts a new chain: a lattice keyframe.
    pub(super) rekey: bool,
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
    for (at, tensor) in material.description.tensors.iter().enumerate() {
        let len = tensor.extent.end - tensor.extent.start;
        if len < MIN_TENSOR_BYTES {
            continue;
        }
        let twin =
            newer.get(tensor.path.as_str()).copied().filter(|t| t.dtype == tensor.dtype && t.shape == tensor.shape);
        let parent = base.get(tensor.path.as_str()).copied();
        let parent = parent.filter(|(_, p)| p.dtype == tensor.dtype && p.extent.end - p.extent.start == len);
        let fallback = lossless_coding(material, tensor, parent)?;
        let quantize = material.profile == Profile::Balanced && may_quantize(tensor);
        let lattice = match (quantize, twin) {
            (true, Some(twin)) => lattice_coding(material, tensor, twin, parent)?,
            _ => None,
        };
        plans.push(Plan { tensor: at, coding: lattice.unwrap_or(fallback), fallback });
    }
    Ok(plans)
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
    let middle = middle_tile(tensor);
    let data = read_tile(material.source, tensor, middle)?;
    let base = tile::decode(chain, parent as usize, middle)?;
    let delta = lossless::estimate(tensor.dtype, &data, Some(&base));
    let alone = lossless::estimate(tensor.dtype, &data, None);
    Ok(if delta < alone { Coding::LosslessDelta { parent } } else { Coding::Lossless })
}

/// The lattice for a weight, or `None` where lossless is right: the first of its lineage, or nothing to measure.
fn lattice_coding(
    material: &Material,
    tensor: &Tensor,
    twin: &Tensor,
    parent: Option<(u32, &TensorEntry)>,
) -> io::Result<Option<Coding>> {
    let wanted = wanted_step(material, tensor, twin)?;
    let (Some((parent, _)), Some(chain)) = (parent, material.base) else {
        return Ok(wanted.filter(|_| material.rekey).map(|step| Coding::LatticeKey { step }));
    };
    let middle = middle_tile(tensor);
    let data = read_tile(material.source, tensor, middle)?;
    let state = tile::state(chain, parent as usize, middle)?;
    let State::Lattice { keyframe, accumulators, step: parent_step, .. } = state else {
        // The base is exact: any step will do. Where nothing moves, a lossless difference costs nothing.
        return Ok(wanted.map(|step| Coding::Lattice { parent, step, halvings: 0 }));
    };
    let mut halvings = 0;
    let mut step = parent_step;
    while wanted.is_some_and(|wanted| step > HALVE_ABOVE * wanted) && halvings < 16 {
        step /= 2.0;
        halvings += 1;
    }
    let going_on = Coding::Lattice { parent, step, halvings };
    // Updates have outgrown the chain's step, which can only shrink: see whether a new keyframe is cheaper.
    if let Some(wanted) = wanted.filter(|wanted| *wanted > 2.0 * step) {
        let delta = symbols(tensor.dtype, &data, keyframe.as_deref(), step, Some((&accumulators, halvings)));
        let key = symbols(tensor.dtype, &data, None, wanted, None);
        if let (Some(delta), Some(key)) = (delta, key)
            && ints::estimate_bits(&key) < ints::estimate_bits(&delta)
        {
            return Ok(Some(Coding::LatticeKey { step: wanted }));
        }
    }
    Ok(Some(going_on))
}

/// Symbols of a tile, for an estimate; `None` where a lattice does not fit.
fn symbols(
    dtype: Dtype,
    data: &[u8],
    key: Option<&[u8]>,
    step: f64,
    parent: Option<(&[i32], u32)>,
) -> Option<Vec<i32>> {
    let mut a = vec![0; data.len() / dtype.size()];
    let mut r = vec![0; data.len()];
    lattice::quantize(dtype, data, key, step, &mut a, &mut r, &mut Vec::new()).ok()?;
    if let Some((parent, halvings)) = parent {
        a.iter_mut().zip(parent).for_each(|(a, p)| *a = a.wrapping_sub(p.wrapping_shl(halvings)));
    }
    Some(a)
}

/// The step that the raw update to the state after this one asks for. Never from the difference to the base, which
/// holds the base's own error: that spirals.
fn wanted_step(material: &Material, tensor: &Tensor, twin: &Tensor) -> io::Result<Option<f64>> {
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
    Ok(lattice::choose_g(tensor.dtype, &updates, STEP_PER_RMS))
}

fn middle_tile(tensor: &Tensor) -> usize {
    let tiles = (tensor.extent.end - tensor.extent.start).div_ceil(TILE_BYTES as u64);
    (tiles / 2).min(tiles - 1) as usize
}

/// Reads a tile of a tensor as written.
pub(super) fn read_tile(source: &dyn ReadAt, tensor: &Tensor, tile: usize) -> io::Result<Vec<u8>> {
    let start = tensor.extent.start + tile as u64 * TILE_BYTES as u64;
    let mut data = vec![0; (tensor.extent.end - start).min(TILE_BYTES as u64) as usize];
    source.read_exact_at(&mut data, start)?;
    Ok(data)
}
