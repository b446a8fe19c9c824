//! The store's records: a magic, the store's format, the fields as postcard writes them, and a checksum.
//!
//! A record in a fixed room has zeros between fields and checksum. postcard reserves no memory for a claimed length: a
//! decoded record takes a small multiple of its bytes.

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{Damage, FORMAT};
use codec::hash::xxh3_64;

/// Bytes before the fields.
pub(super) const FIELDS: usize = 12;
/// Another version of stepfs wrote the record.
pub(super) const OTHER_FORMAT: Damage = Damage("another version of stepfs wrote it");

/// A record of any length.
pub(crate) fn encode(magic: &[u8; 8], record: &impl Serialize) -> Vec<u8> {
    let mut bytes = fields(magic, record);
    bytes.extend_from_slice(&xxh3_64(&bytes).to_le_bytes());
    bytes
}

/// A record in `N` bytes, which must be enough for all its values.
pub(super) fn encode_in<const N: usize>(magic: &[u8; 8], record: &impl Serialize) -> [u8; N] {
    let fields = fields(magic, record);
    let mut bytes = [0; N];
    bytes[..fields.len()].copy_from_slice(&fields);
    let sum = xxh3_64(&bytes[..N - 8]);
    bytes[N - 8..].copy_from_slice(&sum.to_le_bytes());
    bytes
}

fn fields(magic: &[u8; 8], record: &impl Serialize) -> Vec<u8> {
    let head = [magic.as_slice(), &FORMAT.to_le_bytes()].concat();
    postcard::to_extend(record, head).expect("a record has plain fields only")
}

/// Reads a record of any length.
///
/// # Errors
/// [`Damage`] if a byte was changed; [`OTHER_FORMAT`].
pub(crate) fn decode<T: DeserializeOwned>(magic: &[u8; 8], bytes: &[u8]) -> Result<T, Damage> {
    let (record, rest) = parse(magic, bytes)?;
    if rest.is_empty() { Ok(record) } else { Err(Damage("it is longer than it may be")) }
}

/// Reads a record in a fixed room.
///
/// # Errors
/// As of [`decode`].
pub(super) fn decode_in<T: DeserializeOwned, const N: usize>(magic: &[u8; 8], bytes: &[u8; N]) -> Result<T, Damage> {
    let (record, rest) = parse(magic, bytes)?;
    if rest.iter().all(|byte| *byte == 0) { Ok(record) } else { Err(Damage("it is longer than it may be")) }
}

fn parse<'a, T: DeserializeOwned>(magic: &[u8; 8], bytes: &'a [u8]) -> Result<(T, &'a [u8]), Damage> {
    let (body, sum) = bytes.split_last_chunk::<8>().ok_or(Damage("it is cut short"))?;
    let rest = body.strip_prefix(magic).ok_or(Damage("its first bytes are wrong"))?;
    if u64::from_le_bytes(*sum) != xxh3_64(body) {
        return Err(Damage("its checksum does not match"));
    }
    let (format, fields) = rest.split_first_chunk::<4>().ok_or(Damage("it is cut short"))?;
    if u32::from_le_bytes(*format) != FORMAT {
        return Err(OTHER_FORMAT);
    }
    postcard::take_from_bytes(fields).map_err(|_| Damage("a field is damaged"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAGIC: &[u8; 8] = b"stepfsXX";

    #[test]
    fn another_format_is_told_apart_from_damage() {
        let mut bytes = encode(MAGIC, &7u64);
        assert_eq!(decode(MAGIC, &bytes), Ok(7u64));
        let end = bytes.len() - 8;
        bytes[8] += 1;
        assert_eq!(decode::<u64>(MAGIC, &bytes), Err(Damage("its checksum does not match")));
        let sum = xxh3_64(&bytes[..end]);
        bytes[end..].copy_from_slice(&sum.to_le_bytes());
        assert_eq!(decode::<u64>(MAGIC, &bytes), Err(OTHER_FORMAT));
    }

    #[test]
    fn a_claimed_length_reserves_no_memory() {
        let bytes = encode(MAGIC, &u64::MAX);
        assert!(decode::<Vec<u64>>(MAGIC, &bytes).is_err());
        assert!(decode::<String>(MAGIC, &bytes).is_err());
        // Nor do fewer fields than there are bytes pass.
        assert!(decode::<u8>(MAGIC, &bytes).is_err());
    }
}
