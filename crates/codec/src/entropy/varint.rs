//! Unsigned LEB128: seven bits per byte, low bits first; the high bit means that more follow.

use super::Corrupt;

/// Appends `value`, 1 to 10 bytes.
pub fn put(mut value: u64, out: &mut Vec<u8>) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// Takes one value off the front of `payload`.
pub fn take(payload: &mut &[u8]) -> Result<u64, Corrupt> {
    let mut value = 0u64;
    for shift in (0..64).step_by(7) {
        let (&byte, rest) = payload.split_first().ok_or(Corrupt("truncated integer"))?;
        *payload = rest;
        let part = u64::from(byte & 0x7f);
        if part << shift >> shift != part {
            break;
        }
        value |= part << shift;
        if byte < 0x80 {
            return Ok(value);
        }
    }
    Err(Corrupt("integer beyond 64 bits"))
}

/// Takes a length and that many bytes off the front of `payload`.
pub fn take_bytes<'a>(payload: &mut &'a [u8]) -> Result<&'a [u8], Corrupt> {
    let length = take(payload)?;
    let length = usize::try_from(length).map_err(|_| Corrupt("length beyond the payload"))?;
    let (part, rest) = payload.split_at_checked(length).ok_or(Corrupt("length beyond the payload"))?;
    *payload = rest;
    Ok(part)
}

/// Appends the output of `write`, with its length before it.
pub fn put_bytes(out: &mut Vec<u8>, write: impl FnOnce(&mut Vec<u8>)) {
    let at = out.len();
    write(out);
    let mut length = Vec::with_capacity(10);
    put((out.len() - at) as u64, &mut length);
    out.splice(at..at, length);
}
