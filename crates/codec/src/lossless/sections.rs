//! Differences of floats, sorted by the exponent of the parent's element. The learning rate sets the size of an update,
//! whatever the weight is. In units of the last place, the size of an update thus depends mostly on how large those
//! units are.
//!
//! Payload, after the kind: one byte, the exponent `top`. Then each of the [`SECTIONS`] follows with its length and an
//! [`crate::entropy::ints`] payload. A section has the differences whose parent has the exponent top - section, in the
//! order of the elements. The first section also has larger exponents, the last also smaller ones. Differences count
//! away from zero: an element and its parent change their sign together, so that growing and shrinking keep their own
//! frequencies.

use super::super::Dtype;
use super::super::ordered::{Order, Word};
use super::Corrupt;
use crate::entropy::scratch::{self, Scratch};
use crate::entropy::simd::{Level, multiversion};
use crate::entropy::{ints, symbols, varint};

/// Exponents with a section each: a tensor's weights spread over less than 2^16.
const SECTIONS: usize = 16;

/// The first section begins where this many elements of a tile are above it: a section of a few elements does not pay
/// for its code.
const ABOVE: usize = 256;

/// Parts of a tile that are sorted side by side: each element waits for the cursor that the one before it moved.
const LANES: usize = 4;

/// The position of the exponent in a parent's element. Only for types whose differences fit 32 bits.
#[derive(Clone, Copy)]
struct Exponent {
    shift: u32,
    mask: u32,
    sign: u32,
}

fn exponent(dtype: Dtype) -> Option<Exponent> {
    match dtype {
        Dtype::F32 => Some(Exponent { shift: 23, mask: 0xff, sign: 31 }),
        Dtype::Bf16 => Some(Exponent { shift: 7, mask: 0xff, sign: 15 }),
        Dtype::F16 => Some(Exponent { shift: 10, mask: 0x1f, sign: 15 }),
        _ => None,
    }
}

impl Exponent {
    #[inline(always)]
    fn of(self, parent: u32) -> u8 {
        (parent >> self.shift & self.mask) as u8
    }

    /// Turns the direction to away from zero, or back.
    #[inline(always)]
    fn away(self, difference: i32, parent: u32) -> i32 {
        let negative = -((parent >> self.sign & 1) as i32);
        (difference ^ negative).wrapping_sub(negative)
    }
}

/// The words of the differences: elements of 16 or 32 bits.
trait Narrow: Word + Into<u32> {
    fn narrow(bits: u32) -> Self;

    /// The element minus its parent, with sign.
    #[inline(always)]
    fn signed(self, parent: Self) -> i32 {
        let zigzag: u32 = self.difference(parent, Order::Float).into();
        (zigzag >> 1) as i32 ^ -((zigzag & 1) as i32)
    }

    /// Undoes [`Narrow::signed`].
    #[inline(always)]
    fn plus(difference: i32, parent: Self) -> Self {
        let zigzag = (difference << 1) ^ (difference >> 31);
        Self::narrow(zigzag as u32).undo(parent, Order::Float)
    }
}

impl Narrow for u32 {
    fn narrow(bits: u32) -> u32 {
        bits
    }
}

impl Narrow for u16 {
    fn narrow(bits: u32) -> u16 {
        bits as u16
    }
}

/// Differences by section, with the exponent of the first section.
struct Sorted {
    top: u8,
    values: Vec<i32>,
    counts: [usize; SECTIONS],
}

/// `None` if sections do not suit this type or this data.
fn sort(dtype: Dtype, data: &[u8], parent: &[u8]) -> Option<Sorted> {
    let exponent = exponent(dtype)?;
    if data.len() != parent.len() || !data.len().is_multiple_of(dtype.size()) {
        return None;
    }
    Some(match dtype.size() {
        2 => sorted::<u16>(exponent, u16::elements(data), u16::elements(parent)),
        _ => sorted::<u32>(exponent, u32::elements(data), u32::elements(parent)),
    })
}

fn sorted<T: Narrow>(exponent: Exponent, data: &[T::Bytes], parent: &[T::Bytes]) -> Sorted {
    let level = Level::detect();
    let mut sections = Scratch::new(data.len());
    exponents::<T>(level, exponent, parent, &mut sections);
    let counts = counts(&sections);
    let (mut above, mut top) = (0, u8::MAX);
    for e in (0..=u8::MAX).rev() {
        above += counts.iter().map(|lane| lane[usize::from(e)] as usize).sum::<usize>();
        top = e;
        if above * ABOVE >= data.len() {
            break;
        }
    }
    let (counts, mut cursors) = cursors(&counts, top);
    below(level, top, &mut sections);
    let mut differences = scratch::integers(data.len());
    subtract::<T>(level, exponent, data, parent, &mut differences);
    let mut values = scratch::integers(data.len());
    in_lanes(&sections, &mut cursors, |at, cursor| values[cursor] = differences[at]);
    scratch::give_integers(differences);
    Sorted { top, values, counts }
}

multiversion! {
    /// Writes the exponents of a parent's elements.
    fn exponents<T: Narrow>(exponent: Exponent, parent: &[T::Bytes], out: &mut [u8]) {
        out.iter_mut().zip(parent).for_each(|(out, &p)| *out = exponent.of(T::from_bytes(p).into()));
    }
}

multiversion! {
    /// Turns exponents into the numbers of their sections.
    fn below(top: u8, exponents: &mut [u8]) {
        exponents.iter_mut().for_each(|e| *e = top.saturating_sub(*e).min(SECTIONS as u8 - 1));
    }
}

multiversion! {
    /// Writes the differences, away from zero.
    fn subtract<T: Narrow>(exponent: Exponent, data: &[T::Bytes], parent: &[T::Bytes], out: &mut [i32]) {
        for ((out, &x), &p) in out.iter_mut().zip(data).zip(parent) {
            let p = T::from_bytes(p);
            *out = exponent.away(T::from_bytes(x).signed(p), p.into());
        }
    }
}

multiversion! {
    /// Undoes [`subtract`].
    fn add<T: Narrow>(exponent: Exponent, differences: &[i32], parent: &[T::Bytes], out: &mut [T::Bytes]) {
        for ((out, &difference), &p) in out.iter_mut().zip(differences).zip(parent) {
            let p = T::from_bytes(p);
            *out = T::plus(exponent.away(difference, p.into()), p).to_bytes();
        }
    }
}

/// The number of each exponent in each lane. The last lane also has the elements that are left over.
fn counts(exponents: &[u8]) -> [[u32; 256]; LANES] {
    let lane = exponents.len() / LANES;
    std::array::from_fn(|number| {
        let end = if number + 1 == LANES { exponents.len() } else { lane * (number + 1) };
        symbols::histogram(&exponents[lane * number..end])
    })
}

/// The length of each section, and where each lane's elements of it begin.
fn cursors(exponents: &[[u32; 256]; LANES], top: u8) -> ([usize; SECTIONS], [[usize; SECTIONS]; LANES]) {
    let mut cursors = exponents.map(|lane| {
        let mut counts = [0; SECTIONS];
        for (e, count) in (0..=u8::MAX).zip(lane) {
            counts[usize::from(top.saturating_sub(e)).min(SECTIONS - 1)] += count as usize;
        }
        counts
    });
    let mut counts = [0; SECTIONS];
    let mut at = 0;
    for section in 0..SECTIONS {
        for lane in &mut cursors {
            let count = std::mem::replace(&mut lane[section], at);
            counts[section] += count;
            at += count;
        }
    }
    (counts, cursors)
}

/// Calls `each` with an element's place in the tile and its place in the sections.
#[inline(always)]
fn in_lanes(sections: &[u8], cursors: &mut [[usize; SECTIONS]; LANES], mut each: impl FnMut(usize, usize)) {
    let lane = sections.len() / LANES;
    let mut next = |lane: usize, at: usize| {
        let cursor = &mut cursors[lane][usize::from(sections[at]) % SECTIONS];
        each(at, *cursor);
        *cursor += 1;
    };
    for at in 0..lane {
        (0..LANES).for_each(|number| next(number, number * lane + at));
    }
    (LANES * lane..sections.len()).for_each(|at| next(LANES - 1, at));
}

impl Sorted {
    fn sections(&self) -> impl Iterator<Item = &[i32]> {
        let mut rest = self.values.as_slice();
        self.counts.iter().map(move |&count| {
            let (section, others) = rest.split_at(count);
            rest = others;
            section
        })
    }
}

/// Estimated bits of `share` times as many differences like these. Infinite if sections do not suit them.
pub(super) fn bits(dtype: Dtype, data: &[u8], parent: &[u8], share: f64) -> f64 {
    /// Size of a section's code: a few bits for each class between its first and its last.
    const CODE_BITS: f64 = 300.0;
    let Some(sorted) = sort(dtype, data, parent) else { return f64::INFINITY };
    let section = |values: &[i32]| match values {
        [] => 8.0,
        values => share * ints::estimate_bits(values) + CODE_BITS,
    };
    let bits = sorted.sections().map(section).sum();
    scratch::give_integers(sorted.values);
    bits
}

/// Appends the payload. `false` if sections do not suit the data; nothing was appended then.
pub(super) fn encode(dtype: Dtype, data: &[u8], parent: &[u8], out: &mut Vec<u8>) -> bool {
    let Some(sorted) = sort(dtype, data, parent) else { return false };
    out.push(sorted.top);
    for section in sorted.sections() {
        varint::put_bytes(out, |out| {
            if !section.is_empty() {
                ints::encode(section, out);
            }
        });
    }
    scratch::give_integers(sorted.values);
    true
}

/// Fills `out`; `parent` has the same length.
///
/// # Errors
/// [`encode`] never writes such a payload.
pub(super) fn decode(dtype: Dtype, payload: &[u8], parent: &[u8], out: &mut [u8]) -> Result<(), Corrupt> {
    let exponent = exponent(dtype).ok_or(Corrupt("sections of a type that has none"))?;
    if parent.len() != out.len() || !out.len().is_multiple_of(dtype.size()) {
        return Err(Corrupt("difference to a missing parent"));
    }
    match dtype.size() {
        2 => join::<u16>(exponent, payload, u16::elements(parent), u16::elements_mut(out)),
        _ => join::<u32>(exponent, payload, u32::elements(parent), u32::elements_mut(out)),
    }
}

fn join<T: Narrow>(
    exponent: Exponent,
    payload: &[u8],
    parent: &[T::Bytes],
    out: &mut [T::Bytes],
) -> Result<(), Corrupt> {
    let (&top, mut payload) = payload.split_first().ok_or(Corrupt("no sections"))?;
    let level = Level::detect();
    let mut sections = Scratch::new(out.len());
    exponents::<T>(level, exponent, parent, &mut sections);
    let (counts, mut cursors) = cursors(&counts(&sections), top);
    below(level, top, &mut sections);
    let mut values = scratch::integers(out.len());
    let mut rest = values.as_mut_slice();
    for count in counts {
        let section = varint::take_bytes(&mut payload)?;
        let (values, others) = rest.split_at_mut(count);
        rest = others;
        match values {
            [] if section.is_empty() => {}
            [] => return Err(Corrupt("unexpected data")),
            values => ints::decode(section, values)?,
        }
    }
    Corrupt::when(!payload.is_empty(), "bytes after the sections")?;
    let mut differences = scratch::integers(out.len());
    in_lanes(&sections, &mut cursors, |at, cursor| differences[at] = values[cursor]);
    add::<T>(level, exponent, &differences, parent, out);
    [values, differences].into_iter().for_each(scratch::give_integers);
    Ok(())
}
