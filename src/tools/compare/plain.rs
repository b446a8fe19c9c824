//! A user's first ideas: zstd, and zstd --patch-from. Both are lossless, as decoding and comparing shows.

use std::io::{self, BufReader, BufWriter, Read, Seek, Write};
use std::path::Path;
use std::time::Duration;

use anyhow::{Result, bail};
use indicatif::ProgressBar;

use crate::clock::timed;
use crate::tools::of_file;
use crate::tools::series::{Series, State};
use crate::tools::values::Size;
use formats::ReadAt;

use super::report::Measured;

/// Bytes handed over at once. An interruption waits for one such piece.
const CHUNK: usize = 1 << 20;
/// The largest window of zstd is 2 GiB. A patch of a larger file could not reach its place in the older file.
const MAX_WINDOW_LOG: u32 = 31;
/// The largest file that can be patched.
pub(super) const MAX_PATCHED: u64 = (1 << MAX_WINDOW_LOG) - 1;
/// zstd's smallest window.
const MIN_WINDOW_LOG: u32 = 10;

/// `zstd`, or with `patch` the work of `zstd --patch-from`: the file before as reference, a window over all of it,
/// matches over long distances. The first file of a series has no reference. To read one file, all before it are
/// read.
pub(super) fn zstd(series: &Series, level: u8, patch: bool, dir: &Path, bar: &ProgressBar) -> Result<Measured> {
    let mut measured = Measured::default();
    // The file before, for a patch, and the time to decode all files before it.
    let (mut before, mut on_the_way) = (Vec::new(), Duration::ZERO);
    for (at, state) in series.states.iter().enumerate() {
        let fail = of_file(&state.path);
        let packed = tempfile::tempfile_in(dir).map_err(of_file(dir))?;
        let window = window_log(state.len.max(before.len() as u64));
        let encode = || -> io::Result<_> {
            let to = BufWriter::with_capacity(CHUNK, &packed);
            let mut encoder = zstd::stream::write::Encoder::with_ref_prefix(to, level.into(), &before)?;
            if !before.is_empty() {
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
        let open = || -> io::Result<_> {
            let mut decoder = zstd::stream::read::Decoder::with_ref_prefix(from, &before)?;
            decoder.window_log_max(window)?;
            Ok(decoder)
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
            bail!("{} does not come back as it was", state.path.display());
        }
        on_the_way = if patch { on_the_way + spent } else { spent };
        measured.decode += on_the_way;
        measured.add(bytes, Size::default(), if patch { at as u64 + 1 } else { 1 });
        if patch {
            let mut whole = vec![0; state.len as usize];
            state.file.read_exact_at(&mut whole, 0).map_err(&fail)?;
            before = whole;
        }
        bar.inc(1);
    }
    Ok(measured)
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
