//! A user's first ideas: zstd, zstd --patch-from, and byte planes. All are lossless, as decoding and comparing shows.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Seek, Write};
use std::path::Path;
use std::time::Duration;

use anyhow::{Error, Result, anyhow};
use indicatif::ProgressBar;

use crate::clock::timed;
use crate::store::object::gaps;
use crate::tools::of_file;
use crate::tools::series::{Series, State};
use crate::tools::values::Size;
use codec::{Dtype, TILE_BYTES, lossless};
use formats::ReadAt;

use super::report::{Measured, RoleKept, SKELETON};

/// Bytes handed over at once. An interruption waits for one such piece.
const CHUNK: usize = 1 << 20;
/// The largest window of zstd is 2 GiB. A patch of a larger file could not reach its place in the older file.
const MAX_WINDOW_LOG: u32 = 31;
/// The largest file that can be patched.
pub(super) const MAX_PATCHED: u64 = (1 << MAX_WINDOW_LOG) - 1;
/// zstd's smallest window.
const MIN_WINDOW_LOG: u32 = 10;
/// The length of a tile's payload, stored with it.
const TILE_LENGTH_BYTES: u64 = 4;

/// `zstd`, or with `patch` the work of `zstd --patch-from`: the file before as reference, a window over all of it,
/// matches over long distances. The first file of a series is compressed alone. To read one file, all before it are
/// read.
pub(super) fn zstd(series: &Series, level: u8, patch: bool, dir: &Path, bar: &ProgressBar) -> Result<Measured> {
    let mut measured = Measured::default();
    // The file before, and the time to decode all files before it.
    let mut before: Option<Vec<u8>> = None;
    let mut on_the_way = Duration::ZERO;
    for (at, state) in series.states.iter().enumerate() {
        let fail = of_file(&state.path);
        let prefix = before.as_deref();
        let packed = tempfile::tempfile_in(dir).map_err(of_file(dir))?;
        let window = window_log(state.len.max(prefix.map_or(0, |bytes| bytes.len() as u64)));
        let encode = || -> io::Result<zstd::stream::write::Encoder<'_, BufWriter<&File>>> {
            let to = BufWriter::with_capacity(CHUNK, &packed);
            let mut encoder = match prefix {
                Some(prefix) => zstd::stream::write::Encoder::with_ref_prefix(to, level.into(), prefix)?,
                None => zstd::stream::write::Encoder::new(to, level.into())?,
            };
            if prefix.is_some() {
                encoder.window_log(window)?;
                encoder.long_distance_matching(true)?;
            }
            encoder.set_pledged_src_size(Some(state.len))?;
            Ok(encoder)
        };
        let mut encoder = timed(&mut measured.encode, encode).map_err(&fail)?;
        each_chunk(state, |chunk| timed(&mut measured.encode, || encoder.write_all(chunk)))?;
        timed(&mut measured.encode, || encoder.finish()?.flush()).map_err(&fail)?;
        let bytes = packed.metadata().map_err(&fail)?.len();
        bar.inc(1);

        let mut packed = packed;
        packed.rewind().map_err(&fail)?;
        let from = BufReader::with_capacity(CHUNK, packed);
        let mut spent = Duration::ZERO;
        let open = || -> io::Result<Box<dyn Read + '_>> {
            Ok(match prefix {
                Some(prefix) => {
                    let mut decoder = zstd::stream::read::Decoder::with_ref_prefix(from, prefix)?;
                    decoder.window_log_max(window)?;
                    Box::new(decoder)
                }
                None => Box::new(zstd::stream::read::Decoder::with_buffer(from)?),
            })
        };
        let mut decoder = timed(&mut spent, open).map_err(&fail)?;
        let mut decoded = vec![0; CHUNK];
        let mut is_same = true;
        each_chunk(state, |chunk| {
            timed(&mut spent, || decoder.read_exact(&mut decoded[..chunk.len()]))?;
            is_same &= decoded[..chunk.len()] == *chunk;
            Ok(())
        })?;
        drop(decoder);
        if !is_same {
            return Err(wrong(state));
        }
        on_the_way = if patch { on_the_way + spent } else { spent };
        measured.decode += on_the_way;
        measured.add(bytes, Size::default(), if patch { at as u64 + 1 } else { 1 });
        if patch {
            let mut whole = vec![0; state.len as usize];
            state.file.read_exact_at(&mut whole, 0).map_err(&fail)?;
            before = Some(whole);
        }
        bar.inc(1);
    }
    Ok(measured)
}

/// A lossless codec did not return its input.
fn wrong(state: &State) -> Error {
    anyhow!("{} does not come back as it was", state.path.display())
}

/// A window over this many bytes.
fn window_log(bytes: u64) -> u32 {
    (bytes.max(1).ilog2() + 1).clamp(MIN_WINDOW_LOG, MAX_WINDOW_LOG)
}

/// Hands on the bytes of a file.
fn each_chunk(state: &State, mut take: impl FnMut(&[u8]) -> io::Result<()>) -> Result<()> {
    let mut chunk = vec![0; CHUNK];
    for at in (0..state.len).step_by(CHUNK) {
        let count = CHUNK.min((state.len - at) as usize);
        ReadAt::read_exact_at(&state.file, &mut chunk[..count], at).map_err(of_file(&state.path))?;
        take(&chunk[..count]).map_err(of_file(&state.path))?;
    }
    Ok(())
}

/// Each tile of each tensor by the lossless codec without a parent, and all bytes between tensors the same way.
pub(super) fn planes(series: &Series, bar: &ProgressBar) -> Result<Measured> {
    let mut measured = Measured::default();
    for state in &series.states {
        let mut planes = Planes { state, measured: &mut measured, payload: Vec::new(), decoded: Vec::new() };
        let mut bytes = 0;
        let mut tile = vec![0; TILE_BYTES];
        for tensor in &state.description.tensors {
            let mut stored = 0;
            for start in tensor.extent.clone().step_by(TILE_BYTES) {
                let count = TILE_BYTES.min((tensor.extent.end - start) as usize);
                state.file.read_exact_at(&mut tile[..count], start).map_err(of_file(&state.path))?;
                stored += planes.tile(tensor.dtype, &tile[..count])?;
            }
            let len = tensor.bytes();
            let role: &mut RoleKept = planes.measured.roles.entry(tensor.role.name()).or_default();
            role.add(stored, len, len / tensor.dtype.size() as u64);
            bytes += stored;
        }
        bar.inc(1);
        let (mut stored, mut raw) = (0, 0);
        let mut waiting = Vec::with_capacity(2 * TILE_BYTES);
        for gap in gaps(state.description.tensors.iter().map(|t| t.extent.clone()), state.len) {
            raw += gap.end - gap.start;
            for start in gap.clone().step_by(TILE_BYTES) {
                let count = TILE_BYTES.min((gap.end - start) as usize);
                state.file.read_exact_at(&mut tile[..count], start).map_err(of_file(&state.path))?;
                waiting.extend_from_slice(&tile[..count]);
                if waiting.len() >= TILE_BYTES {
                    stored += planes.tile(Dtype::U8, &waiting[..TILE_BYTES])?;
                    waiting.drain(..TILE_BYTES);
                }
            }
        }
        if !waiting.is_empty() {
            stored += planes.tile(Dtype::U8, &waiting)?;
        }
        measured.roles.entry(SKELETON).or_default().add(stored, raw, 0);
        measured.add(bytes + stored, Size::default(), 1);
        bar.inc(1);
    }
    Ok(measured)
}

/// Tile after tile of one file.
struct Planes<'a> {
    state: &'a State,
    measured: &'a mut Measured,
    payload: Vec<u8>,
    decoded: Vec<u8>,
}

impl Planes<'_> {
    /// Encodes and decodes a tile; answers the bytes it takes.
    fn tile(&mut self, dtype: Dtype, bytes: &[u8]) -> Result<u64> {
        let Planes { state, measured, payload, decoded } = self;
        payload.clear();
        decoded.clear();
        decoded.resize(bytes.len(), 0);
        timed(&mut measured.encode, || lossless::encode(dtype, bytes, None, payload));
        let result = timed(&mut measured.decode, || lossless::decode(dtype, payload, None, decoded));
        match result.is_ok() && decoded == bytes {
            true => Ok(payload.len() as u64 + TILE_LENGTH_BYTES),
            false => Err(wrong(state)),
        }
    }
}
