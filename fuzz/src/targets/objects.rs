//! Objects: their parts, whole ones with right checksums, and chains of them.

use std::fs;
use std::path::Path;

use codec::moment::Rule;
use codec::{Dtype, Rows};
use formats::Role;
use stepfs::recall::{Chain, Layout, ReadError, stream, walk};
use stepfs::store::durable::Io;
use stepfs::store::object::{
    FOOTER_BYTES, Footer, HEADER_BYTES, Header, Index, ObjectWriter, TensorEntry, Tile, gaps, path_of, tiles_of,
};
use stepfs::store::{Id, Objects};
use stepfs::tile::{Codec, Coding};
use xxhash_rust::xxh3::xxh3_64;

use super::input::{Input, elements};

/// Longest file that an object here represents.
const MOST: u64 = 1 << 17;

/// The header's bytes before its checksum, and the footer's.
pub(crate) fn header(data: &[u8]) {
    let mut bytes = [0; HEADER_BYTES];
    let length = data.len().min(HEADER_BYTES);
    bytes[..length].copy_from_slice(&data[..length]);
    let _ = Header::decode(&bytes);
    let sum = xxh3_64(&bytes[..HEADER_BYTES - 8]);
    bytes[HEADER_BYTES - 8..].copy_from_slice(&sum.to_le_bytes());
    if let Ok(header) = Header::decode(&bytes) {
        assert_eq!(Header::decode(&header.encode()), Ok(header));
    }
    let mut bytes = [0; FOOTER_BYTES];
    let length = data.len().min(FOOTER_BYTES);
    bytes[..length].copy_from_slice(&data[..length]);
    let _ = Footer::decode(&bytes);
    let sum = xxh3_64(&bytes[..FOOTER_BYTES - 8]);
    bytes[FOOTER_BYTES - 8..].copy_from_slice(&sum.to_le_bytes());
    if let Ok(footer) = Footer::decode(&bytes) {
        assert_eq!(Footer::decode(&footer.encode()), Ok(footer));
    }
}

/// An index, not compressed.
pub(crate) fn index(data: &[u8]) {
    let mut input = Input::new(data);
    let logical_len = input.u64() >> input.upto(63);
    let payload_end = input.u64() >> input.upto(63);
    let Ok(index) = Index::decode(input.rest(), logical_len, payload_end) else { return };
    sound(&index, logical_len, payload_end);
    let written = index.encode();
    let again = Index::decode(&written, logical_len, payload_end);
    // Compared as bytes, because a bound may be NaN.
    assert!(again.expect("written bytes can be read").encode() == written);
}

/// The facts that a reader may rely on in an index.
fn sound(index: &Index, logical_len: u64, payload_end: u64) {
    let mut end = 0;
    for tensor in &index.tensors {
        assert!(tensor.extent.start >= end && tensor.extent.end >= tensor.extent.start);
        end = tensor.extent.end;
        assert_eq!(tensor.tiles.len() as u64, tiles_of(tensor.extent.end - tensor.extent.start));
        assert!(tensor.shape.len() <= 64);
    }
    assert!(end <= logical_len);
    let rest: u64 = index.gaps(logical_len).iter().map(|gap| gap.end - gap.start).sum();
    assert_eq!(index.skeleton.len() as u64, tiles_of(rest));
    for tile in
        index.tensors.iter().flat_map(|tensor| tensor.tiles.iter().chain(&tensor.factors)).chain(&index.skeleton)
    {
        assert!(tile.offset + u64::from(tile.stored) <= payload_end);
    }
}

thread_local! {
    /// A directory for objects, in memory if possible, and one beside it for objects that are being written.
    static PLACE: tempfile::TempDir = {
        let memory = Path::new("/dev/shm");
        match memory.is_dir() {
            true => tempfile::tempdir_in(memory).expect("a directory"),
            false => tempfile::tempdir().expect("a directory"),
        }
    };
}

fn in_place(run: impl FnOnce(&Path, &Path)) {
    PLACE.with(|place| {
        let [objects, tmp] = ["objects", "tmp"].map(|name| place.path().join(name));
        let _ = fs::remove_dir_all(&objects);
        [&objects, &tmp].into_iter().for_each(|directory| fs::create_dir_all(directory).expect("a directory"));
        run(&objects, &tmp);
    });
}

/// Every read of an object: each unit by itself, and the whole.
fn read(objects: &Path, id: Id) -> Result<Vec<u8>, ReadError> {
    let known = Objects::load(objects, |_, _| {}).expect("the directory is there");
    let chain = Chain::open(&known, id)?;
    let _ = stepfs::recall::order(&chain);
    let mut bytes = Vec::new();
    stream(&chain, &Layout::of(chain.leaf()), |offset, _, run| {
        assert_eq!(offset, bytes.len() as u64);
        bytes.extend_from_slice(run);
        Ok::<(), ReadError>(())
    })?;
    assert_eq!(bytes.len() as u64, chain.leaf().header().logical_len);
    Ok(bytes)
}

fn header_of(id: Id, ordered: bool, parent: Option<Id>, logical_len: u64) -> Header {
    Header {
        id,
        lossy: true,
        ordered,
        parent,
        depth: u32::from(parent.is_some()),
        position: 0,
        logical_len,
        decoded_hash: 0,
        decoded_sample: 0,
        source_sample: 0,
        original: [0; 32],
        modified_ns: 0,
        lineage: 1,
        signature: 1,
    }
}

/// A whole object, from the bytes of its index and its payloads: all checksums are right.
pub(crate) fn file(data: &[u8]) {
    let mut input = Input::new(data);
    let ordered = input.byte() & 1 == 1;
    let logical_len = input.upto(MOST as usize) as u64;
    let payloads = input.bytes(20_000);
    let text = input.rest();
    let end = (HEADER_BYTES + payloads.len()) as u64;
    let Ok(mut index) = Index::decode(text, logical_len, end) else { return };
    let own = |tile: &Tile| {
        let from = tile.offset.checked_sub(HEADER_BYTES as u64)? as usize;
        payloads.get(from..from + tile.stored as usize)
    };
    let hash = |tile: &mut Tile| tile.payload_hash = own(tile).map_or(0, |payload| xxh3_64(payload) as u32);
    index.tensors.iter_mut().flat_map(|tensor| tensor.tiles.iter_mut().chain(&mut tensor.factors)).for_each(hash);
    index.skeleton.iter_mut().for_each(hash);
    let text = index.encode();
    let stored = zstd::bulk::compress(&text, 1).expect("memory");
    let id = Id([9; 16]);
    let footer = Footer {
        index_offset: end,
        index_stored: stored.len() as u64,
        index_len: text.len() as u64,
        index_hash: xxh3_64(&stored),
        id,
    };
    let header = header_of(id, ordered, None, logical_len);
    in_place(|objects, _| {
        let path = path_of(objects, id);
        fs::create_dir_all(path.parent().expect("a shard")).expect("a directory");
        fs::write(&path, [&header.encode()[..], payloads, &stored, &footer.encode()].concat()).expect("room");
        let _ = read(objects, id);
    });
}

/// A chain of up to three objects, with tensors of any coding and any payloads. If a state decodes, the pass without a
/// state gives the same bytes.
pub(crate) fn chain(data: &[u8]) {
    let mut input = Input::new(data);
    let depth = 1 + input.upto(2);
    let count = 1 + input.upto(3);
    let shapes: Vec<(Dtype, Vec<u64>)> = (0..count).map(|_| shape(&mut input)).collect();
    in_place(|objects, tmp| {
        let mut parent = None;
        for number in 0..depth {
            let id = Id([1 + number as u8; 16]);
            let mut writer = ObjectWriter::rewrite(&Io::disk(), tmp, id).expect("room");
            let mut at = 0;
            let mut index = Index::default();
            for (dtype, shape) in &shapes {
                at += input.upto(20) as u64;
                let length = shape.iter().product::<u64>() * dtype.size() as u64;
                let coding = coding(&mut input, parent.is_some(), count as u32);
                let factors = match coding {
                    coding if coding.has_factors() => {
                        let text = factors(&mut input, shape);
                        Some(writer.put(&text, 0).expect("room"))
                    }
                    _ => None,
                };
                let tiles = (0..tiles_of(length)).map(|_| {
                    let payload = payload(&mut input, coding, *dtype, length as usize / dtype.size());
                    writer.put(&payload, 0).expect("room")
                });
                index.tensors.push(TensorEntry {
                    path: format!("t{}", index.tensors.len()),
                    dtype: *dtype,
                    role: Role::Weight,
                    shape: shape.clone(),
                    extent: at..at + length,
                    coding,
                    bound: 0.0,
                    max_abs_error: 0.0,
                    factors,
                    tiles: tiles.collect(),
                });
                at += length;
            }
            let logical_len = at + input.upto(9) as u64;
            let rest: u64 = gaps(index.tensors.iter().map(|tensor| tensor.extent.clone()), logical_len)
                .iter()
                .map(|gap| gap.end - gap.start)
                .sum();
            if rest > 0 {
                let chunk = vec![7; rest as usize];
                let frame = zstd::bulk::compress(&chunk, 1).expect("memory");
                index.skeleton.push(writer.put(&frame, xxh3_64(&chunk)).expect("room"));
            }
            writer.close(&index).expect("room");
            writer.finish(&header_of(id, false, parent, logical_len), objects).expect("room");
            parent = Some(id);
        }
        let id = parent.expect("at least one object");
        let _ = read(objects, id);
        agree(objects, tmp, id);
    });
}

/// Gives each tile of the leaf the hash of its decoded state; then all must decode.
fn agree(objects: &Path, tmp: &Path, id: Id) {
    let known = Objects::load(objects, |_, _| {}).expect("the directory is there");
    let Ok(chain) = Chain::open(&known, id) else { return };
    let leaf = chain.leaf();
    let mut index = leaf.index().clone();
    let mut sound = true;
    for (number, entry) in index.tensors.iter_mut().enumerate() {
        for at in 0..entry.tiles.len() {
            let state = walk::state(&chain, number, at).ok();
            match state.and_then(|state| state.bytes(entry.dtype).ok()) {
                Some(bytes) => entry.tiles[at].decoded_hash = xxh3_64(&bytes),
                None => {
                    // A tile without a state has no bytes.
                    sound = false;
                    assert!(walk::decode(&chain, number, at).is_err());
                }
            }
        }
    }
    if !sound {
        return;
    }
    let mut writer = ObjectWriter::rewrite(&Io::disk(), tmp, id).expect("room");
    let mut payload = Vec::new();
    let tensors = index.tensors.iter_mut().flat_map(|tensor| tensor.factors.iter_mut().chain(&mut tensor.tiles));
    for tile in tensors.chain(&mut index.skeleton) {
        leaf.payload(tile, &mut payload).expect("it was read before");
        *tile = writer.put(&payload, tile.decoded_hash).expect("room");
    }
    writer.close(&index).expect("room");
    writer.finish(leaf.header(), objects).expect("room");
    read(objects, id).expect("every tile has the hash of its state");
}

fn shape(input: &mut Input) -> (Dtype, Vec<u64>) {
    let dtype = if input.byte() > 240 { input.pick(&Dtype::ALL) } else { input.float() };
    let shape = match input.upto(3) {
        0 => vec![1 + input.upto(30) as u64],
        1 => vec![1 + input.upto(6) as u64, 1 + input.upto(12) as u64],
        2 => vec![2, 3, 1 + input.upto(4) as u64],
        _ => vec![20, 6],
    };
    (dtype, shape)
}

/// A coding of a tensor, usually a valid one.
fn coding(input: &mut Input, with_parent: bool, tensors: u32) -> Coding {
    let step = input.step();
    let unit = if input.byte() == 0 { input.u32() } else { 1 << (14 + input.upto(6)) };
    let number = input.upto(tensors as usize) as u32;
    let codec = match input.byte() % 8 {
        0 => Codec::Lossless,
        1 => Codec::Lattice { step },
        2 => Codec::Rows { step },
        3 => Codec::Log { unit },
        4 => Codec::Moment { second: number, step, rule: input.pick(&[Rule::Root, Rule::Norm, Rule::Inward]) },
        5 => Codec::External,
        6 => Codec::Sized { step, rule: input.pick(&[Rule::Norm, Rule::Sign]) },
        _ => Codec::Cast { of: number },
    };
    let may_differ = with_parent && codec.has_differences() || input.byte() == 0;
    Coding { codec, parent: (may_differ && input.flag()).then_some(number) }
}

fn factors(input: &mut Input, shape: &[u64]) -> Vec<u8> {
    if input.byte() < 32 {
        return input.bytes(60).to_vec();
    }
    let (rows, width) = stepfs::store::object::rows_and_width(shape);
    let mut builder = codec::log::FactorsBuilder::new(rows as usize, width as usize);
    let values: Vec<f64> = (0..rows * width).map(|_| f64::from(input.byte())).collect();
    builder.add(Dtype::F64, 0, &elements(Dtype::F64, &values));
    let mut out = Vec::new();
    builder.finish(0).encode(&mut out);
    out
}

/// A payload for this coding: an encoder's, perhaps with a byte changed, or any bytes.
fn payload(input: &mut Input, coding: Coding, dtype: Dtype, n: usize) -> Vec<u8> {
    use codec::{lattice, lossless, rows};
    if input.byte() < 24 {
        return input.bytes(120).to_vec();
    }
    let mut out = Vec::new();
    let symbols: Vec<i32> = (0..n).map(|_| i32::from(input.byte() as i8)).collect();
    let bytes = input.filled(n * dtype.size());
    if coding.parent.is_none() && coding.step().is_some() {
        let keyframe = input.flag().then_some(bytes.as_slice());
        lattice::put_keyframe(dtype, keyframe, &mut out);
    }
    match coding.codec {
        Codec::Lossless => {
            let parent = coding.parent.map(|_| vec![0; bytes.len()]);
            lossless::encode(dtype, &bytes, parent.as_deref(), &mut out);
        }
        Codec::Lattice { .. } | Codec::Moment { .. } | Codec::Sized { .. } => {
            let _ = lattice::encode_tile(&symbols, None, &[], &mut out);
        }
        Codec::Rows { .. } => {
            let rows = Rows { width: 6, first: 0 };
            let _ = rows::encode_tile(&symbols, None, rows, &[], &mut out);
        }
        Codec::Log { .. } => codec::entropy::ints::encode(&symbols, &mut out),
        Codec::External => {
            let bytes = std::sync::Arc::new(bytes);
            let own = papers::tile::Before { bytes: &bytes, bins: None };
            papers::tile::encode_as_it_is(dtype, own, None, &mut out);
        }
        Codec::Cast { .. } => {}
    }
    if input.byte() < 24 && !out.is_empty() {
        let at = input.upto(out.len() - 1);
        out[at] ^= 1 << input.upto(7);
    }
    out
}
