//! Names formats that stepfs does not look into, and says what a user can do about it.

use super::ReadAt;
use super::read::{Fail, u32_at};

/// First bytes of a format, its name, and the next step for the user. Two bytes prove little, so they come last.
const STARTS: [(&[u8], &str, &str); 18] = [
    (b"\x0c\xdb\x3a\x2a", "the manifest of an OCDBT database (Orbax, zarr)", DATABASE),
    (b"\x0c\xdb\x20\xde", "a node of an OCDBT database (Orbax, zarr)", DATABASE),
    (b"GGUF", "GGUF, a model for inference", WEIGHTS),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd (as a chunk of Orbax or zarr is)", COMPRESSED),
    (b"\xfd7zXZ\0", "compressed with xz", COMPRESSED),
    (b"\x04\x22\x4d\x18", "compressed with lz4", COMPRESSED),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", PACKED),
    (b"Rar!\x1a\x07", "a rar archive", PACKED),
    (b"BZh", "compressed with bzip2", COMPRESSED),
    (b"PAR1", "Parquet, a table of data", DATA),
    (b"ARROW1", "Arrow, a table of data", DATA),
    (b"SQLite format 3\0", "an SQLite database", DATA),
    (b"\x1f\x8b", "compressed with gzip", COMPRESSED),
    (b"\x78\x9c", "compressed with zlib", COMPRESSED),
    (b"\x80\x02", PICKLE, TORCH),
    (b"\x80\x03", PICKLE, TORCH),
    (b"\x80\x04", PICKLE, TORCH),
    (b"\x80\x05", PICKLE, TORCH),
];
const PICKLE: &str = "a pickle that is not torch.save's";

const COMPRESSED: &str = "save torch, safetensors or npz files without compression to shrink them";
const PACKED: &str = "save the files in it by themselves to shrink them";
const DATABASE: &str = "stepfs does not read its arrays; save with torch, safetensors or npz to shrink them";
const WEIGHTS: &str = "save the training's weights with torch or safetensors to shrink them";
const TORCH: &str = "save the arrays with torch, safetensors or npz to shrink them";
const DATA: &str = "it holds no tensors that stepfs could shrink";

/// The end of a table of LevelDB, as TensorFlow writes the index of a checkpoint.
const TABLE_END: u64 = 0xdb47_7524_8b80_fb57;
/// Where tar has its name.
const TAR: (u64, &[u8]) = (257, b"ustar");
/// The length of Blosc's header.
const BLOSC: usize = 16;

/// Why a file of none of the formats that stepfs looks into is kept as it is, in words: the format by its magic
/// number, and the next step.
pub(super) fn words(src: &dyn ReadAt, size: u64) -> Result<String, Fail> {
    Ok(match name(src, size)? {
        Some((name, advice)) => format!("{name}: kept as it is; {advice}"),
        None => {
            "a format that stepfs does not know: kept as it is; docs/CONTAINERS.md lists those that it knows".into()
        }
    })
}

/// The name of the format that the file's magic number tells, if it is one of these, and the next step.
fn name(src: &dyn ReadAt, size: u64) -> Result<Option<(&'static str, &'static str)>, Fail> {
    let mut start = [0; 16];
    let start = &mut start[..size.min(16) as usize];
    src.read_exact_at(start, 0)?;
    if let Some((_, name, advice)) = STARTS.iter().find(|(magic, ..)| start.starts_with(magic)) {
        return Ok(Some((name, advice)));
    }
    // The version, that of the compressor, and the length of the whole.
    if let ([2, 1, ..], true) = (&*start, start.len() == BLOSC && u64::from(u32_at(start, 12)) == size) {
        return Ok(Some(("compressed with Blosc (as a chunk of zarr is)", COMPRESSED)));
    }
    if let Some(at) = size.checked_sub(8) {
        let mut end = [0; 8];
        src.read_exact_at(&mut end, at)?;
        if u64::from_le_bytes(end) == TABLE_END {
            return Ok(Some((
                "the index of a TensorFlow bundle",
                "it stays exact, and tells stepfs the names of the tensors beside it",
            )));
        }
    }
    if size >= TAR.0 + TAR.1.len() as u64 {
        let mut word = [0; 5];
        src.read_exact_at(&mut word, TAR.0)?;
        if word == TAR.1 {
            return Ok(Some(("a tar archive", PACKED)));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_named_by_their_magic_numbers() {
        let named = |bytes: &[u8]| name(&bytes, bytes.len() as u64).expect("in memory").map(|(name, _)| name);
        assert_eq!(named(b"GGUF\x03\0\0\0"), Some("GGUF, a model for inference"));
        assert_eq!(named(b"\x1f\x8b\x08"), Some("compressed with gzip"));
        assert_eq!(named(b"\x80\x04N."), Some(PICKLE));
        let table = [&b"some blocks"[..], &TABLE_END.to_le_bytes()].concat();
        assert_eq!(named(&table), Some("the index of a TensorFlow bundle"));
        let tar = [&[b'a'; 257][..], b"ustar\0"].concat();
        assert_eq!(named(&tar), Some("a tar archive"));
        let blosc = [&[2, 1, 0x13, 4, 64, 0, 0, 0, 64, 0, 0, 0, 20, 0, 0, 0][..], b"data"].concat();
        assert_eq!(named(&blosc), Some("compressed with Blosc (as a chunk of zarr is)"));
        assert_eq!((named(&blosc[..19]), named(b""), named(b"P"), named(&[0; 300])), (None, None, None, None));
    }

    #[test]
    fn each_kind_has_its_own_word() {
        assert!(crate::KINDS.iter().enumerate().all(|(at, (kind, _))| *kind as usize == at));
        assert!(words(&vec![0; 300], 300).unwrap().contains("docs/CONTAINERS.md"));
    }

    #[test]
    fn each_format_has_a_next_step() {
        for (magic, name, advice) in STARTS {
            assert_eq!(words(&magic, magic.len() as u64).unwrap(), format!("{name}: kept as it is; {advice}"));
        }
        assert!(
            words(&[0; 300][..].to_vec(), 300)
                .unwrap()
                .starts_with("a format that stepfs does not know: kept as it is;")
        );
    }
}
