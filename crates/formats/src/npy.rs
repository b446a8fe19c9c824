//! Arrays as numpy saves them, one or several in a row, or each in a record of a zip: a magic number, a header that is
//! text of a Python dict, and the elements.

use std::ops::Range;

use super::named::{self, UNKNOWN};
use super::patch::Checksums;
use super::proof::Training;
use super::read::{Fail, bad, begins_with, bytes, left_out, refuse_if, unless_bad};
use super::zip::Zip;
use super::{Description, Kind, ReadAt, Role, Tensor};
use codec::Dtype;

const MAGIC: [u8; 6] = *b"\x93NUMPY";

/// Largest header looked at. numpy itself refuses more than 10,000 bytes.
const MAX_HEADER: u64 = 10_000;

/// Most dimensions of an array, as in numpy.
const MAX_DIMS: usize = 64;

/// An array.
#[derive(Debug, PartialEq)]
pub(super) struct Array {
    /// The type of its elements; `None` if stepfs does not know it, or if it is big-endian.
    pub(super) dtype: Option<Dtype>,
    /// Its shape. An array in Fortran order has one dimension, like a transposed tensor of torch: the shape says
    /// nothing of where its elements lie.
    pub(super) shape: Vec<u64>,
    /// Where its elements are.
    pub(super) extent: Range<u64>,
}

impl Array {
    /// Type and shape of the tensor that it is.
    pub(super) fn elements(&self) -> (Dtype, Vec<u64>) {
        match self.dtype {
            Some(dtype) => (dtype, self.shape.clone()),
            None => (Dtype::U8, vec![self.extent.end - self.extent.start]),
        }
    }
}

/// Most arrays of a file.
const MAX_ARRAYS: usize = 1 << 17;

/// Describes a file with one array, or with several one after the other, as Equinox writes the leaves of a tree. `None`
/// if its beginning is not that of one.
pub(super) fn describe(src: &dyn ReadAt, size: u64) -> Result<Option<Description>, Fail> {
    if !begins_with(src, size, &MAGIC)? {
        return Ok(None);
    }
    let mut arrays = vec![first(src, &(0..size))?];
    let mut note = None;
    while let Some(end) = arrays.last().map(|array| array.extent.end).filter(|&end| end < size) {
        refuse_if(arrays.len() == MAX_ARRAYS, "npy: more than 131,072 arrays")?;
        match first(src, &(end..size)) {
            Ok(array) => arrays.push(array),
            Err(Fail::Io(error)) => return Err(error.into()),
            // Where one array cannot be looked into, nobody knows where the next one begins.
            Err(Fail::Bad(why) | Fail::CutShort(why)) if arrays.len() > 1 => {
                note = Some(format!("{why}; what follows array {} is kept as it is", arrays.len() - 1));
                break;
            }
            Err(error) => return Err(error),
        }
    }
    // Without a name nothing can show that one is a parameter.
    let (alone, why) = match arrays.len() {
        1 => (true, "an array by itself: nothing shows what it is"),
        _ => (false, "an array without a name: nothing shows what it is"),
    };
    let tensor = |(number, array): (usize, Array)| {
        let role = array.dtype.map_or(UNKNOWN, |_| (Role::Other, why));
        let path = if alone { ".".to_string() } else { number.to_string() };
        Tensor::found(path, array.elements(), role, array.extent)
    };
    let tensors = arrays.into_iter().enumerate().filter(|(_, array)| !array.extent.is_empty()).map(tensor).collect();
    Ok(Some(Description { note, ..Description::new(Kind::Npy, tensors, Training::default()) }))
}

/// The array that fills a range of the source.
pub(super) fn read(src: &dyn ReadAt, range: &Range<u64>) -> Result<Array, Fail> {
    let array = first(src, range)?;
    refuse_if(array.extent.end != range.end, "npy: the shape does not fit the length")?;
    Ok(array)
}

/// The array that a range of the source begins with.
fn first(src: &dyn ReadAt, range: &Range<u64>) -> Result<Array, Fail> {
    let size = range.end - range.start;
    let mut fixed = [0; 12];
    let known = size.min(12) as usize;
    src.read_exact_at(&mut fixed[..known], range.start)?;
    let (from, len) = match fixed {
        _ if known < 12 || fixed[..6] != MAGIC => return bad("npy: not an array"),
        [_, _, _, _, _, _, 1, _, a, b, ..] => (10, u64::from(u16::from_le_bytes([a, b]))),
        [_, _, _, _, _, _, 2 | 3, _, a, b, c, d] => (12, u64::from(u32::from_le_bytes([a, b, c, d]))),
        _ => return bad("npy: a version newer than 3"),
    };
    refuse_if(len > MAX_HEADER, "npy: header larger than 10,000 bytes")?;
    refuse_if(from + len > size, "npy: header goes beyond the end")?;
    let mut text = vec![0; len as usize];
    src.read_exact_at(&mut text, range.start + from)?;
    let header = Header::parse(&text).ok_or("npy: the header is not valid, or the elements have fields")?;
    let start = range.start + from + len;
    let (dtype, unit) = element(header.descr)?;
    let end = bytes(&header.shape, unit).and_then(|bytes| start.checked_add(bytes));
    let end = end.filter(|&end| end <= range.end).ok_or("npy: the shape does not fit the length")?;
    Ok(Array { dtype, shape: shape(header.shape, header.fortran), extent: start..end })
}

/// The shape of an array whose bytes fit a u64: one dimension, if its elements lie in Fortran order.
pub(super) fn shape(shape: Vec<u64>, is_fortran: bool) -> Vec<u64> {
    match is_fortran && shape.iter().filter(|&&dim| dim != 1).count() > 1 {
        true => vec![shape.iter().product()],
        false => shape,
    }
}

/// The type that a word like `<f4` names, and its size. Types that stepfs does not know have a size, too.
pub(super) fn element(descr: &str) -> Result<(Option<Dtype>, u64), Fail> {
    let unknown = || bad("npy: the elements are objects, or of a type that numpy does not have");
    let mut chars = descr.chars();
    let (Some(order @ ('<' | '>' | '|')), Some(kind)) = (chars.next(), chars.next()) else {
        return unknown();
    };
    // Times have a unit behind the size: `<M8[ns]`.
    let digits = chars.as_str().split('[').next().unwrap_or("");
    let Ok(size @ 1..) = digits.parse::<u32>() else {
        return unknown();
    };
    let unit = match kind {
        'b' | 'i' | 'u' | 'f' | 'c' | 'S' | 'V' | 'M' | 'm' => u64::from(size),
        'U' => 4 * u64::from(size),
        _ => return unknown(),
    };
    let dtype = number(kind, size).filter(|_| order != '>' || size == 1);
    Ok((dtype, unit))
}

/// The type of numbers of this kind, as numpy writes it, and of so many bytes.
pub(super) fn number(kind: char, size: u32) -> Option<Dtype> {
    match (kind, size) {
        ('b', 1) => Some(Dtype::Bool),
        ('i' | 'u' | 'f' | 'c', 1..=16) => Dtype::from_name(&format!("{}{}", kind.to_ascii_uppercase(), 8 * size)),
        _ => None,
    }
}

/// The fields of a header.
#[derive(Debug, PartialEq)]
struct Header<'t> {
    descr: &'t str,
    fortran: bool,
    shape: Vec<u64>,
}

impl<'t> Header<'t> {
    /// Reads `{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }`. The three keys may come in any order.
    fn parse(text: &'t [u8]) -> Option<Header<'t>> {
        let mut rest = Text(std::str::from_utf8(text).ok()?);
        let (mut descr, mut fortran, mut shape) = (None, None, None);
        rest.skip("{")?;
        while rest.skip("}").is_none() {
            let key = rest.string()?;
            rest.skip(":")?;
            let is_new = match key {
                "descr" => descr.replace(rest.string()?).is_none(),
                "fortran_order" => fortran.replace(rest.bool()?).is_none(),
                "shape" => shape.replace(rest.shape()?).is_none(),
                _ => false,
            };
            // Behind the last key, a comma is usual.
            if !is_new || rest.skip(",").is_none() && !rest.0.starts_with('}') {
                return None;
            }
        }
        rest.0.is_empty().then_some(Header { descr: descr?, fortran: fortran?, shape: shape? })
    }
}

/// The rest of a header's text.
struct Text<'t>(&'t str);

impl<'t> Text<'t> {
    /// Passes over a word and the blanks behind it.
    fn skip(&mut self, word: &str) -> Option<()> {
        self.0 = self.0.strip_prefix(word)?.trim_start();
        Some(())
    }

    fn string(&mut self) -> Option<&'t str> {
        let quote = self.0.chars().next().filter(|quote| ['\'', '"'].contains(quote))?;
        let (string, rest) = self.0[1..].split_once(quote)?;
        self.0 = rest.trim_start();
        (!string.contains('\\')).then_some(string)
    }

    fn bool(&mut self) -> Option<bool> {
        if self.skip("True").is_some() {
            return Some(true);
        }
        self.skip("False").map(|()| false)
    }

    fn shape(&mut self) -> Option<Vec<u64>> {
        let mut shape = Vec::new();
        self.skip("(")?;
        while self.skip(")").is_none() {
            let digits = self.0.len() - self.0.trim_start_matches(|c: char| c.is_ascii_digit()).len();
            let (dim, rest) = self.0.split_at(digits);
            if shape.len() == MAX_DIMS {
                return None;
            }
            shape.push(dim.parse().ok()?);
            // Python 2 wrote long integers so.
            self.0 = rest.strip_prefix('L').unwrap_or(rest).trim_start();
            if self.skip(",").is_none() && !self.0.starts_with(')') {
                return None;
            }
        }
        Some(shape)
    }
}

/// The record of an array has the array's name and this suffix.
const SUFFIX: &[u8] = b".npy";

/// Whether the zip has arrays in it.
pub(super) fn is_npz(zip: &Zip) -> bool {
    zip.records.iter().any(|record| zip.name(record).ends_with(SUFFIX))
}

/// Describes an npz file: a zip with one `NAME.npy` for each array. Compressed records and unknown arrays are left out:
/// their bytes stay exact.
pub(super) fn describe_zip(src: &dyn ReadAt, zip: Zip) -> Result<Description, Fail> {
    let mut arrays = Vec::new();
    let (mut compressed, mut others) = (0, 0);
    for record in &zip.records {
        let name = zip.name(record).strip_suffix(SUFFIX).and_then(|name| std::str::from_utf8(name).ok());
        let Some(name) = name.filter(|_| record.stored) else {
            *(if name.is_some() { &mut compressed } else { &mut others }) += 1;
            continue;
        };
        match unless_bad(read(src, &record.payload))? {
            Some(Array { dtype, shape, extent }) => {
                arrays.push(named::Array { name: name.to_string(), dtype, shape, extent });
            }
            None => others += 1,
        }
    }
    let odd = [
        (compressed, "arrays are compressed (save with numpy.savez to shrink them)"),
        (others, "records are no array that stepfs looks into"),
    ];
    let description = named::describe(Kind::Npz, src.size(), arrays, "floating point, in an npz file")?;
    match left_out("npz", &odd) {
        Some(note) if description.tensors.is_empty() => bad(note),
        note => Ok(Description { note, checksums: Some(Checksums::of([(zip, None)])), ..description }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file with this header, and `len` bytes of elements.
    fn file(header: &str, len: usize) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.extend([1, 0]);
        out.extend((header.len() as u16).to_le_bytes());
        out.extend(header.as_bytes());
        out.resize(out.len() + len, 7);
        out
    }

    fn found(header: &str, len: usize) -> Option<(Option<Dtype>, Vec<u64>)> {
        let file = file(header, len);
        read(&file, &(0..file.len() as u64)).ok().map(|array| (array.dtype, array.shape))
    }

    #[test]
    fn headers_are_read_as_numpy_writes_them() {
        let f4 = |shape: &[u64]| Some((Some(Dtype::F32), shape.to_vec()));
        assert_eq!(found("{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }   \n", 48), f4(&[3, 4]));
        assert_eq!(found("{'descr': '<f4', 'fortran_order': False, 'shape': (), }\n", 4), f4(&[]));
        assert_eq!(found("{'descr': '<f4', 'fortran_order': False, 'shape': (5,), }\n", 20), f4(&[5]));
        assert_eq!(found("{'descr': '<f4', 'fortran_order': False, 'shape': (5L, 2L)}", 40), f4(&[5, 2]));
        assert_eq!(found("{\"shape\":(2,2),\"descr\":\"<f4\",\"fortran_order\":False}", 16), f4(&[2, 2]));
        assert_eq!(found("{'descr': '<f4', 'fortran_order': True, 'shape': (3, 4), }", 48), f4(&[12]));
        assert_eq!(found("{'descr': '<f4', 'fortran_order': True, 'shape': (1, 4), }", 16), f4(&[1, 4]));
        assert_eq!(
            found("{'descr': '|u1', 'fortran_order': False, 'shape': (3,), }", 3),
            Some((Some(Dtype::U8), vec![3]))
        );
        assert_eq!(
            found("{'descr': '<c16', 'fortran_order': False, 'shape': (1,)}", 16),
            Some((Some(Dtype::C128), vec![1]))
        );
    }

    #[test]
    fn unknown_types_are_bytes() {
        for (descr, size) in [("|V2", 2), ("<U3", 12), ("|S7", 7), ("<M8[ns]", 8), (">f4", 4), ("<f16", 16), (">i2", 2)]
        {
            let header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': (2,), }}");
            assert_eq!(found(&header, 2 * size), Some((None, vec![2])), "{descr}");
        }
    }

    #[test]
    fn headers_that_lie_are_refused() {
        let dims = format!("({})", "1,".repeat(65));
        let with = |shape: &str| format!("{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}");
        for shape in [
            "(5,)", "(4, 4294967296, 4294967296)", "(-4,)", "(4", "4", "(4 4)", "(,)", "(99999999999999999999,)", &dims,
        ] {
            assert_eq!(found(&with(shape), 16), None, "{shape}");
        }
        for header in [
            "{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (4,), }",
            "{'descr': '|O', 'fortran_order': False, 'shape': (4,), }",
            "{'descr': '|O8', 'fortran_order': False, 'shape': (2,), }",
            "{'descr': '<f0', 'fortran_order': False, 'shape': (4,), }",
            "{'descr': '<f4294967297', 'fortran_order': False, 'shape': (4,), }",
            "{'descr': '\u{e9}', 'fortran_order': False, 'shape': (4,), }",
            "{'descr': '<f4', 'fortran_order': 0, 'shape': (4,), }",
            "{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (4,), }",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (4,), 'more': True}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (4,), } x",
            "{'descr': '<f4', 'shape': (4,), }",
            "",
        ] {
            assert_eq!(found(header, 16), None, "{header}");
        }
        let whole = file("{'descr': '<f4', 'fortran_order': False, 'shape': (4,), }", 16);
        for len in 0..whole.len() {
            assert!(read(&whole[..len].to_vec(), &(0..len as u64)).is_err(), "{len}");
        }
        let mut long = whole.clone();
        (long[6], long[8], long[9]) = (2, 0xff, 0xff);
        assert!(read(&long, &(0..long.len() as u64)).is_err());
    }
}
