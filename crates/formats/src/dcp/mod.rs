//! Torch's distributed checkpoints (`torch.distributed.checkpoint`): a directory with files `__{rank}_{n}.distcp` and a
//! pickle
//! `.metadata`. torch writes `.metadata` last.
//!
//! A `.distcp` file is a chain of zips of torch.save, one right behind the other. Each zip holds one chunk of a tensor,
//! or one Python value. The zips hold places and shapes, but no names. [`Model`] reads the names from `.metadata`. The
//! role of a tensor follows from its name.

mod metadata;
mod model;
#[cfg(test)]
mod tests;

pub use model::Model;

use super::patch::Crcs;
use super::pickle;
use super::proof::Training;
use super::read::{Fail, bad};
use super::storages::Storages;
use super::torch::{Layout, ZipRecords, is_big_endian};
use super::walk::walk;
use super::zip::Zip;
use super::{Description, Kind, ReadAt, Role, Tensor};

const UNNAMED: &str = "its name stands in .metadata, which does not tell it";

/// Describes a file that is this chain of zips. Its tensors are called by the number of their zip.
pub(super) fn describe(src: &dyn ReadAt, zips: Vec<Zip>) -> Result<Description, Fail> {
    let mut crcs = Crcs::default();
    let mut tensors = Vec::with_capacity(zips.len());
    for (number, zip) in zips.into_iter().enumerate() {
        let layout = Layout::of(&zip)?;
        let pickle = &zip.records[layout.pickle];
        if !pickle.stored {
            return bad("dcp: a zip is compressed: kept as it is; write it as torch does to shrink it");
        }
        let (mut found, mut of_tensor) = (Vec::new(), Vec::new());
        if !is_big_endian(src, &zip, &layout)? {
            let graph = pickle::load(src, pickle.payload.start, pickle.payload.end)?;
            let records = ZipRecords { zip: &zip, data: &layout.data };
            let mut storages = Storages::new(&records);
            let optimizers = walk(&graph, &mut storages)?;
            ((found, _), of_tensor, _) = storages.finish(&optimizers);
        }
        tensors.extend(found.into_iter().map(|tensor| unnamed(tensor, number)));
        let serialization_id = layout.serialization_id;
        drop(layout);
        crcs.add(zip, of_tensor, serialization_id);
    }
    Ok(Description { zip: Some(crcs), ..Description::new(Kind::Dcp, tensors, Training::default()) })
}

/// A tensor without the role that the walk of its zip found: a walk over one tensor without a name proves nothing.
fn unnamed(tensor: Tensor, number: usize) -> Tensor {
    let path = match tensor.path.as_str() {
        "." => format!("#{number}"),
        path => format!("#{number}/{path}"),
    };
    let shape = (tensor.dtype, tensor.shape);
    Tensor::found(path, shape, (Role::Other, UNNAMED), tensor.extent)
}
