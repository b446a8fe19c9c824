//! Names formats that stepfs does not look into, for people who ask why a file is opaque.

use super::ReadAt;
use super::read::Fail;

/// First bytes of a format, and its name. Two bytes prove little, so they come last.
const STARTS: [(&[u8], &str); 16] = [
    (b"\x0c\xdb\x3a\x2a", "OCDBT (Orbax)"),
    (b"\x0c\xdb\x20\xde", "OCDBT (Orbax)"),
    (b"GGUF", "GGUF"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"\xfd7zXZ\0", "xz"),
    (b"\x04\x22\x4d\x18", "lz4"),
    (b"7z\xbc\xaf\x27\x1c", "7z"),
    (b"BZh", "bzip2"),
    (b"PAR1", "Parquet"),
    (b"ARROW1", "Arrow"),
    (b"SQLite format 3\0", "SQLite"),
    (b"\x1f\x8b", "gzip"),
    (b"\x80\x02", PICKLE),
    (b"\x80\x03", PICKLE),
    (b"\x80\x04", PICKLE),
    (b"\x80\x05", PICKLE),
];
const PICKLE: &str = "a pickle that is not torch.save's";

/// The end of a table of LevelDB, as TensorFlow writes the index of a checkpoint.
const TABLE_END: u64 = 0xdb47_7524_8b80_fb57;
/// Where tar has its name.
const TAR: (u64, &[u8]) = (257, b"ustar");

/// The name of the format that the file's magic number tells, if it is one of these.
pub(super) fn name(src: &dyn ReadAt, size: u64) -> Result<Option<&'static str>, Fail> {
    let mut start = [0; 16];
    let start = &mut start[..size.min(16) as usize];
    src.read_exact_at(start, 0)?;
    if let Some((_, name)) = STARTS.iter().find(|(magic, _)| start.starts_with(magic)) {
        return Ok(Some(name));
    }
    if let Some(at) = size.checked_sub(8) {
        let mut end = [0; 8];
        src.read_exact_at(&mut end, at)?;
        if u64::from_le_bytes(end) == TABLE_END {
            return Ok(Some("the index of a TensorFlow bundle"));
        }
    }
    if size >= TAR.0 + TAR.1.len() as u64 {
        let mut word = [0; 5];
        src.read_exact_at(&mut word, TAR.0)?;
        if word == TAR.1 {
            return Ok(Some("tar"));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_named_by_their_magic_numbers() {
        let named = |bytes: &[u8]| name(&bytes, bytes.len() as u64).expect("in memory");
        assert_eq!(named(b"GGUF\x03\0\0\0"), Some("GGUF"));
        assert_eq!(named(b"\x1f\x8b\x08"), Some("gzip"));
        assert_eq!(named(b"\x80\x04N."), Some(PICKLE));
        let table = [&b"some blocks"[..], &TABLE_END.to_le_bytes()].concat();
        assert_eq!(named(&table), Some("the index of a TensorFlow bundle"));
        let tar = [&[b'a'; 257][..], b"ustar\0"].concat();
        assert_eq!(named(&tar), Some("tar"));
        assert_eq!((named(b""), named(b"P"), named(&[0; 300])), (None, None, None));
    }
}
