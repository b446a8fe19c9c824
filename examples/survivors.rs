//! The least size of a lineage's states, each as a difference to the one before it that is still there. It is counted
//! tile by tile with the codecs alone, not by the program that merges. `scripts/lineage.py` compares it with a
//! store's size after most of its files were removed.
//!
//!     cargo run --release --example survivors STORE

use std::path::Path;

use codec::log::From;
use codec::{lattice, log, lossless};
use stepfs::recall::{Chain, walk};
use stepfs::store::object::TensorEntry;
use stepfs::store::{Objects, Store};
use stepfs::tile::State;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let root = std::env::args().nth(1).ok_or("name a store")?;
    let store = Store::look(Path::new(&root))?;
    let objects = Objects::load(&store.objects(), |id, error| eprintln!("object {id}: {error}"))?;
    let mut states = objects.all();
    states.sort_by_key(|header| (header.modified_ns, header.id));
    let (mut total, mut before) = (0, None);
    for header in states {
        let chain = Chain::open(&objects, header.id)?;
        let index = chain.leaf().index();
        let payloads: u64 = index.tensors.iter().map(TensorEntry::stored).sum();
        // Skeleton, index, and the device's rounding.
        total += chain.leaf().stored() - payloads;
        for number in 0..index.tensors.len() {
            total += tensor(&chain, number, before.as_ref())?;
        }
        before = Some(chain);
    }
    println!("{total}");
    Ok(())
}

/// Bytes of a tensor as difference to the same one of the state before, or as it is where it is a keyframe.
fn tensor(chain: &Chain, number: usize, before: Option<&Chain>) -> Result<u64, Box<dyn std::error::Error>> {
    let entry = &chain.leaf().index().tensors[number];
    let twin = before.and_then(|before| {
        let fits = |other: &TensorEntry| other.path == entry.path && other.tiles.len() == entry.tiles.len();
        Some((before, before.leaf().index().tensors.iter().position(fits)?))
    });
    let (Some((before, twin)), Some(_)) = (twin, entry.coding.parent) else {
        return Ok(entry.stored());
    };
    let (mut difference, mut alone) = (0, 0);
    for at in 0..entry.tiles.len() {
        let (now, then) = (walk::state(chain, number, at)?, walk::state(before, twin, at)?);
        let mut out = Vec::new();
        match (&*now, &*then) {
            (State::Lattice { accumulators, step, .. }, State::Lattice { accumulators: base, step: from, .. }) => {
                let mut base = base.values();
                lattice::rescale(&mut base, *from, *step)?;
                lattice::encode_tile(&accumulators.wide(), Some(&base), &[], &mut out)?;
            }
            (State::Lattice { accumulators, .. }, State::Bytes(_)) => {
                lattice::encode_tile(&accumulators.wide(), None, &[], &mut out)?;
            }
            (State::Bytes(bytes), _) => {
                lossless::encode(entry.dtype, bytes, Some(&then.bytes(entry.dtype)?), &mut out);
                let mut own = Vec::new();
                lossless::encode(entry.dtype, bytes, None, &mut own);
                alone += own.len() as u64;
            }
            (State::Log { factors, q, .. }, State::Log { factors: same, q: base, .. }) if factors == same => {
                log::encode_tile(&q.wide(), From::Integers(base), &mut out)?;
            }
            _ => return Ok(entry.stored()),
        }
        difference += out.len() as u64;
    }
    // Only lossless tensors were also counted alone.
    Ok(if alone > 0 { difference.min(alone) } else { difference })
}
