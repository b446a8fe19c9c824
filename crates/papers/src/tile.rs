//! A published system's tile in an object: bytes of the tensor's own type, and a payload that names its system.
//!
//! Payload: the system's number ([`super::registry`]), then its own payload. Or 0 and the state as it is, for a state
//! that lost its base: a lossless tile with its length before it. Then the bins of the elements, if it has any, as the
//! lossless tile of as many U16. So later states still decode to the same bits, whatever happens to the earlier ones.

use std::sync::Arc;

use super::registry::SystemId;
use super::{Fit, Floats, State, Tile, code, registry};
use codec::entropy::varint;
use codec::{Corrupt, Dtype, lossless};

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
    code::TYPES.contains(&dtype)
}

/// The values of a tile, exactly; `None` for other types, or bytes that are not whole elements.
pub fn widen(dtype: Dtype, bytes: &Arc<Vec<u8>>) -> Option<Floats> {
    if !is_for(dtype) || !bytes.len().is_multiple_of(dtype.size()) {
        return None;
    }
    Some(if dtype == Dtype::F32 { Floats::of(Arc::clone(bytes)) } else { code::widened(dtype, bytes).into() })
}

/// A state in its tensor's type, each value rounded to nearest, ties to even.
fn rounded(dtype: Dtype, State { values, bins }: State) -> Decoded {
    Decoded { bytes: if dtype == Dtype::F32 { values.into_bytes() } else { code::narrowed(dtype, &values) }, bins }
}

/// Appends the payload of a tile and returns its decoded form; `system`: the fit's. `None` if the tensor must stay
/// lossless.
pub fn encode(system: SystemId, fit: &dyn Fit, dtype: Dtype, tile: &Tile, out: &mut Vec<u8>) -> Option<Decoded> {
    if !is_for(dtype) {
        return None;
    }
    out.push(system.family());
    super::encode(fit, tile, out).map(|state| rounded(dtype, state))
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
    Corrupt::when(!is_for(dtype) || !len.is_multiple_of(dtype.size()), "type of a published system's tensor")?;
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
    Corrupt::when(before.is_some_and(|before| before.bytes.len() != len), "previous state")?;
    let previous = before.and_then(|before| before.state(dtype));
    let system = registry::decoder(id)?;
    Ok(rounded(dtype, super::decode(system.as_ref(), payload, previous.as_ref(), elements)?))
}
