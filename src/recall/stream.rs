//! Decodes a whole file from its first byte to its last.

use std::collections::VecDeque;
use std::sync::{Arc, mpsc};

use rayon::{ScopeFifo, Yield};

use crate::store::Damage;
use crate::sync::Pool;
use codec::entropy::scratch;
use codec::hash::Xxh3Of128;

use super::layout::{Layout, Unit};
use super::{Chain, ReadError, walk};

/// Segments that are decoded or wait for the one before them. They keep every core busy and bound memory to about
/// 32 x 3 tiles, 50 MB.
const IN_FLIGHT: usize = 32;

type Decoded = Result<Arc<Vec<u8>>, ReadError>;

/// Decodes a unit.
pub(crate) fn decode_unit(chain: &Chain, unit: Unit) -> Result<Arc<Vec<u8>>, ReadError> {
    match unit {
        Unit::Tile { tensor, tile } => walk::decode(chain, tensor as usize, tile as usize),
        Unit::Skeleton { chunk } => walk::skeleton(chain.leaf(), chunk as usize).map(Arc::new),
    }
}

/// Passes the file's bytes to `sink` in order, with the offset and the unit of each run. If its tables have ids, the
/// rows come in the order of those ([`super::order()`]). Other threads of the caller's pool decode meanwhile. There is
/// no barrier: while one tile takes long, those after it are decoded.
pub fn stream<E: From<ReadError>>(
    chain: &Chain,
    layout: &Layout,
    sink: impl FnMut(u64, Unit, &[u8]) -> Result<(), E>,
) -> Result<(), E> {
    stream_on(None, chain, layout, sink)
}

/// The same on the threads of `pool`, of which this one is none. Other tasks of the pool then wait behind [`IN_FLIGHT`]
/// tiles at most. Tiles that a pool's own thread spawns would go before all of them, for as long as the file is.
pub(crate) fn stream_on<E: From<ReadError>>(
    pool: Option<&Pool>,
    chain: &Chain,
    layout: &Layout,
    sink: impl FnMut(u64, Unit, &[u8]) -> Result<(), E>,
) -> Result<(), E> {
    match pool {
        Some(pool) => pool.scope_fifo(|scope| pass_on(scope, chain, layout, sink)),
        None => rayon::in_place_scope_fifo(|scope| pass_on(scope, chain, layout, sink)),
    }
}

/// Spawns tiles in `scope`, and passes them to `sink` on this thread.
fn pass_on<'scope, E: From<ReadError>>(
    scope: &ScopeFifo<'scope>,
    chain: &'scope Chain,
    layout: &Layout,
    mut sink: impl FnMut(u64, Unit, &[u8]) -> Result<(), E>,
) -> Result<(), E> {
    let mut chunk: Option<(usize, Arc<Vec<u8>>)> = None;
    let mut write = |at: usize, tile: Option<Decoded>| -> Result<(), E> {
        let segment = &layout.segments[at];
        let unit = layout.units[segment.unit];
        if let Some(bytes) = tile {
            let bytes = bytes?;
            sink(segment.range.start, unit, &bytes)?;
            scratch::give_bytes(bytes);
            return Ok(());
        }
        // Chunks of the skeleton come in order, each scattered over many segments: keep the last one.
        let bytes = match chunk.take() {
            Some((number, bytes)) if number == segment.unit => bytes,
            _ => decode_unit(chain, unit)?,
        };
        let len = (segment.range.end - segment.range.start) as usize;
        let run = bytes.get(segment.at..segment.at + len).ok_or_else(|| short(chain))?;
        sink(segment.range.start, unit, run)?;
        chunk = Some((segment.unit, bytes));
        Ok(())
    };
    let mut in_flight = VecDeque::new();
    for at in 0..layout.segments.len() {
        while in_flight.len() < IN_FLIGHT && at + in_flight.len() < layout.segments.len() {
            let unit = layout.units[layout.segments[at + in_flight.len()].unit];
            in_flight.push_back(matches!(unit, Unit::Tile { .. }).then(|| {
                let (send, decoded) = mpsc::sync_channel::<Decoded>(1);
                // Nobody takes it if the file was given up.
                scope.spawn_fifo(move |_| drop(send.send(decode_unit(chain, unit))));
                decoded
            }));
        }
        let tile = match in_flight.pop_front().flatten() {
            // The decoder panicked, and the end of this scope says so.
            Some(decoded) => match take(&decoded) {
                None => return Ok(()),
                some => some,
            },
            None => None,
        };
        write(at, tile)?;
    }
    Ok(())
}

/// Waits for a tile. A thread of the pool decodes its other tiles meanwhile, so that a pool of one thread works too. It
/// begins no other file then: this one would wait for all of that. `None` if the decoder panicked.
fn take(decoded: &mpsc::Receiver<Decoded>) -> Option<Decoded> {
    loop {
        match decoded.try_recv() {
            Ok(tile) => return Some(tile),
            Err(mpsc::TryRecvError::Disconnected) => return None,
            Err(mpsc::TryRecvError::Empty) => {}
        }
        if rayon::yield_local() != Some(Yield::Executed) {
            return decoded.recv().ok();
        }
    }
}

/// The error for a skeleton that is shorter than the file needs.
pub(super) fn short(chain: &Chain) -> ReadError {
    ReadError::object(chain.leaf().header().id, Damage("its skeleton is cut short"))
}

/// Decodes a file, and checks the hash of all its bytes.
///
/// # Errors
/// It is another hash.
pub fn check_hash(chain: &Chain, expected: u128) -> Result<(), ReadError> {
    check_hash_on(None, chain, expected)
}

/// The same on a pool's threads, see [`stream_on`].
pub(crate) fn check_hash_on(pool: Option<&Pool>, chain: &Chain, expected: u128) -> Result<(), ReadError> {
    let mut hash = Xxh3Of128::default();
    stream_on(pool, chain, &Layout::of(chain.leaf()), |_, _, bytes| {
        hash.update(bytes);
        Ok::<(), ReadError>(())
    })?;
    let wrong = || ReadError::object(chain.leaf().header().id, Damage("it does not decode to the archived bytes"));
    if hash.digest() == expected { Ok(()) } else { Err(wrong()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is taken of a tile that a pool of so many threads makes.
    fn taken(threads: usize, make: fn() -> Decoded) -> Option<Decoded> {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            rayon::in_place_scope_fifo(|scope| {
                let (send, decoded) = mpsc::sync_channel(1);
                scope.spawn_fifo(move |_| drop(send.send(make())));
                take(&decoded)
            })
        })
    }

    #[test]
    fn the_thread_that_waits_decodes() {
        let made = || Ok(Arc::new(vec![7]));
        for threads in [1, 2] {
            assert_eq!(*taken(threads, made).unwrap().unwrap(), [7], "{threads} threads");
        }
    }

    #[test]
    fn a_panic_of_a_decoder_ends_the_wait() {
        for threads in [1, 2] {
            let panicked = std::panic::catch_unwind(|| taken(threads, || panic!("a decoder's")));
            let message = *panicked.unwrap_err().downcast::<&str>().unwrap();
            assert_eq!(message, "a decoder's", "{threads} threads");
        }
    }
}
