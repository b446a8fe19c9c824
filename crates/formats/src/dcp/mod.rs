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

pub use metadata::{Named, Whole};
pub use model::Model;

use super::patch::Checksums;
use super::proof::Training;
use super::read::Fail;
use super::torch::{self, Contents};
use super::zip::Zip;
use super::{Description, Kind, ReadAt, Role, Tensor};

const UNNAMED: &str = "its name stands in .metadata, which does not tell it";

/// Describes a file that is this chain of zips. Its tensors are called by the number of their zip.
pub(super) fn describe(src: &dyn ReadAt, zips: Vec<Zip>) -> Result<Description, Fail> {
    let mut tensors = Vec::with_capacity(zips.len());
    let mut ids = Vec::with_capacity(zips.len());
    for (number, zip) in zips.iter().enumerate() {
        let Contents { stored, id, .. } = torch::read(src, zip)?;
        tensors.extend(stored.tensors.into_iter().map(|tensor| unnamed(tensor, number)));
        ids.push(id);
    }
    let checksums = Some(Checksums::of(zips.into_iter().zip(ids)));
    Ok(Description { checksums, ..Description::new(Kind::Dcp, tensors, Training::default()) })
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
