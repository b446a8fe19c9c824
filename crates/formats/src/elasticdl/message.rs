//! The message `Model` that an ElasticDL parameter server writes as a checkpoint: one file, no framing, no checksum.
//!
//! ElasticDL's checkpoint design, "How to save model parameters to a checkpoint directory"; field numbers as its code
//! has them. Everything must be as that code writes it, or nothing is understood: a field that is not known, twice
//! there, or in conflict with another one is refused.

use std::collections::HashSet;
use std::ops::Range;

use super::super::ReadAt;
use super::super::protobuf::{Value, Wire, data_type};
use super::super::read::{Fail, bad, bytes, refuse_if};
use codec::Dtype;

/// Tensors in one file: real ones have thousands.
const MAX_TENSORS: usize = 1 << 18;
/// Bytes of a name: real ones have some dozens.
const MAX_NAME: u64 = 4 << 10;
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
            1 if version.is_none() => version = Some(value.number()?),
            1 => return bad(TWICE),
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
    refuse_if(model.version > i32::MAX as u64, "ElasticDL: the version is negative")?;
    let names = [
        model.infos.iter().map(|info| &info.name).collect::<Vec<_>>(),
        model.dense.iter().map(|dense| &dense.name).collect(),
        model.tables.iter().map(|table| &table.name).collect(),
    ];
    for names in names {
        let distinct: HashSet<&String> = names.iter().copied().collect();
        refuse_if(distinct.len() < names.len(), "ElasticDL: two entries have the same name")?;
    }
    Ok(model)
}

struct Reader<'a> {
    wire: Wire<'a>,
    /// Bytes of names so far.
    names: usize,
    rows: usize,
}

const TWICE: &str = "ElasticDL: a field is there twice";

impl Reader<'_> {
    /// The fields 1 to `N` of a message, each of which is there once or not at all.
    fn fields<const N: usize>(&mut self, message: Range<u64>, what: &str) -> Result<[Option<Value>; N], Fail> {
        let (mut fields, mut rest) = ([const { None }; N], message);
        while let Some((number, value)) = self.wire.field(&mut rest)? {
            match fields.get_mut(number as usize - 1) {
                Some(field @ None) => *field = Some(value),
                Some(Some(_)) => return bad(TWICE),
                None => return bad(format!("ElasticDL: {what} with a field that is not known")),
            }
        }
        Ok(fields)
    }

    fn name(&mut self, value: Option<Value>) -> Result<String, Fail> {
        let Some(value) = value else { return Ok(String::new()) };
        let name = self.wire.text(value.bytes()?, MAX_NAME)?;
        self.names += name.len();
        refuse_if(self.names > MAX_NAMES, "ElasticDL: the names are too long and too many")?;
        Ok(name)
    }

    fn info(&mut self, message: Range<u64>) -> Result<Info, Fail> {
        let [name, dim, initializer, dtype] = self.fields(message.clone(), "a table's description")?;
        number(dim)?;
        number(dtype)?;
        self.name(initializer)?;
        Ok(Info { name: self.name(name)?, message })
    }

    /// Key and value of a map's entry.
    fn entry(&mut self, message: Range<u64>) -> Result<(String, Range<u64>), Fail> {
        match self.fields(message, "an entry")? {
            [key @ Some(_), Some(inner)] => Ok((self.name(key)?, inner.bytes()?)),
            _ => bad("ElasticDL: an entry without a name or without a tensor"),
        }
    }

    fn dense(&mut self, message: Range<u64>) -> Result<Dense, Fail> {
        let (name, value) = self.entry(message.clone())?;
        Ok(Dense { name, message, array: self.array(value)? })
    }

    fn slices(&mut self, message: Range<u64>) -> Result<Slices, Fail> {
        let (name, value) = self.entry(message)?;
        let [Some(array), ids] = self.fields(value, "a table")? else {
            return bad("ElasticDL: a table without values");
        };
        let array = self.array(array.bytes()?)?;
        let ids = ids.map(|ids| self.ids(ids.bytes()?)).transpose()?.unwrap_or_default();
        refuse_if(array.dims.first() != Some(&(ids.len() as u64)), "ElasticDL: a table has not as many rows as ids")?;
        Ok(Slices { name, array, ids })
    }

    fn ids(&mut self, mut rest: Range<u64>) -> Result<Vec<u64>, Fail> {
        let mut ids = Vec::new();
        while rest.start < rest.end {
            let id = self.wire.varint(&mut rest)?;
            refuse_if(id > i64::MAX as u64, "ElasticDL: a row with a negative id")?;
            self.rows += 1;
            refuse_if(self.rows > MAX_ROWS, "ElasticDL: more rows than stepfs looks at")?;
            ids.push(id);
        }
        Ok(ids)
    }

    fn array(&mut self, message: Range<u64>) -> Result<Array, Fail> {
        let [dtype, dims, version, content] = self.fields(message, "a tensor")?;
        let array = Array {
            dtype: number(dtype)?,
            dims: dims.map(|dims| self.dims(dims.bytes()?)).transpose()?.unwrap_or_default(),
            version: number(version)?,
            content: content.map_or(Ok(0..0), Value::bytes)?,
        };
        refuse_if(array.version > i32::MAX as u64, "ElasticDL: a tensor's version is negative")?;
        let dtype = array.dtype().ok_or("ElasticDL: a tensor of an element type that stepfs does not know")?;
        let len = bytes(&array.dims, dtype.size() as u64);
        refuse_if(len != Some(array.len()), "ElasticDL: a shape does not fit the tensor's bytes")?;
        Ok(array)
    }

    fn dims(&mut self, mut rest: Range<u64>) -> Result<Vec<u64>, Fail> {
        let mut dims = Vec::new();
        while let Some((field, value)) = self.wire.field(&mut rest)? {
            // No variable has an unknown rank (3), and dimensions never have names.
            refuse_if(field != 2 || dims.len() == MAX_DIMS, "ElasticDL: a shape that no variable has")?;
            let [size] = self.fields(value.bytes()?, "a dimension")?;
            dims.push(number(size)?);
        }
        Ok(dims)
    }
}

/// A number, which is 0 if it is not there.
fn number(value: Option<Value>) -> Result<u64, Fail> {
    value.map_or(Ok(0), Value::number)
}
