//! Chooses how each tensor of a file is encoded, from samples of it, of the state after it and of the base.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::sync::Arc;

use crate::codec::{TILE_BYTES, lattice, lossless};
use crate::container::{Description, ReadAt, Tensor};
use crate::recall::Chain;
use crate::recall::{State, tile};
use crate::store::Profile;
use crate::store::object::{Coding, TensorEntry};

use super::payload;

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
    /// Without the base.
    fn begin_anew(&mut self) {
        self.fallback = Coding::Lossless;
        self.coding = self.coding.step().map_or(Coding::Lossless, |step| Coding::LatticeKey { step });
    }

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
    /// The archived state before this one: the base, or what lies between a super-step and the one before.
    pub(super) previous: Option<&'a Chain>,
    /// The base is the super-step before this one: the place to ask whether a keyframe would take less room.
    pub(super) super_step: bool,
    /// The lineage has archived states. Its first one is lossless; without a base, a later one is a lattice keyframe.
    pub(super) goes_on: bool,
    pub(super) profile: Profile,
}

/// A tensor of an archived state.
#[derive(Clone, Copy)]
struct Archived<'a> {
    chain: &'a Chain,
    /// Number in the leaf's table.
    number: u32,
    entry: &'a TensorEntry,
}

/// The tensors of an archived state by path.
struct Tensors<'a>(HashMap<&'a str, Archived<'a>>);

impl<'a> Tensors<'a> {
    fn of(chain: Option<&'a Chain>) -> Tensors<'a> {
        let tensors = chain.into_iter().flat_map(|chain| {
            let tensors = chain.leaf().index().tensors.iter().enumerate();
            tensors.map(move |(at, entry)| (entry.path.as_str(), Archived { chain, number: at as u32, entry }))
        });
        Tensors(tensors.collect())
    }

    /// The one that this tensor can be a difference to.
    fn get(&self, tensor: &Tensor) -> Option<Archived<'a>> {
        let len = |extent: &std::ops::Range<u64>| extent.end - extent.start;
        let found = self.0.get(tensor.path.as_str()).copied();
        found.filter(|other| other.entry.dtype == tensor.dtype && len(&other.entry.extent) == len(&tensor.extent))
    }
}

/// How a file is to be encoded.
pub(super) struct Planned {
    /// One entry per tensor that gets tiles of its own, in file order. All other bytes are skeleton.
    pub(super) plans: Vec<Plan>,
    /// A super-step: what it and a keyframe in its place would take, in bytes of tensors.
    pub(super) forecast: Option<Forecast>,
}

/// What the next interval of states costs with a super-step and with a keyframe at its beginning. What follows in it is
/// the same for both: those states are differences to one another, and the next super-step spans eight of them either
/// way. So the two may be compared alone (Check-N-Run, 4.1.3, compares intervals whose increments grow with their
/// distance to the full checkpoint; these do not).
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Forecast {
    pub(super) super_step: f64,
    pub(super) keyframe: f64,
}

impl Forecast {
    /// Whether to begin a new chain. A keyframe that costs the same is worth more: nothing older is needed.
    pub(super) fn wants_keyframe(&self) -> bool {
        self.keyframe <= self.super_step
    }

    /// The choice, for people.
    pub(super) fn words(&self) -> String {
        let (kib, other) = (self.super_step / 1024.0, self.keyframe / 1024.0);
        match self.wants_keyframe() {
            true => format!("keyframe: {other:.0} KiB expected, {kib:.0} KiB as super-step"),
            false => format!("super-step: {kib:.0} KiB expected, {other:.0} KiB as keyframe"),
        }
    }
}

/// Chooses the coding of each tensor.
///
/// # Errors
/// What the device reports; a base that cannot be decoded.
pub(super) fn plan(material: &Material) -> io::Result<Planned> {
    let newer: HashMap<&str, &Tensor> = material.newer.1.tensors.iter().map(|t| (t.path.as_str(), t)).collect();
    let base = Tensors::of(material.base);
    let previous = Tensors::of(material.previous);
    let mut plans = Vec::new();
    let mut forecast = Forecast { super_step: 0.0, keyframe: 0.0 };
    for (index, tensor) in material.description.tensors.iter().enumerate() {
        let tensor = without_edges(tensor);
        let len = tensor.extent.end - tensor.extent.start;
        if len < MIN_TENSOR_BYTES {
            continue;
        }
        let twin = newer.get(tensor.path.as_str()).filter(|t| t.dtype == tensor.dtype && t.shape == tensor.shape);
        let parent = base.get(&tensor);
        let (fallback, mut bits) = lossless_coding(material, &tensor, parent)?;
        let quantize = material.profile == Profile::Balanced && material.goes_on && may_quantize(&tensor);
        let lattice = match (quantize, twin) {
            (true, Some(twin)) => {
                lattice_coding(material, &tensor, &without_edges(twin), parent, previous.get(&tensor))?
            }
            _ => None,
        };
        if let Some(coding) = lattice.filter(|_| material.super_step) {
            bits = lattice_bits(material, &tensor, coding)?.unwrap_or(bits);
        }
        let middle = len.min(TILE_BYTES as u64) as f64;
        forecast.super_step += bits.0 / 8.0 * len as f64 / middle;
        forecast.keyframe += bits.1 / 8.0 * len as f64 / middle;
        plans.push(Plan { index, tensor, coding: lattice.unwrap_or(fallback), fallback });
    }
    let forecast = Some(forecast).filter(|_| material.super_step && material.base.is_some());
    if forecast.is_some_and(|forecast| forecast.wants_keyframe()) {
        plans.iter_mut().for_each(Plan::begin_anew);
    }
    Ok(Planned { plans, forecast })
}

/// Bits of the middle tile of a tensor on the lattice, as a difference to the base and as keyframe.
fn lattice_bits(material: &Material, tensor: &Tensor, coding: Coding) -> io::Result<Option<(f64, f64)>> {
    let (Coding::Lattice { parent, step }, Some(chain)) = (coding, material.base) else {
        return Ok(None);
    };
    let middle = tiles(tensor) / 2;
    let data = Arc::new(read_tile(material.source, tensor, middle)?);
    let base = tile::state(chain, parent as usize, middle)?;
    let bits = |coding: Coding, base: Option<&State>| -> io::Result<Option<f64>> {
        let Some((state, ..)) = payload::quantize(tensor.dtype, coding, &data, base) else {
            return Ok(None);
        };
        let mut out = Vec::new();
        let fits = payload::payload(tensor.dtype, coding, &state, base, &mut out)?;
        Ok(fits.then_some(8.0 * out.len() as f64))
    };
    let super_step = bits(coding, Some(&base))?;
    let keyframe = bits(Coding::LatticeKey { step }, None)?;
    Ok(super_step.zip(keyframe))
}

/// A tensor whose first and last pages are left to the skeleton, when it is so large that this costs nothing. Whoever
/// looks for one tensor in a torch zip reads the headers of all: the pages that hold them hold the edges of tensors too,
/// and would each cost a tile.
pub(super) fn without_edges(tensor: &Tensor) -> Tensor {
    let mut tensor = tensor.clone();
    if tensor.extent.end - tensor.extent.start >= MIN_EDGES_BYTES {
        tensor.extent = tensor.extent.start + HEAD_BYTES..tensor.extent.end - TAIL_BYTES;
    }
    tensor
}

/// Only what is known to be a weight, or an average of one where models stand, and has a shape that bears error: vectors
/// (norms, biases) cost nothing to keep.
fn may_quantize(tensor: &Tensor) -> bool {
    tensor.is_weight() && tensor.dtype.is_lattice_float() && tensor.shape.len() >= 2
}

/// Alone or as difference to the base, whichever is estimated to be smaller; with the bits of the middle tile in that
/// coding and alone.
fn lossless_coding(material: &Material, tensor: &Tensor, parent: Option<Archived>) -> io::Result<(Coding, (f64, f64))> {
    let Some(Archived { chain, number: parent, .. }) = parent else {
        return Ok((Coding::Lossless, (0.0, 0.0)));
    };
    let middle = tiles(tensor) / 2;
    let data = read_tile(material.source, tensor, middle)?;
    let base = tile::decode(chain, parent as usize, middle)?;
    let delta = lossless::estimate(tensor.dtype, &data, Some(&base));
    let alone = lossless::estimate(tensor.dtype, &data, None);
    Ok(if delta < alone {
        (Coding::LosslessDelta { parent }, (delta, alone))
    } else {
        (Coding::Lossless, (alone, alone))
    })
}

/// The lattice for a weight, or `None` where lossless is right: the first of its lineage, or nothing has moved.
fn lattice_coding(
    material: &Material,
    tensor: &Tensor,
    twin: &Tensor,
    parent: Option<Archived>,
    previous: Option<Archived>,
) -> io::Result<Option<Coding>> {
    let next = next_update(material, tensor, twin)?;
    let Some(base) = parent else {
        // A new chain of a known lineage.
        return Ok(next.and_then(|rms| step(tensor, rms)).map(|step| Coding::LatticeKey { step }));
    };
    let (parent, previous) = (base.number, previous.unwrap_or(base));
    let last = last_update(material, tensor, previous)?;
    if let (true, Some(step)) = (last.is_same, previous.entry.coding.step()) {
        // Saved a second time (`last.ckpt`): with the same step the difference costs nothing.
        return Ok(Some(Coding::Lattice { parent, step }));
    }
    let rms = match (last.rms, next) {
        (Some(last), Some(next)) => Some(last.min(MOST_OF_NEXT * next)),
        (Some(last), None) => Some(last),
        (None, next) => next,
    };
    let wanted = rms.and_then(|rms| step(tensor, rms));
    let Some(before) = previous.entry.coding.step() else {
        // The base is exact: any step will do. Where nothing moves, a lossless difference costs nothing.
        return Ok(wanted.map(|step| Coding::Lattice { parent, step }));
    };
    let keep = |wanted: &f64| (1.0 / KEEP_WITHIN..KEEP_WITHIN).contains(&(wanted / before)) || next.is_none();
    Ok(Some(Coding::Lattice { parent, step: wanted.filter(|wanted| !keep(wanted)).unwrap_or(before) }))
}

fn step(tensor: &Tensor, rms: f64) -> Option<f64> {
    lattice::choose_g(tensor.dtype, &[rms], STEP_PER_RMS)
}

/// The update from the state before, as it was written, to this one.
struct LastUpdate {
    /// Its root mean square. That state is known with an error that is uniform over its step, so a twelfth of its square is
    /// taken off: without that, steps would grow from state to state by feeding on their own error. `None`: what there
    /// is may be that error alone.
    rms: Option<f64>,
    /// Nothing is off by more than that state's bound, not one of a hundred thousand: it is the same state.
    is_same: bool,
}

fn last_update(material: &Material, tensor: &Tensor, previous: Archived) -> io::Result<LastUpdate> {
    let step = previous.entry.coding.step();
    let tiles = tiles(tensor);
    let mut updates = Vec::new();
    for sample in 0..SAMPLE_TILES.min(tiles) {
        let number = (2 * sample + 1) * tiles / (2 * SAMPLE_TILES.min(tiles));
        let now = read_tile(material.source, tensor, number)?;
        let then = tile::decode(previous.chain, previous.number as usize, number)?;
        updates.extend(lattice::updates(tensor.dtype, &now, &then));
    }
    let noise = step.map_or(0.0, |step| step * step / 12.0);
    let power = mean_square(&updates);
    let rms = (power > 2.0 * noise && power.is_finite()).then(|| (power - noise).sqrt());
    let is_same = step.is_some_and(|step| updates.iter().all(|update| update.abs() <= step / 2.0));
    Ok(LastUpdate { rms, is_same })
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
