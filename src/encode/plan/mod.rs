//! Chooses how each tensor of a file is encoded, from samples of it, of the state after it and of the base.
//!
//! `proof` and `limits` say what may be lossy; `casts` finds copies. `pace`, `rates` and `steep` give the steps of
//! the profile. `lattice` (with `phase`) and `moments` choose the coding of one `subject`.

mod casts;
mod lattice;
mod limits;
mod moments;
pub(super) mod pace;
mod phase;
mod proof;
mod rates;
mod steep;
mod subject;

use std::collections::HashMap;
use std::io;
use std::path::Path;

use rayon::prelude::*;

use crate::recall::{Chain, walk};
use crate::tile::{Codec, Coding};
use codec::floor::Limits;
use codec::{TILE_BYTES, lossless};
use formats::{Description, ReadAt, Role, Tensor, Use};
use papers::registry::SystemId;

pub(super) use lattice::{read, sample, short_sample};
pub(super) use moments::factors;
pub(crate) use subject::{Material, read_tile, without_edges};
pub(super) use subject::{rows, spec, tiles};

use rates::{Kind, Rates};
use subject::{Choice, Subject, Tensors};

/// Lossless tensors below this many bytes go into the skeleton, where they are compressed together.
const MIN_LOSSLESS_BYTES: u64 = 4096;
/// Smaller tensors are not quantized: an entry in the index and a payload's own fields take some 40 bytes.
const MIN_LOSSY_BYTES: u64 = 128;

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
    pub(super) parent: Option<u32>,
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

    /// The lossless coding of a tensor, chosen only if the tensor does not fit its codec.
    pub(super) fn lossless(&self, source: &dyn ReadAt, base: Option<&Chain>) -> io::Result<Coding> {
        lossless_choice(source, &self.tensor, base.zip(self.parent)).map(|choice| choice.coding)
    }
}

/// A file to encode, with all that was decided about it.
pub(super) struct Job<'a> {
    /// The file, with its tables in order.
    pub(super) source: &'a (dyn ReadAt + Sync),
    pub(super) len: u64,
    pub(super) origin: &'a Path,
    pub(super) profile: &'a str,
    pub(super) description: &'a Description,
    pub(super) base: Option<&'a Chain>,
    pub(super) plans: &'a [Plan],
    /// States since its chain began.
    pub(super) position: u32,
    /// For people, see [`crate::store::object::Index::note`].
    pub(super) note: &'a str,
    /// Asked between batches: the file was opened for writing, or the store is being closed.
    pub(super) cancelled: &'a (dyn Fn() -> bool + Sync),
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

/// Chooses the coding of each tensor.
pub(super) fn plan(material: &Material) -> io::Result<Planned> {
    let written = &material.description.tensors;
    let mut all: Vec<Tensor> = written.iter().map(without_edges).collect();
    let newer: HashMap<&str, &Tensor> = material.newer.1.tensors.iter().map(|t| (t.path.as_str(), t)).collect();
    let (base, previous) = (Tensors::of(material.base.chain.as_ref()), Tensors::of(material.base.previous.as_ref()));
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
        all[*index].bytes() >= least
    };
    let planned: Vec<usize> = (0..all.len()).filter(is_planned).collect();
    let place = |index: usize| planned.binary_search(&index).ok();
    let choose = |&index: &usize| -> io::Result<(Plan, (f64, f64))> {
        let tensor = &all[index];
        let parent = base.get(tensor);
        let (mut lossy, mut outward) = (None, 0.0);
        let original = copies.get(&index).and_then(|original| place(*original));
        if let Some(of) = original {
            let coding = Codec::Cast { of: of as u32 }.alone();
            lossy = Some(Choice::of(coding));
        } else if let Some(system) = systems[index] {
            let alone = if system.system().stands_alone() { Codec::External.alone() } else { Coding::LOSSLESS };
            let coding = parent.map_or(alone, |parent| Codec::External.on(parent.number));
            lossy = Some(Choice { coding, ..Choice::of(alone) }).filter(|_| coding != Coding::LOSSLESS);
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
                // With its first in units of it, the update keeps its size whatever the error. Other optimizers divide a
                // value by it that is not stored.
                Kind::SecondMoment if tensor.used == Use::ByRole && tensor.partner.is_some() => {
                    moments::second_of_adam(&subject)?
                }
                Kind::SecondMoment => moments::second(&subject, rates.square_sum)?,
                Kind::SquareSum => moments::second(&subject, rates.square_sum)?,
                Kind::Norm => moments::second(&subject, rates.square_sum / 2)?,
                Kind::Momentum => moments::momentum(&subject)?,
                Kind::Direction => moments::direction(&subject)?,
                Kind::Sign => moments::signs(&subject)?,
            };
            outward = rates.outward;
        }
        let Choice { coding, alone, bits, row_step } = match lossy {
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
        let len = plan.tensor.bytes() as f64;
        let share = len / len.min(TILE_BYTES as f64);
        forecast.super_step += bits.0 / 8.0 * share;
        forecast.keyframe += bits.1 / 8.0 * share;
        plans.push(plan);
    }
    keep_together(&all, &mut plans);
    let forecast = Some(forecast).filter(|_| material.base.super_step && material.base.chain.is_some());
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

/// The published system for a tensor. The systems quantize models. No paper covers the optimizer's state and
/// averages, so these are lossless.
fn system(material: &Material, tensor: &Tensor) -> Option<SystemId> {
    let system = material.profiles.of(tensor.role).system()?;
    let is_parameter = matches!(tensor.role, Role::Weight | Role::Master) && tensor.used == Use::ByRole;
    let is_model = is_parameter && !tensor.lossless && !tensor.shape.is_empty();
    (is_model && papers::tile::is_for(tensor.dtype)).then_some(system)
}

/// Alone or as a difference to the base: the smaller of both by estimate.
fn lossless_choice(source: &dyn ReadAt, tensor: &Tensor, parent: Option<(&Chain, u32)>) -> io::Result<Choice> {
    let alone = Choice::of(Coding::LOSSLESS);
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

/// The update is made of both moments, so the second of a pair is lossy only if the first is in units of it. Then its
/// error cancels, and the update cannot grow.
fn keep_together(tensors: &[Tensor], plans: &mut [Plan]) {
    // Indexes of the description, as plans have them.
    let firsts: Vec<usize> =
        plans.iter().filter(|plan| matches!(plan.coding.codec, Codec::Moment { .. })).map(|plan| plan.index).collect();
    for plan in plans {
        let tensor = &tensors[plan.index];
        let partner = tensor.partner.filter(|_| tensor.role == Role::SecondMoment);
        if partner.is_some_and(|first| firsts.binary_search(&first).is_err()) {
            (plan.coding, plan.alone, plan.parent) = (Coding::LOSSLESS, Coding::LOSSLESS, None);
        }
    }
}
