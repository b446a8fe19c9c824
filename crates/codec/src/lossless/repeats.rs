//! Single bytes as one zstd frame. With a parent, the frame may refer to the parent's bytes at any distance, so text
//! and records that moved within the tile cost almost nothing.

use zstd::zstd_safe::{CCtx, CParameter, DCtx};

use super::Corrupt;
use crate::TILE_BYTES;

/// Level of the frames: the skeleton's.
const LEVEL: i32 = 3;
/// The window reaches from the end of a tile to the beginning of its parent.
const WINDOW_LOG: u32 = (2 * TILE_BYTES).ilog2();
/// Number of pieces that show whether a frame may be smaller than planes, and bytes of each.
const PIECES: usize = 4;
const PIECE_BYTES: usize = 16 << 10;
/// A piece is looked up in its parent this far to either side.
const AROUND: usize = 8 << 10;

/// The frame of `data`. `None` if zstd cannot make one.
pub(super) fn encode(data: &[u8], parent: Option<&[u8]>) -> Option<Vec<u8>> {
    let mut context = CCtx::try_create()?;
    context.set_parameter(CParameter::CompressionLevel(LEVEL)).ok()?;
    if let Some(parent) = parent {
        context.set_parameter(CParameter::WindowLog(WINDOW_LOG)).ok()?;
        context.ref_prefix(parent).ok()?;
    }
    let mut frame = Vec::with_capacity(zstd::zstd_safe::compress_bound(data.len()));
    context.compress2(&mut frame, data).ok()?;
    Some(frame)
}

/// Fills `out` from a frame.
pub(super) fn decode(frame: &[u8], parent: Option<&[u8]>, out: &mut [u8]) -> Result<(), Corrupt> {
    const WRONG: Corrupt = Corrupt("a zstd frame");
    let mut context = DCtx::try_create().ok_or(Corrupt("no memory for zstd"))?;
    if let Some(parent) = parent {
        context.ref_prefix(parent).map_err(|_| WRONG)?;
    }
    let written = context.decompress(out, frame).map_err(|_| WRONG)?;
    if written == out.len() { Ok(()) } else { Err(WRONG) }
}

/// True if pieces of the data show that a frame may be smaller than `bits` says for planes.
pub(super) fn may_help(data: &[u8], parent: Option<&[u8]>, bits: impl Fn(&[u8]) -> f64) -> bool {
    let stride = data.len().div_ceil(PIECES).max(1);
    let (mut frames, mut planes) = (0.0, 0.0);
    for start in (0..data.len()).step_by(stride) {
        let piece = &data[start..data.len().min(start + stride.min(PIECE_BYTES))];
        let near =
            parent.map(|parent| &parent[start.saturating_sub(AROUND)..parent.len().min(start + piece.len() + AROUND)]);
        let Some(frame) = encode(piece, near) else { return false };
        frames += 8.0 * frame.len() as f64;
        planes += bits(piece);
    }
    frames < planes
}
