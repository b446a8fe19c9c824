//! The step of the lattice for a weight: from the update since the state before and to the state after.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use crate::recall::walk;
use crate::store::object::rows_and_width;
use crate::tile::{Around, Codec, Coding, State};
use codec::{lattice, rows};
use formats::{ReadAt, Tensor};

use super::phase;
use super::rates::VECTOR;
use super::subject::{Archived, Choice, Material, Subject, read_tile, tiles};

/// Elements taken from each of `SAMPLES` places to measure a tensor's update. The root mean square of 65,536 is good
/// to 1% even where a few rows move a hundred times more than the others.
pub(super) const SAMPLE_ELEMENTS: usize = 4096;
const SAMPLES: usize = 16;
/// Tiles decoded of the base to measure a tensor's update, spread over the tensor.
const SAMPLE_TILES: usize = 3;
/// The update since the state before counts at most this many times the update to the state after. A state that lies
/// far back must not make this one coarser than training needs.
const MOST_OF_NEXT: f64 = 3.0;
/// The update to the state after counts at most this many times the one before, or the step of the state before if
/// that is unknown. A run that diverges must not make the last sound state coarser.
const MOST_OF_LAST: f64 = 1.5;
/// A larger change than this share of the weights means a different model, not an update. Two models with nothing in
/// common differ by 1.4 of it, a model and zeros by 1.
const MOST_OF_WEIGHTS: f64 = 0.7;
/// An update's root mean square counts at most this many times the third quartile of its magnitudes. It is .86 to
/// 1.03 of it under Adam, and up to 1.41 under SGD. Beyond, a few elements have most of the energy, and the step
/// would drown the others.
const MOST_OF_QUARTILE: f64 = 2.0;
/// If it is this many times that quartile, no step suits both: the tensor stays lossless.
const HEAVY_TAIL: f64 = 8.0;
/// A chain keeps its step while the ideal one is within this factor of it. A change costs a twelfth of a bit. A step
/// that is off by this factor loses a hundredth of its benefit.
const KEEP_WITHIN: f64 = 1.4;
/// A tensor that is coded ahead keeps its step while the expected one is at most so much finer: the next update may be
/// smaller still.
const FINER_AHEAD: f64 = 1.15;
/// A tensor of which at most this share of rows moves from one state to the next is coded by rows.
const MOST_CHANGED: f64 = 0.7;
/// Tables with fewer rows are not coded by rows: a row's own step takes some bits.
const LEAST_ROWS: u64 = 256;
/// A row's step is the tensor's, times a power of two. So the tensor's step may stay while rows' updates change. It
/// is chosen anew once they have become finer by this factor.
const FINER: f64 = 4.0;

/// A base is several states back if rows' next updates are below this share of their distance to it.
const MUCH_FARTHER: f64 = 0.5;

/// The coding of a weight. `None` for lossless: nothing moves, or its update is unknown.
pub(super) fn weight(subject: &Subject) -> io::Result<Option<Choice>> {
    let Some(twin) = subject.twin else { return Ok(None) };
    let table = Table::of(subject, twin)?;
    let coding = match table.as_ref().map(|table| table.coding(subject)).transpose()?.flatten() {
        Some(coding) => Some(coding),
        None => phase::off_lattice(subject, on_lattice(subject, twin)?)?,
    };
    let Some(coding) = coding else { return Ok(None) };
    // The keyframe of a table uses the plain lattice, since its rows have no update yet.
    let step = match &table {
        Some(table) if coding.is_by_rows() => table.keyframe(subject),
        _ => coding.step(),
    };
    let alone = step.map_or(Coding::LOSSLESS, |step| Codec::Lattice { step }.alone());
    let row_step = match table {
        Some(table) if coding.is_by_rows() => table.row_step(subject)?,
        _ => 0.0,
    };
    let bits = if subject.material.base.super_step { bits(subject, coding, alone, row_step)? } else { None };
    Ok(Some(Choice { coding, alone, bits: bits.unwrap_or((0.0, 0.0)), row_step }))
}

fn on_lattice(subject: &Subject, twin: &Tensor) -> io::Result<Option<Coding>> {
    let (next, weights) = next_update(subject.material, subject.tensor, twin)?;
    let most = MOST_OF_WEIGHTS * weights;
    if next.is_some_and(|next| next.tail > HEAVY_TAIL) {
        return Ok(None);
    }
    let next = next.map(|next| next.rms);
    let step = |rms: f64| step(subject, rms);
    let anew = || next.and_then(step).map(|step| Codec::Lattice { step }.alone());
    let Some(base) = subject.parent else {
        return Ok(anew());
    };
    let (parent, previous) = (base.number, subject.previous.unwrap_or(base));
    let last = last_update(subject, previous)?;
    if last.rms.is_some_and(|last| last > most) {
        return Ok(anew());
    }
    if let (true, Some(before)) = (last.is_same, previous.entry.coding.step())
        && next.and_then(step).is_none_or(|wanted| before <= KEEP_WITHIN * MOST_OF_NEXT * wanted)
    {
        // Saved a second time (`last.ckpt`): with the same step the difference costs nothing. A finer profile needs
        // another step.
        return Ok(Some(Codec::Lattice { step: before }.on(parent)));
    }
    let Some(before) = previous.entry.coding.step() else {
        // The base is exact, so any step will do. If nothing moves, a lossless difference costs nothing.
        let wanted = last.rms.or(next).and_then(step);
        return Ok(wanted.map(|step| Codec::Lattice { step }.on(parent)));
    };
    // Updates rise and fall from state to state. A step that followed them would cost more where it is too fine
    // than it saves where it is too coarse. So half of the evidence comes from the update before, where it is known.
    let wanted = match (last.rms, next) {
        (Some(last), Some(next)) => {
            let mean = mean_square(&[last.min(MOST_OF_NEXT * next), next.min(MOST_OF_LAST * last)]).sqrt();
            step(mean)
        }
        (Some(rms), None) => step(rms),
        // Above 3.5 updates a step drowns the update before in its error. A mean with that step would keep it while updates
        // fall: at the end of a cosine schedule, every 5 iterations, errors were 5.2 updates then, and 2.8 are wanted.
        (None, Some(rms)) => step(rms).map(|wanted| wanted.min(MOST_OF_LAST * before)),
        (None, None) => None,
    };
    // Made ahead, it becomes finer early and coarser slowly, so that the state after seldom asks for less.
    let ahead = subject.material.ahead;
    let finest = 1.0 / if ahead { FINER_AHEAD } else { KEEP_WITHIN };
    let keep = |wanted: &f64| (finest..KEEP_WITHIN).contains(&(wanted / before)) || next.is_none();
    let step = wanted.filter(|wanted| !keep(wanted)).unwrap_or(before);
    let most = if ahead { lattice::short_step(subject.tensor.dtype, KEEP_WITHIN * before) } else { None };
    let step = most.map_or(step, |most| step.min(most));
    Ok(Some(Codec::Lattice { step }.on(parent)))
}

fn step(subject: &Subject, rms: f64) -> Option<f64> {
    let tensor = subject.tensor;
    // Flat copies of matrices are vectors by their shape only.
    let is_vector = tensor.shape.len() < 2 && !tensor.is_flat();
    let share = if is_vector { VECTOR } else { 1.0 };
    lattice::choose_g(tensor.dtype, &[rms], subject.rates.weight * share * subject.caution)
}

/// Rows in the middle of a table of which most rest, but for a factor that all share.
struct Table {
    /// The tile that has them, and the place of the first one in it, bytes.
    tile: usize,
    from: usize,
    width: usize,
    values: Vec<f64>,
    /// Root mean squares of their updates to the state after this one, besides the shared factor.
    moves: Vec<f64>,
    factor: f64,
}

impl Table {
    /// `None` if it is no table, or most of its rows move.
    fn of(subject: &Subject, twin: &Tensor) -> io::Result<Option<Table>> {
        let tensor = subject.tensor;
        let (rows, width) = rows_and_width(&tensor.shape);
        if tensor.shape.len() != 2 || rows < LEAST_ROWS || width == 0 {
            return Ok(None);
        }
        let tile = tiles(tensor) / 2;
        let now = read_tile(subject.material.source, tensor, tile)?;
        let then = read_tile(subject.material.newer.0, twin, tile)?;
        // Whole rows, from the first that begins in the tile.
        let cut = (width - super::rows(tensor, tile).first % width) % width;
        let from = (cut as usize).saturating_mul(tensor.dtype.size()).min(now.len());
        let values = lattice::values(tensor.dtype, &now[from..]);
        let then = lattice::values(tensor.dtype, &then[from.min(then.len())..]);
        let (moves, factor) = rows::moves(&values, &then, width as usize);
        let moving = moves.iter().filter(|rms| **rms != 0.0).count();
        let rests = moving as f64 <= MOST_CHANGED * moves.len() as f64;
        Ok(rests.then_some(Table { tile, from, width: width as usize, values, moves, factor }))
    }

    fn coding(&self, subject: &Subject) -> io::Result<Option<Coding>> {
        let anew = || -> io::Result<Option<Coding>> {
            let most = MOST_OF_WEIGHTS * root_mean_square(subject)?;
            Ok(self.keyframe(subject).filter(|step| *step <= most).map(|step| Codec::Lattice { step }.alone()))
        };
        let Some(base) = subject.parent else { return anew() };
        let wanted = rows::base_step(&self.moves);
        let previous = subject.previous.map(|previous| previous.entry.coding);
        let before = previous.filter(|coding| coding.is_by_rows()).and_then(Coding::step);
        let wanted = match (before, wanted) {
            (Some(before), Some(wanted)) if wanted * FINER < before => wanted,
            (Some(before), _) => before,
            (None, Some(wanted)) => wanted,
            (None, None) => return Ok(None),
        };
        let step = match &*walk::state(base.chain, base.number as usize, self.tile)? {
            State::Lattice { keyframe: None, step, .. } => step * self.since(subject.tensor, base)?,
            // No step shrinks K.
            _ if self.factor != 1.0 => return anew(),
            State::Lattice { step, .. } => *step,
            _ => wanted,
        };
        // Rows that rest keep their integers if the steps differ by a power of two besides the factor.
        let step = lattice::nearest_step(step * rows::nearest_power(wanted / step));
        Ok(step.map(|step| Codec::Rows { step }.on(base.number)))
    }

    /// The factor that rows share since the base. Those that rest now did so before, most of them.
    fn since(&self, tensor: &Tensor, base: Archived) -> io::Result<f64> {
        // A step of a 16-bit type is a power of two.
        if tensor.dtype.size() == 2 {
            return Ok(1.0);
        }
        let former = self.former(tensor, base)?;
        Ok(rows::factor(&former, &self.values, self.width, |row| self.moves[row] == 0.0))
    }

    /// The rows of the base.
    fn former(&self, tensor: &Tensor, base: Archived) -> io::Result<Vec<f64>> {
        let decoded = walk::decode(base.chain, base.number as usize, self.tile)?;
        Ok(lattice::values(tensor.dtype, &decoded[self.from.min(decoded.len())..]))
    }

    /// The step of a row, in units of its distance to the base. The step shall follow the row's next update, and the
    /// base may lie several states back. The median over rows that move tells how much farther away it is.
    fn row_step(&self, subject: &Subject) -> io::Result<f64> {
        let Some(base) = subject.parent else { return Ok(subject.rates.row) };
        let former = self.former(subject.tensor, base)?;
        let rows = self.values.chunks(self.width).zip(former.chunks(self.width)).zip(&self.moves);
        let share = |((now, then), moves): ((&[f64], &[f64]), &f64)| {
            let squares = now.iter().zip(then).map(|(a, b)| (a - self.factor * b).powi(2)).sum::<f64>();
            moves / (squares / self.width as f64).sqrt()
        };
        let mut shares: Vec<f64> =
            rows.filter(|(_, moves)| **moves > 0.0).map(share).filter(|s| s.is_finite()).collect();
        shares.sort_by(f64::total_cmp);
        let share = shares.get(shares.len() / 2).copied().unwrap_or(1.0);
        // From one state to the next, updates differ by less than this, and finer rows would soon be coded anew.
        Ok(subject.rates.row * if share < MUCH_FARTHER { share } else { 1.0 })
    }

    /// The step of a table's keyframe: that of the median among the moving rows. It is a power of two, so that later
    /// states differ by nothing else in rows that rest.
    fn keyframe(&self, subject: &Subject) -> Option<f64> {
        let mut moving: Vec<f64> = self.moves.iter().copied().filter(|rms| *rms > 0.0 && rms.is_finite()).collect();
        moving.sort_by(f64::total_cmp);
        let middle = moving.get(moving.len() / 2)?;
        // Choosing for a type of 16 bits gives a power of two.
        lattice::choose_g(codec::Dtype::Bf16, &[*middle], subject.rates.row)
    }
}

/// Bits of the middle tile, as a difference to the base and without it.
fn bits(subject: &Subject, coding: Coding, alone: Coding, row_step: f64) -> io::Result<Option<(f64, f64)>> {
    let (Some(parent), Some(chain)) = (coding.parent, &subject.material.base.chain) else {
        return Ok(None);
    };
    let middle = tiles(subject.tensor) / 2;
    let data = Arc::new(read_tile(subject.material.source, subject.tensor, middle)?);
    let base = walk::state(chain, parent as usize, middle)?;
    let around = |parent| Around { parent, row_step, ..Around::default() };
    let delta = subject.bits(middle, &data, coding, around(Some(&*base)))?;
    Ok(delta.zip(subject.bits(middle, &data, alone, around(None))?))
}

/// The update from the state before, as it was written, to this one.
struct LastUpdate {
    /// Its root mean square. The state before is known with an error that is uniform over its step, so a twelfth
    /// of the step's square is subtracted. Otherwise steps would grow from state to state by their own error.
    /// `None`: the difference may be that error alone.
    rms: Option<f64>,
    /// All elements but one in a hundred thousand are within that state's bound: it is the same state.
    is_same: bool,
}

fn last_update(subject: &Subject, previous: Archived) -> io::Result<LastUpdate> {
    let tensor = subject.tensor;
    let step = previous.entry.coding.step();
    let tiles = tiles(tensor);
    let mut updates = Vec::new();
    for sample in 0..SAMPLE_TILES.min(tiles) {
        let number = (2 * sample + 1) * tiles / (2 * SAMPLE_TILES.min(tiles));
        let now = read_tile(subject.material.source, tensor, number)?;
        let then = walk::decode(previous.chain, previous.number as usize, number)?;
        updates.extend(lattice::updates(tensor.dtype, &now, &then));
    }
    let noise = step.map_or(0.0, |step| step * step / 12.0);
    let (power, _) = power_and_tail(&updates);
    let rms = (power > 2.0 * noise && power.is_finite()).then(|| (power - noise).sqrt());
    let is_same = step.is_some_and(|step| updates.iter().all(|update| update.abs() <= step / 2.0));
    Ok(LastUpdate { rms, is_same })
}

/// The update to the state after this one.
#[derive(Clone, Copy)]
pub(super) struct NextUpdate {
    /// Its root mean square, at most [`MOST_OF_QUARTILE`] times its third quartile.
    pub(super) rms: f64,
    /// The whole root mean square, in units of the quartile.
    tail: f64,
}

/// Returns the update, and the root mean square of the weights. The update is `None` if nothing moves, or if the
/// change is too large ([`MOST_OF_WEIGHTS`]).
fn next_update(material: &Material, tensor: &Tensor, twin: &Tensor) -> io::Result<(Option<NextUpdate>, f64)> {
    let places = sample(tensor);
    let (now, then) = (read(material.source, tensor, &places)?, read(material.newer.0, twin, &places)?);
    let updates = lattice::updates(tensor.dtype, &then, &now);
    let weights = mean_square(&lattice::values(tensor.dtype, &now));
    let sound = mean_square(&updates) <= MOST_OF_WEIGHTS * MOST_OF_WEIGHTS * weights;
    let (power, tail) = power_and_tail(&updates);
    let next = (sound && power > 0.0 && power.is_finite()).then(|| NextUpdate { rms: power.sqrt(), tail });
    Ok((next, weights.sqrt()))
}

/// Root mean square of a tensor's update to the state after this one, of the elements that move. In a table most rows
/// rest, and the others have the errors.
pub(super) fn update(material: &Material, tensor: &Tensor, twin: &Tensor) -> io::Result<f64> {
    let places = sample(tensor);
    let (now, then) = (read(material.source, tensor, &places)?, read(material.newer.0, twin, &places)?);
    let mut updates = lattice::updates(tensor.dtype, &then, &now);
    updates.retain(|update| *update != 0.0);
    Ok(mean_square(&updates).sqrt())
}

/// Mean square of an update, limited by [`MOST_OF_QUARTILE`], and its root in units of the third quartile of the
/// moving elements.
fn power_and_tail(updates: &[f64]) -> (f64, f64) {
    /// Elements for the quartile, which make it good to 2%.
    const ELEMENTS: usize = 4096;
    let power = mean_square(updates);
    let some = updates.iter().step_by(updates.len().div_ceil(ELEMENTS).max(1));
    let mut moved: Vec<f64> = some.map(|update| update.abs()).filter(|update| *update > 0.0).collect();
    if moved.is_empty() || !power.is_finite() {
        return (power, 0.0);
    }
    let place = moved.len() * 3 / 4;
    let quartile = *moved.select_nth_unstable_by(place, f64::total_cmp).1;
    (power.min((MOST_OF_QUARTILE * quartile).powi(2)), power.sqrt() / quartile)
}

/// Root mean square of the weights.
pub(super) fn root_mean_square(subject: &Subject) -> io::Result<f64> {
    let bytes = read(subject.material.source, subject.tensor, &sample(subject.tensor))?;
    Ok(mean_square(&lattice::values(subject.tensor.dtype, &bytes)).sqrt())
}

/// Places of at most [`SAMPLE_ELEMENTS`] elements in a tensor, as ranges of its bytes: all of a small one, else
/// `SAMPLES` places spread over it.
pub(in super::super) fn sample(tensor: &Tensor) -> Vec<Range<u64>> {
    let size = tensor.dtype.size() as u64;
    let elements = tensor.bytes() / size;
    let take = (SAMPLE_ELEMENTS as u64).min(elements);
    let places = if elements <= take * SAMPLES as u64 { elements.div_ceil(take.max(1)) } else { SAMPLES as u64 };
    let first = |place: u64| if places == 1 { 0 } else { place * (elements - take) / (places - 1) };
    (0..places).map(|place| first(place) * size..(first(place) + take) * size).collect()
}

/// A sample whose places are shorter. 4 places tell a change of second moments to 1%, while their units differ by
/// factors of 2; all places tell the level of a prediction to a hundredth of an octave. The elements lie side by side,
/// so that all columns of a narrow matrix count.
pub(in super::super) fn short_sample(tensor: &Tensor) -> impl Iterator<Item = Range<u64>> {
    const ELEMENTS: u64 = 1024;
    let most = ELEMENTS * tensor.dtype.size() as u64;
    sample(tensor).into_iter().map(move |place| place.start..place.end.min(place.start + most))
}

/// The bytes at these places of a tensor, one place after the other.
pub(in super::super) fn read(source: &dyn ReadAt, tensor: &Tensor, places: &[Range<u64>]) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    for place in places {
        let from = bytes.len();
        bytes.resize(from + (place.end - place.start) as usize, 0);
        source.read_exact_at(&mut bytes[from..], tensor.extent.start + place.start)?;
    }
    Ok(bytes)
}

pub(super) fn mean_square(values: &[f64]) -> f64 {
    values.iter().map(|value| value * value).sum::<f64>() / values.len().max(1) as f64
}
