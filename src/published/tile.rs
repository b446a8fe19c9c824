//! A published system's tile in an object: bytes of the tensor's own type, and a payload that names its system.
//!
//! Payload: the system's number ([`super::registry`]), then its own payload. Or 0 and the state as it is, for a state
//! that lost its base: a lossless tile with its length before it. Then the bins of the elements, if it has any, as the
//! lossless tile of as many U16. So later states still decode to the same bits, whatever happens to the earlier ones.

use std::sync::Arc;

use super::pool::{VALUES, give_state};
use super::{Fit, Floats, Policy, State, System, Tile, registry};
use crate::codec::float::{Bf16, F16, Float};
use crate::codec::{Corrupt, Dtype, lossless};
use crate::entropy::varint;

/// First byte of a state that is stored as it is.
const AS_IT_IS: u8 = 0;

/// The decoded form of a tile, in its tensor's type.
#[derive(Clone, Debug, PartialEq)]
pub struct Decoded {
    /// The elements.
    pub bytes: Vec<u8>,
    /// The bin of each, for systems whose next difference is between bins.
    pub bins: Option<Vec<u16>>,
}

/// The base tile of a tile's difference.
#[derive(Clone, Copy, Debug)]
pub struct Before<'a> {
    /// Its elements.
    pub bytes: &'a Arc<Vec<u8>>,
    /// Their bins.
    pub bins: Option<&'a [u16]>,
}

impl Before<'_> {
    /// In the system's form.
    pub fn state(self, dtype: Dtype) -> Option<State> {
        Some(State { values: widen(dtype, self.bytes)?, bins: self.bins.map(<[u16]>::to_vec) })
    }
}

/// True if published systems support this type: those that f32 holds.
pub fn is_for(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F16 | Dtype::Bf16 | Dtype::F32)
}

/// The values of a tile, exactly; `None` for other types, or bytes that are not whole elements.
pub fn widen(dtype: Dtype, bytes: &Arc<Vec<u8>>) -> Option<Floats> {
    (is_for(dtype) && bytes.len().is_multiple_of(dtype.size())).then_some(())?;
    if dtype == Dtype::F32 {
        return Some(Floats::of(bytes));
    }
    let mut values = VALUES.take(bytes.len() / dtype.size());
    match dtype {
        Dtype::F16 => values.iter_mut().zip(F16::elements(bytes)).for_each(|(v, &e)| *v = F16::widen(e) as f32),
        _ => values.iter_mut().zip(Bf16::elements(bytes)).for_each(|(v, &e)| *v = Bf16::widen(e) as f32),
    }
    Some(values.into())
}

/// Values as a tile of this type, each rounded to nearest, ties to even.
fn round(dtype: Dtype, values: Floats) -> Vec<u8> {
    let bytes = match dtype {
        Dtype::F16 => values.iter().map(|&value| F16::round(value.into())).collect::<Vec<_>>().into_flattened(),
        Dtype::Bf16 => values.iter().map(|&value| Bf16::round(value.into())).collect::<Vec<_>>().into_flattened(),
        _ => return values.into_bytes(),
    };
    values.give_back();
    bytes
}

/// True if all are finite. Without a branch per value, which would take as long as encoding.
fn are_finite(values: &[f32]) -> bool {
    const EXPONENT: u32 = 0x7f80_0000;
    values.iter().fold(0, |largest, value| (value.to_bits() & EXPONENT).max(largest)) < EXPONENT
}

/// Appends the payload of a tile and returns its decoded form. `None` if the tensor must stay lossless.
pub fn encode(system: (u8, &dyn System), fit: &Fit, dtype: Dtype, tile: &Tile, out: &mut Vec<u8>) -> Option<Decoded> {
    if !is_for(dtype) || !are_finite(&tile.values) {
        return None;
    }
    out.push(system.0);
    let state = system.1.encode(fit, tile, out)?;
    Some(rounded(dtype, state))
}

fn rounded(dtype: Dtype, state: State) -> Decoded {
    Decoded { bytes: round(dtype, state.values), bins: state.bins }
}

/// Appends the payload of a state as it is, with or without a base for a difference.
pub fn encode_as_it_is(dtype: Dtype, state: Before, parent: Option<&[u8]>, out: &mut Vec<u8>) {
    out.push(AS_IT_IS);
    varint::put_bytes(out, |out| lossless::encode(dtype, state.bytes, parent, out));
    if let Some(bins) = state.bins {
        let bins: Vec<u8> = bins.iter().flat_map(|bin| bin.to_le_bytes()).collect();
        lossless::encode(Dtype::U16, &bins, None, out);
    }
}

/// The inverse of both, with the same `before`; `len`: bytes.
///
/// # Errors
/// [`Corrupt`] if neither writes such a payload.
pub fn decode(dtype: Dtype, payload: &[u8], before: Option<Before>, len: usize) -> Result<Decoded, Corrupt> {
    if !is_for(dtype) || !len.is_multiple_of(dtype.size()) {
        return Err(Corrupt("type of a published system's tensor"));
    }
    let elements = len / dtype.size();
    let (&id, mut payload) = payload.split_first().ok_or(Corrupt("no payload"))?;
    if id == AS_IT_IS {
        let mut decoded = Decoded { bytes: vec![0; len], bins: None };
        let body = varint::take_bytes(&mut payload)?;
        lossless::decode(dtype, body, before.map(|before| before.bytes.as_slice()), &mut decoded.bytes)?;
        if !payload.is_empty() {
            let mut bins = vec![0; 2 * elements];
            lossless::decode(Dtype::U16, payload, None, &mut bins)?;
            decoded.bins = Some(bins.as_chunks().0.iter().map(|&bin| u16::from_le_bytes(bin)).collect());
        }
        return Ok(decoded);
    }
    let previous = match before {
        Some(before) => {
            Some(before.state(dtype).filter(|_| before.bytes.len() == len).ok_or(Corrupt("previous state"))?)
        }
        None => None,
    };
    let state = registry::decoder(id)?.decode(payload, previous.as_ref(), elements)?;
    if state.values.len() != elements || state.bins.as_ref().is_some_and(|bins| bins.len() != elements) {
        return Err(Corrupt("length of a tile"));
    }
    previous.into_iter().for_each(give_state);
    Ok(rounded(dtype, state))
}

/// How a system chooses the base of differences.
pub fn policy(system: registry::SystemId) -> Policy {
    system.system().policy()
}
