//! Checkpoints of ElasticDL's parameter servers: `version-{V}/variables-{i}-of-{N}.ckpt`, each a protobuf message.
//!
//! ElasticDL's checkpoint design, "Export Model Parameters to a Checkpoint". Such a file has no magic number. So
//! stepfs takes a file for one only if all of it, to the last byte, is a model with a tensor in it.
//!
//! Its servers keep variables and embedding rows in hash maps, so both change their order at every save. Variables
//! are found by name; [`super::Table`] gives the order in which rows are compared. The ids lie outside of all
//! tensors, so the file's other bytes give the order of its rows.

mod message;
mod reshard;
#[cfg(test)]
pub(super) mod tests;

pub use reshard::{Reshard, Source};

use std::collections::HashSet;

use super::proof::{self, Training};
use super::read::{Fail, start, unless_bad};
use super::role::{self, Context};
use super::table::Table;
use super::{Description, Kind, ReadAt, Role, Tensor};
use codec::hash::sha256;
use message::Model;

/// First bytes of a file whose first field is one of a model's.
const FIRST: [u8; 4] = [0x08, 0x12, 0x1a, 0x22];

/// Describes the file; `None` if it is no such model.
pub(super) fn describe(src: &dyn ReadAt, size: u64) -> Result<Option<Description>, Fail> {
    let Some(model) = read(src, size)? else { return Ok(None) };
    let (tensors, tables) = tensors(model);
    // No server writes a row twice, so a file with twins is something else.
    Ok(match tensors.is_empty() || tables.iter().any(Table::has_twins) {
        true => None,
        false => Some(Description { tables, ..Description::new(Kind::ElasticDl, tensors, Training::default()) }),
    })
}

fn read(src: &dyn ReadAt, size: u64) -> Result<Option<Model>, Fail> {
    match start(src, size)? {
        Some([first]) if FIRST.contains(&first) => Ok(unless_bad(message::read(src, size))?),
        _ => Ok(None),
    }
}

/// The tensors by ascending extent, and the tables among them.
fn tensors(model: Model) -> (Vec<Tensor>, Vec<Table>) {
    let mut found = Vec::new();
    let names: HashSet<&str> = model.tables.iter().map(|table| table.name.as_str()).collect();
    let slots: Vec<bool> = model.tables.iter().map(|table| is_slot(&table.name, &names)).collect();
    for dense in &model.dense {
        let array = &dense.array;
        let Some(dtype) = array.dtype().filter(|_| array.len() > 0) else { continue };
        let path = format!("dense_parameters/{}", dense.name);
        let role = role(&dense.name, dtype, "floating point, a variable of a parameter server");
        found.push((Tensor::found(path, (dtype, array.dims.clone()), role, array.content.clone()), None));
    }
    for (table, slot) in model.tables.into_iter().zip(slots) {
        let row = table.row();
        let array = table.array;
        let Some(dtype) = array.dtype().filter(|_| array.len() > 0) else { continue };
        let path = format!("embedding_tables/{}", table.name);
        let role = match slot {
            true => (Role::Optimizer, "named like an optimizer's state of another embedding table"),
            false => role(&table.name, dtype, "floating point, rows of an embedding table"),
        };
        found.push((Tensor::found(path, (dtype, array.dims), role, array.content), Some((row, table.ids))));
    }
    found.sort_by_key(|(tensor, _)| tensor.extent.start);
    let (mut tensors, mut tables) = (Vec::with_capacity(found.len()), Vec::new());
    for (mut tensor, rows) in found {
        tensor.trained = (tensor.role == Role::Weight).then_some(proof::FORMAT);
        let rows = rows.map(|(row, ids)| Table::new(tensors.len(), tensor.extent.clone(), row, &ids));
        tables.extend(rows);
        tensors.push(tensor);
    }
    (tensors, tables)
}

fn role(name: &str, dtype: codec::Dtype, why: &'static str) -> (Role, &'static str) {
    let last = name.rsplit('/').next().unwrap_or(name);
    match role::tensor(Context::Open, true, name, dtype) {
        // Keras' batch normalization.
        (Role::Weight, _) if last.starts_with("moving_") => (Role::Other, "named like a statistic, not a parameter"),
        (Role::Weight, _) => (Role::Weight, why),
        other => other,
    }
}

/// Whether a table is an optimizer's state of another one: its name is the other's name, a hyphen and the slot's.
fn is_slot(name: &str, tables: &HashSet<&str>) -> bool {
    name.match_indices('-').any(|(at, _)| tables.contains(&name[..at]))
}

/// The endings of a file's name: the first by its code, the second by its design document.
const ENDINGS: [&str; 2] = ["ckpt", "chkpt"];

/// A file of a version: `variables-{index}-of-{count}.ckpt`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    /// Number of the server that wrote it.
    pub index: u32,
    /// Number of servers.
    pub count: u32,
    /// The part after the dot.
    pub ending: &'static str,
}

impl Shard {
    /// Parses a file's name. `None` if ElasticDL gives no such name.
    pub fn parse(name: &str) -> Option<Shard> {
        let (rest, ending) = name.strip_prefix("variables-")?.rsplit_once('.')?;
        let ending = ENDINGS.into_iter().find(|known| *known == ending)?;
        let (index, count) = rest.split_once("-of-")?;
        let shard = Shard { index: index.parse().ok()?, count: count.parse().ok()?, ending };
        // Only as it is written: no sign, no zeros before it.
        (shard.index < shard.count && shard.name() == name).then_some(shard)
    }

    /// The file's name.
    pub fn name(&self) -> String {
        format!("variables-{}-of-{}.{}", self.index, self.count, self.ending)
    }
}

/// The number of the server, of `count`, that a variable is on. The name's SHA-256 in hexadecimal, read by ElasticDL
/// as digits to the base 32, modulo `count`, which is not 0. (Restore Model Parameters from a Checkpoint.)
pub fn shard_of(name: &str, count: u32) -> u32 {
    let digits = sha256(name.as_bytes()).into_iter().flat_map(|byte| [byte >> 4, byte & 15]);
    let rest = digits.fold(0u64, |rest, digit| (rest * 32 + u64::from(digit)) % u64::from(count));
    rest as u32
}
