//! The tensors that can still be read of a file of which others are lost, as a safetensors file.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use crate::recall::{Cache, Recall};
use crate::store::durable::{CrashPoint, DeviceFile};
use crate::store::object::{HEAD_BYTES, Object, TAIL_BYTES, TensorEntry};
use crate::store::{Id, Objects, Store};
use codec::Dtype;
use formats::STEADY_BYTES;

/// Read at once.
const PIECE: u64 = 1 << 20;

/// The tensors that were saved and lost.
#[derive(Clone, Debug, Default)]
pub struct Salvaged {
    /// Paths of the tensors that were written.
    pub written: Vec<String>,
    /// Paths of those that are lost, and why.
    pub lost: Vec<(String, String)>,
}

/// Writes the readable tensors of an object into an empty file, in the safetensors format. All other bytes of the
/// file are left out. The caller makes the file durable.
///
/// # Errors
/// The device's errors. Damage of the object's header or index, since these list the tensors.
pub fn salvage(store: &Store, id: Id, out: &DeviceFile) -> io::Result<Salvaged> {
    const WRITTEN: CrashPoint = CrashPoint::ExportWritten;
    let objects = Arc::new(Objects::load_on(store.io().clone(), &store.objects(), |_, _| {})?);
    let object: Arc<Object> = objects.open(id)?;
    // No file of the store's own cache is touched: it may be mounted.
    let place = tempfile::tempdir()?;
    let recall = Recall::new(Arc::clone(&objects), Cache::new(place.path(), 0)?, 0, 1)?;
    let reader = recall.part(id)?;
    let tensors = &object.index().tensors;
    let mut salvaged = Salvaged::default();
    // Room for a header that names all tensors. Blanks fill the rest, as the format allows.
    let room = header(tensors.iter().map(|tensor| (tensor, u64::MAX / 4..u64::MAX / 2))).len() as u64 + 8;
    let room = room.next_multiple_of(8);
    let (mut found, mut at) = (Vec::new(), 0);
    for tensor in tensors {
        let range = whole(tensor);
        let length = range.end - range.start;
        let copy = || -> io::Result<()> {
            let mut buf = vec![0; PIECE.min(length) as usize];
            for from in (range.start..range.end).step_by(PIECE as usize) {
                let piece = &mut buf[..PIECE.min(range.end - from) as usize];
                reader.read_at(from, piece)?;
                out.write_all_at(piece, 8 + room + at + from - range.start, WRITTEN)?;
            }
            Ok(())
        };
        match copy() {
            Ok(()) => {
                found.push((tensor, at..at + length));
                salvaged.written.push(tensor.path.clone());
                at += length;
            }
            Err(error) if super::is_damage(&error) => salvaged.lost.push((tensor.path.clone(), error.to_string())),
            Err(error) => return Err(error),
        }
    }
    let mut text = header(found.into_iter()).into_bytes();
    text.resize(room as usize, b' ');
    out.write_all_at(&room.to_le_bytes(), 0, WRITTEN)?;
    out.write_all_at(&text, 8, WRITTEN)?;
    out.set_len(8 + room + at, WRITTEN)?;
    Ok(salvaged)
}

/// The bytes of a tensor in the file, with the edges that are left to the skeleton.
fn whole(tensor: &TensorEntry) -> Range<u64> {
    let bytes = tensor.shape.iter().try_fold(tensor.dtype.size() as u64, |product, &dim| product.checked_mul(dim));
    let len = tensor.extent.end - tensor.extent.start;
    match bytes {
        Some(bytes) if bytes == len + HEAD_BYTES + TAIL_BYTES && tensor.extent.start >= HEAD_BYTES => {
            tensor.extent.start - HEAD_BYTES..tensor.extent.end + TAIL_BYTES
        }
        // The end of a tensor in a bundle of TensorFlow.
        Some(bytes) if bytes == len + STEADY_BYTES => tensor.extent.start..tensor.extent.end + STEADY_BYTES,
        _ => tensor.extent.clone(),
    }
}

fn header<'a>(tensors: impl Iterator<Item = (&'a TensorEntry, Range<u64>)>) -> String {
    let mut map = serde_json::Map::new();
    for (tensor, range) in tensors {
        let length = whole(tensor);
        let length = length.end - length.start;
        let elements =
            tensor.shape.iter().try_fold(tensor.dtype.size() as u64, |product, &dim| product.checked_mul(dim));
        // A type that the format does not have, or a piece of a tensor: bytes.
        let (dtype, shape) = match tensor.dtype {
            Dtype::C128 => (Dtype::U8, vec![length]),
            dtype if elements == Some(length) => (dtype, tensor.shape.clone()),
            _ => (Dtype::U8, vec![length]),
        };
        let entry =
            serde_json::json!({ "dtype": dtype.name(), "shape": shape, "data_offsets": [range.start, range.end] });
        map.insert(tensor.path.clone(), entry);
    }
    serde_json::Value::Object(map).to_string()
}
