//! Several arrays as numpy saves them: a zip with one `NAME.npy` for each.
//!
//! A record has a header before the elements, so its CRC is not the tensor's. Compressed records and unknown arrays
//! are left out: their bytes stay exact.

use super::patch::Crcs;
use super::read::{Fail, bad};
use super::zip::Zip;
use super::{Description, Kind, ReadAt, Tensor, named, npy};

/// The record of an array has the array's name and this suffix.
const SUFFIX: &[u8] = b".npy";

/// Whether the zip has arrays in it.
pub(super) fn is_npz(zip: &Zip) -> bool {
    zip.records.iter().any(|record| zip.name(record).ends_with(SUFFIX))
}

/// Describes the file.
pub(super) fn describe(src: &dyn ReadAt, zip: Zip) -> Result<Description, Fail> {
    let (mut tensors, mut heads, mut of_tensor) = (Vec::new(), Vec::new(), Vec::new());
    let (mut compressed, mut others) = (0, 0);
    for (number, record) in zip.records.iter().enumerate() {
        let name = zip.name(record).strip_suffix(SUFFIX).map(std::str::from_utf8);
        let Some(Ok(name)) = name else {
            others += 1;
            continue;
        };
        if !record.stored {
            compressed += 1;
            continue;
        }
        let array = match npy::read(src, &record.payload) {
            Ok(array) => array,
            Err(Fail::Io(error)) => return Err(error.into()),
            Err(Fail::Bad(_) | Fail::CutShort(_)) => {
                others += 1;
                continue;
            }
        };
        if array.extent.is_empty() {
            continue;
        }
        let role = match array.dtype {
            Some(dtype) => named::role(name, dtype, "floating point, in an npz file"),
            None => named::UNKNOWN,
        };
        // At most 10,012 bytes.
        let mut head = vec![0; (array.extent.start - record.payload.start) as usize];
        src.read_exact_at(&mut head, record.payload.start)?;
        heads.push((crc32fast::hash(&head), array.extent.end - array.extent.start));
        of_tensor.push(number as u32);
        tensors.push(Tensor::found(name.to_string(), array.elements(), role, array.extent));
    }
    let odd = [
        (compressed, "arrays are compressed (save with numpy.savez to shrink them)"),
        (others, "records are no array that stepfs looks into"),
    ];
    let odd: Vec<String> = odd.into_iter().filter(|(n, _)| *n > 0).map(|(n, what)| format!("{n} {what}")).collect();
    let note = (!odd.is_empty()).then(|| format!("npz: {}", odd.join(", ")));
    if let (true, Some(note)) = (tensors.is_empty(), &note) {
        return bad(note);
    }
    let training = named::relate(&mut tensors);
    let zip = Some(Crcs::new(zip, of_tensor, None).with_heads(heads));
    Ok(Description { note, zip, ..Description::new(Kind::Npz, tensors, training) })
}
