//! The message `Model` that an ElasticDL parameter server writes as a checkpoint: one file, no framing, no checksum.
//!
//! ElasticDL's checkpoint design, "How to save model parameters to a checkpoint directory"; field numbers as its code
//! has them. Everything must be as that code writes it, or nothing is understood: a field that is not known, twice
//! there, or in conflict with another one is refused.

use std::collections::HashSet;
use std::ops::Range;

use super::super::ReadAt;
use super::super::protobuf::{Value, Wire, data_type};
use super::super::read::{Fail, bad};
use codec::Dtype;

/// Tensors in one file: real ones have thousands.
const MAX_TENSORS: usize = 1 << 18;
/// Bytes of a name: real ones have some dozens.
const MAX_NAME: u64 = 4 << 10;
/// Bytes of all names.
const MAX_NAMES: usize = 64 << 20;
/// Rows of all embedding tables in one file: 20 bytes of memory each while they are described, 0.7 GB. A file has at
/// most 2 GiB, the limit of Protocol Buffers: so many rows of 16 floats.
const MAX_ROWS: usize = 1 << 25;
/// Most dimensions of a tensor, as in numpy.
const MAX_DIMS: usize = 64;

/// A parameter server's checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Model {
    /// Iteration of the model.
    pub(super) version: u64,
    pub(super) infos: Vec<Info>,
    pub(super) dense: Vec<Dense>,
    pub(super) tables: Vec<Slices>,
}

/// The description of an embedding table; every server has those of all tables.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Info {
    pub(super) name: String,
    /// Its message.
    pub(super) message: Range<u64>,
}

/// A variable that is on one server as a whole.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Dense {
    pub(super) name: String,
    /// The entry of the map, without its head.
    pub(super) message: Range<u64>,
    pub(super) array: Array,
}

/// The rows of an embedding table that are on one server.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Slices {
    pub(super) name: String,
    pub(super) array: Array,
    /// Of each row; none is negative, none is there twice.
    pub(super) ids: Vec<u64>,
}

/// A tensor.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Array {
    /// As TensorFlow numbers them.
    pub(super) dtype: u64,
    pub(super) dims: Vec<u64>,
    pub(super) version: u64,
    /// Its bytes in the file, in C order.
    pub(super) content: Range<u64>,
}

impl Array {
    /// The element type; `None` if stepfs does not know it.
    pub(super) fn dtype(&self) -> Option<Dtype> {
        data_type(self.dtype)
    }

    /// Length in bytes.
    pub(super) fn len(&self) -> u64 {
        self.content.end - self.content.start
    }
}

impl Slices {
    /// Bytes of a row.
    pub(super) fn row(&self) -> u64 {
        self.array.len() / (self.ids.len() as u64).max(1)
    }
}

/// Reads a file that is one message.
///
/// # Errors
/// `Bad` for any other file; the errors of `src`. Memory: 8 bytes per row, the names, some 200 bytes per tensor; all
/// have limits.
pub(super) fn read(src: &dyn ReadAt, size: u64) -> Result<Model, Fail> {
    let mut reader = Reader { wire: Wire::new(src, size), names: 0, rows: 0 };
    let mut model = Model { version: 0, infos: Vec::new(), dense: Vec::new(), tables: Vec::new() };
    let mut version = None;
    let mut rest = 0..size;
    while let Some((field, value)) = reader.wire.field(&mut rest)? {
        match field {
            1 => once(&mut version, value.number()?)?,
            2 => model.infos.push(reader.info(value.bytes()?)?),
            3 => model.dense.push(reader.dense(value.bytes()?)?),
            4 => model.tables.push(reader.slices(value.bytes()?)?),
            _ => return bad("ElasticDL: a model with a field that is not known"),
        }
        if model.infos.len() + model.dense.len() + model.tables.len() > MAX_TENSORS {
            return bad("ElasticDL: more tensors than stepfs looks at");
        }
    }
    model.version = version.unwrap_or(0);
    // Its type is int32.
    if model.version > i32::MAX as u64 {
        return bad("ElasticDL: the version is negative");
    }
    let names = [
        model.infos.iter().map(|info| &info.name).collect::<Vec<_>>(),
        model.dense.iter().map(|dense| &dense.name).collect(),
        model.tables.iter().map(|table| &table.name).collect(),
    ];
    for names in names {
        let distinct: HashSet<&String> = names.iter().copied().collect();
        if distinct.len() < names.len() {
            return bad("ElasticDL: two entries have the same name");
        }
    }
    Ok(model)
}

struct Reader<'a> {
    wire: Wire<'a>,
    /// Bytes of names so far.
    names: usize,
    rows: usize,
}

/// Sets a field that may occur only once.
fn once<T>(slot: &mut Option<T>, value: T) -> Result<(), Fail> {
    match slot.replace(value) {
        None => Ok(()),
        Some(_) => bad("ElasticDL: a field is there twice"),
    }
}

impl Reader<'_> {
    fn name(&mut self, value: Value) -> Result<String, Fail> {
        let name = self.wire.text(value.bytes()?, MAX_NAME)?;
        self.names += name.len();
        if self.names > MAX_NAMES {
            return bad("ElasticDL: the names are too long and too many");
        }
        Ok(name)
    }

    fn info(&mut self, message: Range<u64>) -> Result<Info, Fail> {
        let (mut name, mut dim, mut initializer, mut dtype) = (None, None, None, None);
        let mut rest = message.clone();
        while let Some((field, value)) = self.wire.field(&mut rest)? {
            match field {
                1 => once(&mut name, self.name(value)?)?,
                2 => once(&mut dim, value.number()?)?,
                3 => once(&mut initializer, self.name(value)?)?,
                4 => once(&mut dtype, value.number()?)?,
                _ => return bad("ElasticDL: a table's description with a field that is not known"),
            }
        }
        Ok(Info { name: name.unwrap_or_default(), message })
    }

    /// Key and value of a map's entry.
    fn entry(&mut self, message: Range<u64>) -> Result<(String, Range<u64>), Fail> {
        let (mut key, mut inner) = (None, None);
        let mut rest = message;
        while let Some((field, value)) = self.wire.field(&mut rest)? {
            match field {
                1 => once(&mut key, self.name(value)?)?,
                2 => once(&mut inner, value.bytes()?)?,
                _ => return bad("ElasticDL: an entry with a field that is not known"),
            }
        }
        match (key, inner) {
            (Some(key), Some(inner)) => Ok((key, inner)),
            _ => bad("ElasticDL: an entry without a name or without a tensor"),
        }
    }

    fn dense(&mut self, message: Range<u64>) -> Result<Dense, Fail> {
        let (name, value) = self.entry(message.clone())?;
        Ok(Dense { name, message, array: self.array(value)? })
    }

    fn slices(&mut self, message: Range<u64>) -> Result<Slices, Fail> {
        let (name, value) = self.entry(message)?;
        let (mut array, mut ids) = (None, None);
        let mut rest = value;
        while let Some((field, value)) = self.wire.field(&mut rest)? {
            match field {
                1 => once(&mut array, self.array(value.bytes()?)?)?,
                2 => once(&mut ids, self.ids(value.bytes()?)?)?,
                _ => return bad("ElasticDL: a table with a field that is not known"),
            }
        }
        let Some(array) = array else { return bad("ElasticDL: a table without values") };
        let ids = ids.unwrap_or_default();
        if array.dims.first() != Some(&(ids.len() as u64)) {
            return bad("ElasticDL: a table has not as many rows as ids");
        }
        Ok(Slices { name, array, ids })
    }

    fn ids(&mut self, range: Range<u64>) -> Result<Vec<u64>, Fail> {
        let mut ids = Vec::new();
        let mut rest = range;
        while rest.start < rest.end {
            let id = self.wire.varint(&mut rest)?;
            if id > i64::MAX as u64 {
                return bad("ElasticDL: a row with a negative id");
            }
            self.rows += 1;
            if self.rows > MAX_ROWS {
                return bad("ElasticDL: more rows than stepfs looks at");
            }
            ids.push(id);
        }
        Ok(ids)
    }

    fn array(&mut self, message: Range<u64>) -> Result<Array, Fail> {
        let (mut dtype, mut dims, mut version, mut content) = (None, None, None, None);
        let mut rest = message;
        while let Some((field, value)) = self.wire.field(&mut rest)? {
            match field {
                1 => once(&mut dtype, value.number()?)?,
                2 => once(&mut dims, self.dims(value.bytes()?)?)?,
                3 => once(&mut version, value.number()?)?,
                4 => once(&mut content, value.bytes()?)?,
                _ => return bad("ElasticDL: a tensor with a field that is not known"),
            }
        }
        let array = Array {
            dtype: dtype.unwrap_or(0),
            dims: dims.unwrap_or_default(),
            version: version.unwrap_or(0),
            content: content.unwrap_or(0..0),
        };
        if array.version > i32::MAX as u64 {
            return bad("ElasticDL: a tensor's version is negative");
        }
        let Some(dtype) = array.dtype() else {
            return bad("ElasticDL: a tensor of an element type that stepfs does not know");
        };
        let elements = array.dims.iter().try_fold(dtype.size() as u64, |n, &dim| n.checked_mul(dim));
        match elements == Some(array.len()) {
            true => Ok(array),
            false => bad("ElasticDL: a shape does not fit the tensor's bytes"),
        }
    }

    fn dims(&mut self, message: Range<u64>) -> Result<Vec<u64>, Fail> {
        let mut dims = Vec::new();
        let mut rest = message;
        while let Some((field, value)) = self.wire.field(&mut rest)? {
            // No variable has an unknown rank (3), and dimensions never have names.
            if field != 2 || dims.len() == MAX_DIMS {
                return bad("ElasticDL: a shape that no variable has");
            }
            let (mut size, mut dim) = (None, value.bytes()?);
            while let Some((field, value)) = self.wire.field(&mut dim)? {
                match field {
                    1 => once(&mut size, value.number()?)?,
                    _ => return bad("ElasticDL: a dimension with a field that is not known"),
                }
            }
            dims.push(size.unwrap_or(0));
        }
        Ok(dims)
    }
}
