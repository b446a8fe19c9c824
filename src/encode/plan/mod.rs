//! Chooses how each tensor of a file is encoded, from samples of it, of the state after it and of the base.

mod archived;
mod casts;
mod lattice;
mod limits;
mod memory;
mod met;
mod moments;
pub(super) mod pace;
mod phase;
mod proof;
mod rates;
mod steep;

use std::collections::HashMap;
use std::io;

use rayon::prelude::*;

use crate::codec::Rows;
use crate::codec::floor::{Keep, Limits};
use crate::codec::{TILE_BYTES, lossless};
use crate::container::{Description, ReadAt, Role, Tensor, Use};
use crate::entropy::scratch;
use crate::published;
use crate::published::registry::SystemId;
use crate::recall::{Chain, walk};
use crate::store::Profiles;
use crate::store::object::{self, HEAD_BYTES, TAIL_BYTES, rows_and_width};
use crate::tile::{Codec, Coding, TileSpec};

pub(super) use lattice::{read, sample};
pub(super) use met::is_met_by;
pub(super) use moments::has_factors;

use archived::{Archived, Tensors};
use rates::{Kind, Rates};

/// Lossless tensors below this many bytes go into the skeleton, where they are compressed together.
const MIN_LOSSLESS_BYTES: u64 = 4096;
/// Smaller tensors are not quantized: an entry in the index and a payload's own fields take some 40 bytes.
const MIN_LOSSY_BYTES: u64 = 128;
/// Tensors of at least this many bytes have edges in the skeleton: 12 KiB are 0.15% of them.
const MIN_EDGES_BYTES: u64 = 8 << 20;

/// The encoding of one tensor.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    /// Index in the description.
    pub(super) index: usize,
    /// The tensor, with the extent that gets tiles.
    pub(super) tensor: Tensor,
    pub(super) coding: Coding,
    /// The coding without the base.
    alone: Coding,
    /// The tensor in the base for which this one is, or may become, a difference ([`Plan::lossless`]).
    parent: Option<u32>,
    /// For the lattice by rows: a row's step in root mean squares of its difference.
    pub(super) row_step: f64,
    /// For first moments: the share of a step that is added before rounding.
    pub(super) outward: f64,
    /// The published system for it.
    pub(super) system: Option<SystemId>,
    /// Besides its codec's bound: the least and the largest of its elements, beyond which none may come back.
    pub(super) limits: Option<Limits>,
    /// Of a lossy weight: the root mean square of its update to the state after. 0 for all others.
    pub(super) update: f64,
}

impl Plan {
    /// Of a run of bytes that no container describes: lossless, and a difference where it has a parent.
    pub(super) fn of_run(index: usize, run: &Tensor, parent: Option<u32>) -> Plan {
        Plan {
            index,
            tensor: run.clone(),
            coding: Coding { codec: Codec::Lossless, parent },
            alone: Coding::LOSSLESS,
            parent,
            row_step: 0.0,
            outward: 0.0,
            system: None,
            limits: None,
            update: 0.0,
        }
    }

    /// Without the base.
    fn begin_anew(&mut self) {
        self.parent = None;
        self.coding = self.alone;
    }

    /// Which elements are kept exactly.
    pub(super) fn keep(&self) -> Keep {
        self.limits.map_or(Keep::Nothing, Keep::Within)
    }

    /// Whether the tensor is, or may become, a difference to the base.
    pub(super) fn needs_base(&self) -> bool {
        self.parent.is_some()
    }

    /// The lossless coding of a tensor, chosen only if the tensor does not fit its codec.
    pub(super) fn lossless(&self, source: &dyn ReadAt, base: Option<&Chain>) -> io::Result<Coding> {
        lossless_choice(source, &self.tensor, base.zip(self.parent)).map(|choice| choice.coding)
    }
}

/// The input of a plan.
pub(super) struct Material<'a> {
    pub(super) source: &'a (dyn ReadAt + Sync),
    pub(super) description: &'a Description,
    /// The state after this one, as written, with its tensors. With `ahead`, the state before it, as written.
    pub(super) newer: (&'a (dyn ReadAt + Sync), &'a Description),
    /// No state after this one is known. The proofs of the state before hold, and the plan expects its update again.
    pub(super) ahead: bool,
    /// The archived state that this one becomes a difference to.
    pub(super) base: Option<&'a Chain>,
    /// The archived state before this one: the base, or for a super-step a state between it and its base.
    pub(super) previous: Option<&'a Chain>,
    /// The base is the super-step before this one. Only here a keyframe may win.
    pub(super) super_step: bool,
    /// Iterations to the state after it, as the two names count them: for files that count none.
    pub(super) apart: Option<f64>,
    pub(super) profiles: &'a Profiles,
}

impl Material<'_> {
    /// The numbers for a tensor of this role; `None`: lossless.
    fn rates(&self, role: Role) -> Option<Rates> {
        rates::rates(self.profiles.of(role))
    }
}

/// The encoding of a file.
pub(super) struct Planned {
    /// One entry per tensor that gets tiles of its own, in file order. All other bytes are skeleton.
    pub(super) plans: Vec<Plan>,
    /// For a super-step: its expected size and a keyframe's, in bytes of tensors.
    pub(super) forecast: Option<Forecast>,
}

/// The cost of a super-step and of a keyframe at the beginning of the next interval. The later states cost the same
/// either way: each is a difference to the one before, and the next super-step spans eight states. So these two may
/// be compared alone. (Check-N-Run, 4.1.3, compares whole intervals, because its increments grow with their distance
/// to the full checkpoint.)
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Forecast {
    pub(super) super_step: f64,
    pub(super) keyframe: f64,
}

impl Forecast {
    /// Whether to begin a new chain. A keyframe of equal cost wins, because it needs no older object.
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

/// A tensor's coding with the base and without, and the bits of its middle tile in both.
struct Choice {
    coding: Coding,
    alone: Coding,
    bits: (f64, f64),
}

/// The input for the coding of one tensor.
struct Subject<'a> {
    material: &'a Material<'a>,
    tensor: &'a Tensor,
    /// The tensor in the state after this one.
    twin: Option<&'a Tensor>,
    /// The tensor in the base.
    parent: Option<Archived<'a>>,
    /// The tensor in the state before.
    previous: Option<Archived<'a>>,
    rates: Rates,
    /// Factor on the step of a weight or of its second moment, at most 1, see [`steep::cautions`].
    caution: f64,
    /// Its other moment, and that one's place among the plans.
    partner: Option<(&'a Tensor, u32)>,
}

/// Chooses the coding of each tensor.
pub(super) fn plan(material: &Material) -> io::Result<Planned> {
    let written = &material.description.tensors;
    let mut all: Vec<Tensor> = written.iter().map(without_edges).collect();
    let newer: HashMap<&str, &Tensor> = material.newer.1.tensors.iter().map(|t| (t.path.as_str(), t)).collect();
    let (base, previous) = (Tensors::of(material.base), Tensors::of(material.previous));
    let twin_of = |tensor: &Tensor| {
        let twin = newer.get(tensor.path.as_str()).filter(|t| t.dtype == tensor.dtype && t.shape == tensor.shape);
        twin.map(|twin| without_edges(twin))
    };
    let twins: Vec<Option<Tensor>> = all.iter().map(twin_of).collect();
    let mut copies = casts::copies(material.source, written)?;
    // A tensor that must be exact may only be a copy of an exact one.
    copies.retain(|copy, of| material.rates(all[*copy].role).is_some() || material.rates(all[*of].role).is_none());
    // A published system takes copy and original as they are.
    let published = |index: usize| material.profiles.of(all[index].role).system().is_some();
    copies.retain(|copy, of| !published(*copy) && !published(*of));
    for (copy, of) in &copies {
        all[*copy].extent = casts::matching(&written[*copy], &written[*of], &all[*of]);
    }
    // The state before was proven by this very state.
    let was_lossy = |tensor: &Tensor| previous.get(tensor).is_some_and(|before| before.entry.coding.is_lossy());
    let mut proven = match material.ahead {
        true => all.iter().map(was_lossy).collect(),
        false => proof::proven(material, &all, &twins)?,
    };
    proof::except_ends(material, &all, &mut proven)?;
    let looks = limited(material, &all, &mut proven)?;
    // A copy is as lossy as its original, so the original must be proven.
    copies.retain(|_, of| proven[*of]);
    // A tensor can be beside another one only if both get tiles.
    let lossy = |(tensor, proven): (&Tensor, &bool)| lossy_kind(material, tensor).filter(|_| *proven);
    let mut kinds: Vec<Option<(Kind, Rates)>> = all.iter().zip(&proven).map(lossy).collect();
    let weight = |index: usize| {
        matches!(kinds[index], Some((Kind::Weight, _))).then_some(())?;
        Some((&all[index], twins[index].as_ref()?, previous.get(&all[index])?))
    };
    let pace = pace::Pace::of(material, (0..all.len()).filter_map(weight))?;
    kinds.iter_mut().flatten().for_each(|(_, rates)| *rates = pace.rates(*rates));
    let seconds = steep::second_moments(&all);
    let known = |index: usize| {
        let is_weight = matches!(kinds[index], Some((Kind::Weight, _)));
        let second = seconds[index].filter(|_| is_weight).map(|second| &all[second]);
        Some((&all[index], twins[index].as_ref()?, second?))
    };
    let mut cautions = steep::cautions(material, &(0..all.len()).map(known).collect::<Vec<_>>())?;
    // A second moment has the caution of its weight, or of the master that the optimizer steps.
    for (weight, second) in seconds.iter().enumerate() {
        if let Some(second) = *second {
            cautions[second] = cautions[second].min(cautions[weight]);
        }
    }
    let system = |(tensor, proven): (&Tensor, &bool)| system(material, tensor).filter(|_| *proven);
    let systems: Vec<Option<SystemId>> = all.iter().zip(&proven).map(system).collect();
    let is_planned = |index: &usize| {
        let is_small = kinds[*index].is_some() || systems[*index].is_some() || copies.contains_key(index);
        let least = if is_small { MIN_LOSSY_BYTES } else { MIN_LOSSLESS_BYTES };
        all[*index].extent.end - all[*index].extent.start >= least
    };
    let planned: Vec<usize> = (0..all.len()).filter(is_planned).collect();
    let place = |index: usize| planned.binary_search(&index).ok();
    let choose = |&index: &usize| -> io::Result<(Plan, (f64, f64))> {
        let tensor = &all[index];
        let parent = base.get(tensor);
        let (mut lossy, mut row_step, mut outward) = (None, 0.0, 0.0);
        let original = copies.get(&index).and_then(|original| place(*original));
        if let Some(of) = original {
            let coding = Codec::Cast { of: of as u32 }.alone();
            lossy = Some(Choice { coding, alone: coding, bits: (0.0, 0.0) });
        } else if let Some(system) = systems[index] {
            let alone = if system.system().stands_alone() { Codec::External.alone() } else { Coding::LOSSLESS };
            let coding = parent.map_or(alone, |parent| Codec::External.on(parent.number));
            lossy = Some(Choice { coding, alone, bits: (0.0, 0.0) }).filter(|_| coding != Coding::LOSSLESS);
        } else if let Some((kind, rates)) = kinds[index] {
            let partner = tensor.partner.and_then(|partner| Some((all.get(partner)?, place(partner)? as u32)));
            let twin = twins[index].as_ref();
            let subject = Subject {
                material,
                tensor,
                twin,
                parent,
                previous: previous.get(tensor),
                rates,
                caution: cautions[index],
                partner,
            };
            lossy = match kind {
                Kind::Weight => lattice::weight(&subject)?,
                Kind::FirstMoment => moments::first(&subject)?,
                Kind::SecondMoment if is_of_adam(tensor) => {
                    let unit = memory::unit(&subject)?;
                    moments::second_up_to(&subject, unit, rates.second_moment)?
                }
                Kind::SecondMoment => moments::second(&subject, rates.square_sum)?,
                Kind::SquareSum => moments::second(&subject, rates.square_sum)?,
                Kind::Norm => moments::second(&subject, rates.square_sum / 2)?,
                Kind::Momentum => moments::momentum(&subject)?,
                Kind::Direction => moments::direction(&subject)?,
                Kind::Sign => moments::signs(&subject)?,
            };
            (row_step, outward) = (rates.row, rates.outward);
        }
        let Choice { coding, alone, bits } = match lossy {
            Some(choice) => choice,
            None => lossless_choice(material.source, tensor, parent.map(|parent| (parent.chain, parent.number)))?,
        };
        let parent = parent.map(|parent| parent.number).filter(|_| coding.is_lossy() || coding.parent.is_some());
        let system = systems[index].filter(|_| coding.is_external());
        // Logarithms keep the sign anyway, so their tensors need no look.
        let limits = match looks[index] {
            _ if !coding.is_lossy() || coding.is_log() => None,
            Some(limits) => Some(limits),
            None => Some(limits::limits(material.source, tensor)?),
        };
        let update = match &twins[index] {
            Some(twin) if coding.is_lossy() && tensor.role == Role::Weight => lattice::update(material, tensor, twin)?,
            _ => 0.0,
        };
        let tensor = tensor.clone();
        Ok((Plan { index, tensor, coding, alone, parent, row_step, outward, system, limits, update }, bits))
    };
    // Each decodes some tiles of the base.
    let chosen: io::Result<Vec<(Plan, (f64, f64))>> = planned.par_iter().map(choose).collect();
    let mut plans = Vec::with_capacity(planned.len());
    let mut forecast = Forecast { super_step: 0.0, keyframe: 0.0 };
    for (plan, bits) in chosen? {
        let len = (plan.tensor.extent.end - plan.tensor.extent.start) as f64;
        let share = len / len.min(TILE_BYTES as f64);
        forecast.super_step += bits.0 / 8.0 * share;
        forecast.keyframe += bits.1 / 8.0 * share;
        plans.push(plan);
    }
    moments::keep_together(&all, &mut plans);
    let forecast = Some(forecast).filter(|_| material.super_step && material.base.is_some());
    if forecast.is_some_and(|forecast| forecast.wants_keyframe()) {
        plans.iter_mut().for_each(Plan::begin_anew);
    }
    Ok(Planned { plans, forecast })
}

/// The limits of the parameters. Those that show a constraint lose their proof.
fn limited(material: &Material, tensors: &[Tensor], proven: &mut [bool]) -> io::Result<Vec<Option<Limits>>> {
    let written = &material.description.tensors;
    let is_parameter = |tensor: &Tensor| matches!(tensor.role, Role::Weight | Role::Ema | Role::Master);
    let look = |(index, proven): (usize, &mut bool)| -> io::Result<Option<Limits>> {
        if !*proven || !is_parameter(&tensors[index]) || lossy_kind(material, &tensors[index]).is_none() {
            return Ok(None);
        }
        let found = limits::look(material.source, &written[index])?;
        if let Some(constraint) = found.constraint {
            log::debug!("{}: {constraint}, so it stays exact", written[index].path);
            *proven = false;
        }
        Ok(Some(found.limits))
    };
    proven.par_iter_mut().enumerate().map(look).collect()
}

/// The codec for a tensor, and its numbers. `None` for lossless.
fn lossy_kind(material: &Material, tensor: &Tensor) -> Option<(Kind, Rates)> {
    let kind = rates::kind(tensor.role, tensor.used, tensor.partner.is_some(), tensor.lossless)?;
    let rates = material.rates(tensor.role)?;
    (tensor.dtype.is_lattice_float() && !tensor.shape.is_empty()).then_some((kind, rates))
}

/// Whether a second moment has its first in units of it. Then the update keeps its size whatever the second's error.
/// Other optimizers divide a value by it that is not stored.
fn is_of_adam(tensor: &Tensor) -> bool {
    tensor.used == Use::ByRole && tensor.partner.is_some()
}

/// The published system for a tensor. The systems quantize models. No paper covers the optimizer's state and
/// averages, so these are lossless.
fn system(material: &Material, tensor: &Tensor) -> Option<SystemId> {
    let system = material.profiles.of(tensor.role).system()?;
    let is_parameter = matches!(tensor.role, Role::Weight | Role::Master) && tensor.used == Use::ByRole;
    let is_model = is_parameter && !tensor.lossless && !tensor.shape.is_empty();
    (is_model && published::tile::is_for(tensor.dtype)).then_some(system)
}

/// Alone or as a difference to the base: the smaller of both by estimate.
fn lossless_choice(source: &dyn ReadAt, tensor: &Tensor, parent: Option<(&Chain, u32)>) -> io::Result<Choice> {
    let alone = Choice { coding: Coding::LOSSLESS, alone: Coding::LOSSLESS, bits: (0.0, 0.0) };
    let Some((chain, parent)) = parent else {
        return Ok(alone);
    };
    let middle = tiles(tensor) / 2;
    let data = read_tile(source, tensor, middle)?;
    let base = walk::decode(chain, parent as usize, middle)?;
    let delta = lossless::estimate(tensor.dtype, &data, Some(&base));
    let bits = lossless::estimate(tensor.dtype, &data, None);
    Ok(match delta < bits {
        true => Choice { coding: Codec::Lossless.on(parent), bits: (delta, bits), ..alone },
        false => Choice { bits: (bits, bits), ..alone },
    })
}

/// A tensor without its first and last pages, which stay in the skeleton, if it is so large that this costs nothing.
pub(crate) fn without_edges(tensor: &Tensor) -> Tensor {
    let mut tensor = tensor.clone();
    if tensor.extent.end - tensor.extent.start >= MIN_EDGES_BYTES {
        // A container may have left a part of the last page out.
        let rest = TAIL_BYTES.saturating_sub(tensor.tail());
        tensor.extent = tensor.extent.start + HEAD_BYTES..tensor.extent.end - rest;
    }
    tensor
}

pub(super) fn tiles(tensor: &Tensor) -> usize {
    (tensor.extent.end - tensor.extent.start).div_ceil(TILE_BYTES as u64) as usize
}

/// Number of the first element of a tile in its tensor.
fn first_element(tensor: &Tensor, tile: usize) -> u64 {
    object::first_element(&tensor.shape, tensor.dtype, tensor.extent.end - tensor.extent.start, tile)
}

/// Where a tile's elements lie in the rows of its tensor.
pub(super) fn rows(tensor: &Tensor, tile: usize) -> Rows {
    Rows { width: rows_and_width(&tensor.shape).1, first: first_element(tensor, tile) }
}

/// A tile of a tensor, and how it is to be encoded.
pub(super) fn spec(tensor: &Tensor, coding: Coding, tile: usize) -> TileSpec {
    let start = tile as u64 * TILE_BYTES as u64;
    let len = (tensor.extent.end - tensor.extent.start - start).min(TILE_BYTES as u64) as usize;
    TileSpec { dtype: tensor.dtype, coding, len, rows: rows(tensor, tile) }
}

/// Reads a tile of a tensor as written.
pub(crate) fn read_tile(source: &dyn ReadAt, tensor: &Tensor, tile: usize) -> io::Result<Vec<u8>> {
    let start = tensor.extent.start + tile as u64 * TILE_BYTES as u64;
    let mut data = scratch::bytes((tensor.extent.end - start).min(TILE_BYTES as u64) as usize);
    source.read_exact_at(&mut data, start)?;
    Ok(data)
}
