//! Finds the tensors in a checkpoint's bytes, and the bytes that depend on them. Pure: bytes in, description out.
//!
//! The content decides on the container, never the name. An unknown file is described as opaque, and stays exact.
//! Nothing in a file is executed, and every length in it is checked before its use.

mod best;
mod bundle;
mod content;
mod dcp;
mod description;
pub mod elasticdl;
mod flax;
mod hdf5;
mod input;
mod json;
mod legacy;
mod made;
mod magic;
mod named;
mod nested;
mod npy;
mod optax;
mod optimizers;
mod pairing;
mod patch;
mod path;
mod pickle;
mod pickled;
mod progress;
mod proof;
mod protobuf;
mod read;
mod role;
mod safetensors;
mod siblings;
mod slots;
mod storages;
mod table;
#[cfg(test)]
mod tests;
mod torch;
mod view;
mod walk;
mod zip;

use std::io;
use std::ops::Range;
use std::path::Path;

pub use best::{Logged, MAX_TRAINER_STATE, best_of_trainer, is_trainer_state, losses_of_trainer, may_name_best};
pub use bundle::steady::TAIL_BYTES as STEADY_BYTES;
pub use codec::hash::Checksum;
pub use content::{Content, Elements, Key, dotted};
pub use dcp::{Model, Named, Whole};
pub use description::Description;
pub use patch::{ChangedTensor, Patch};
pub use progress::Progress;
pub use proof::Trained;
pub use role::is_of_layer;
pub use siblings::{Siblings, index_in, is_index, is_named_elsewhere, numbers_ranks, siblings};
pub use table::{InOrder, Order, Table};
pub use view::{storage_class, type_name};

use codec::Dtype;

/// Random access to the bytes of a file. Implemented for byte slices and for files (`pread`; a file may be cut
/// short by its owner while it is read, so files are never mapped).
pub trait ReadAt {
    /// Length in bytes.
    fn size(&self) -> u64;
    /// Fills `buf` from `offset`.
    ///
    /// # Errors
    /// `UnexpectedEof` when the range ends beyond the file; the device's errors.
    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()>;
}

/// Container formats that stepfs can look into.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A zip written by `torch.save` (.pt .pth .bin .ckpt).
    TorchZip,
    /// A zip that holds zips of `torch.save` (.zip of stable-baselines3).
    Nested,
    /// A file of torch's distributed checkpoint: zips of `torch.save`, one behind the other (.distcp).
    Dcp,
    /// torch.save before version 1.6: pickles, and payloads behind them.
    TorchLegacy,
    /// A safetensors file.
    Safetensors,
    /// Arrays of numpy, one or several in a row (.npy .eqx).
    Npy,
    /// A zip of arrays of numpy.
    Npz,
    /// Datasets of HDF5, as h5py and Keras write them (.h5 .weights.h5).
    Hdf5,
    /// A zip of Keras with HDF5 in it.
    Keras,
    /// A pickle with arrays of numpy (.pkl, .pdparams).
    Pickle,
    /// A pickle of joblib, with arrays behind their wrappers.
    Joblib,
    /// A mapping of Flax in msgpack (.msgpack, `checkpoint_N`).
    Flax,
    /// Tensors of TensorFlow, whose names stand in another file (`.data-00000-of-00001`).
    Bundle,
    /// A `Model` message of an ElasticDL parameter server.
    ElasticDl,
    /// Anything else; `Description::tensors` is empty.
    Opaque,
}

/// The word of each kind, in the order of the enum.
const KINDS: &[(Kind, &str)] = &[
    (Kind::TorchZip, "torch zip"),
    (Kind::Nested, "zip of torch zips"),
    (Kind::Dcp, "distributed checkpoint"),
    (Kind::TorchLegacy, "legacy torch"),
    (Kind::Safetensors, "safetensors"),
    (Kind::Npy, "npy"),
    (Kind::Npz, "npz"),
    (Kind::Hdf5, "hdf5"),
    (Kind::Keras, "keras"),
    (Kind::Pickle, "pickle"),
    (Kind::Joblib, "joblib"),
    (Kind::Flax, "flax"),
    (Kind::Bundle, "tensorflow"),
    (Kind::ElasticDl, "elasticdl"),
    (Kind::Opaque, "opaque"),
];

impl Kind {
    /// Whether tensors have no names until an index gives them: [`Description::name_chunks`].
    pub fn is_named_later(self) -> bool {
        self == Kind::Dcp
    }

    /// The word people are shown.
    pub fn name(self) -> &'static str {
        KINDS[self as usize].1
    }
}

/// The role of a tensor in training. It decides whether the tensor may be quantized. Its number is its code in
/// objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// A model parameter: may be quantized.
    Weight = 0,
    /// State of an optimizer of no kind below: steps, factors, state of single optimizers.
    Optimizer,
    /// Anything else, or not known.
    Other,
    /// Mean of gradients, which the update divides by the root of its partner: Adam's `exp_avg`.
    FirstMoment,
    /// Mean of squared gradients, whose root the update divides by: never negative. With a partner it is Adam's,
    /// without one RMSprop's.
    SecondMoment,
    /// A momentum buffer: the update is a multiple of it.
    Momentum,
    /// Sum of squared gradients (Adagrad): never negative.
    SquareSum,
    /// An average of weights over time.
    Ema,
    /// An optimizer's own copy of a parameter: the one that it updates for low precision, another iterate, an average.
    Master,
}

impl Role {
    /// All roles, by code.
    pub const ALL: [Role; 9] = [
        Role::Weight,
        Role::Optimizer,
        Role::Other,
        Role::FirstMoment,
        Role::SecondMoment,
        Role::Momentum,
        Role::SquareSum,
        Role::Ema,
        Role::Master,
    ];

    /// The word people and scripts are shown.
    pub fn name(self) -> &'static str {
        match self {
            Role::Weight => "weight",
            Role::Optimizer => "optimizer",
            Role::Other => "other",
            Role::FirstMoment => "first_moment",
            Role::SecondMoment => "second_moment",
            Role::Momentum => "momentum",
            Role::SquareSum => "square_sum",
            Role::Ema => "ema",
            Role::Master => "master",
        }
    }

    /// The coarser role that it belongs to: a weight, an optimizer's, or something else.
    pub fn group(self) -> Role {
        match self {
            Role::Weight | Role::Ema => Role::Weight,
            Role::Other => Role::Other,
            Role::Optimizer
            | Role::FirstMoment
            | Role::SecondMoment
            | Role::Momentum
            | Role::SquareSum
            | Role::Master => Role::Optimizer,
        }
    }
}

/// How an optimizer uses a tensor of its state, where the role alone does not say it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Use {
    /// As the role says.
    #[default]
    ByRole,
    /// Of both: the update is the first divided by the second itself, not by its root (Adamax).
    Norm,
    /// Of both: the update divides by the root of the second less the square of the first (centered RMSprop).
    Centered,
    /// Of a momentum: its direction is the update, at any size (Lion).
    Direction,
    /// Of a momentum: the update asks for its sign and for nothing else (Rprop).
    Sign,
    /// Of a copy of a parameter: another iterate of it, element by element (schedule-free, ASGD).
    Iterate,
    /// Of a mean of squares: they are squares of updates, and their root multiplies the next one (Adadelta).
    Updates,
}

/// One tensor payload: a run of bytes in the file that holds elements of one type.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Path inside the checkpoint, keys joined with `/` (`model/h.0.attn.weight`): stable between saves, unlike
    /// offsets.
    pub path: String,
    /// Other paths that reach the same bytes (tied weights, views).
    pub aliases: Vec<String>,
    /// Element type.
    pub dtype: Dtype,
    /// Shape; its product times the element size is the length of `extent`.
    pub shape: Vec<u64>,
    /// Role in training.
    pub role: Role,
    /// Why it has that role, in words for `stepfs inspect`.
    pub why: &'static str,
    /// Index in the description of the parameter that this is state or an average of. The parameter is in the file,
    /// has the same shape, and is the only candidate.
    pub of: Option<usize>,
    /// Index of the parameter's other moment, of the same shape and type: of a first moment the second, of a second
    /// moment the first.
    pub partner: Option<usize>,
    /// How its optimizer uses it, where the role does not say it.
    pub used: Use,
    /// Its place shows that it is no weight, so it is never quantized.
    pub lossless: bool,
    /// The proof that a weight or an average is a trained parameter. Without it, a place in the file is no reason to
    /// quantize.
    pub trained: Option<&'static str>,
    /// Bytes of the file. Extents of a description are disjoint and ascending.
    pub extent: Range<u64>,
}

impl Tensor {
    /// A tensor as a container's reader finds it. Its partners are found once all tensors are known.
    pub fn found(
        path: String,
        (dtype, shape): (Dtype, Vec<u64>),
        (role, why): (Role, &'static str),
        extent: Range<u64>,
    ) -> Tensor {
        Tensor {
            path,
            aliases: Vec::new(),
            dtype,
            shape,
            role,
            why,
            of: None,
            partner: None,
            used: Use::ByRole,
            lossless: false,
            trained: None,
            extent,
        }
    }

    /// Length of its bytes.
    pub fn bytes(&self) -> u64 {
        self.extent.end - self.extent.start
    }

    /// Number of elements in its bytes.
    pub fn elements(&self) -> u64 {
        self.bytes() / self.dtype.size() as u64
    }

    /// Takes the tensor for a part of one of shape `whole`. Two states then prove nothing where the part hides the
    /// structure of the whole.
    pub(crate) fn is_part_of(&mut self, whole: &[u64]) {
        self.lossless |= self.hides(whole) && self.is_weight() && self.trained.is_none();
    }

    /// Whether a part of a tensor of shape `whole` hides the structure of the whole: a square may be symmetric, and a
    /// row that is cut has another length.
    fn hides(&self, whole: &[u64]) -> bool {
        let is_square = matches!(whole, [.., rows, columns] if rows == columns);
        self.shape != whole && (is_square || self.shape.last() != whole.last())
    }

    /// A parameter of a model, or an average of one that stands where models do.
    pub fn is_weight(&self) -> bool {
        self.role.group() == Role::Weight && !self.lossless
    }
}

/// Describes a file by its content. An unknown file, a damaged one and one beyond the limits is `Kind::Opaque` with a
/// note, never an error. Nothing is executed.
///
/// Time: O(size of the zip directory, pickle or header); payloads are not read. Memory: some 100 bytes per tensor and
/// pickle value, and 20 per embedding row. Hostile inputs reach at most about .7 GB. Each structure has a limit,
/// beyond which the file is opaque:
///
/// - zip directory: 64 MiB
/// - pickle graph: 256 MiB
/// - safetensors header: 100 MB
/// - ids of embedding rows: 2^25, .7 GB
/// - metadata of HDF5: 64 MiB
///
/// # Errors
/// Only those of `src`; `UnexpectedEof` means that the file became shorter meanwhile.
pub fn describe(src: &dyn ReadAt) -> io::Result<Description> {
    finished(read(src))
}

/// The description of a file, whatever its reader says of it.
fn finished(read: Result<Description, read::Fail>) -> io::Result<Description> {
    match read {
        Ok(description) => Ok(description),
        Err(read::Fail::Io(e)) => Err(e),
        Err(read::Fail::Bad(why)) => Ok(Description::opaque(why)),
        Err(read::Fail::CutShort(why)) => Ok(Description::of_cut_short(why)),
    }
}

/// Describes the file at `path`, by the files beside it that say what its tensors are, if it has such. `open` opens
/// them.
///
/// # Errors
/// Those of `src`, and of the index of a bundle.
pub fn describe_at<T: ReadAt>(
    path: &Path,
    src: &dyn ReadAt,
    open: impl Fn(&Path) -> io::Result<T>,
) -> io::Result<Description> {
    let Some(shard) = bundle::Shard::of(path) else { return describe(src) };
    match open(&shard.index) {
        Ok(index) => finished(bundle::describe(src, &index, &shard)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Ok(Description::opaque("TensorFlow: the .index of its bundle is not there"))
        }
        Err(error) => Err(error),
    }
}

/// Why a file counts as cut short: it ends before its format says, so its writer may have died. `None` if nothing shows
/// that. `description` is the file's own. JSON is known by the file's name.
///
/// # Errors
/// Those of `src`.
pub fn cut_short(path: &Path, src: &dyn ReadAt, description: &Description) -> io::Result<Option<String>> {
    // Its index says when it is finished.
    if siblings(path).is_some_and(|siblings| siblings.files.is_none()) {
        return Ok(None);
    }
    if description.kind == Kind::Opaque && json::is_json(path) && json::is_cut_short(src)? {
        return Ok(Some("JSON: cut short; a list or an object in it has no end".into()));
    }
    Ok(description.note.clone().filter(|_| description.cut_short))
}

fn read(src: &dyn ReadAt) -> Result<Description, read::Fail> {
    let size = src.size();
    if zip::Zip::is_zip(src, size)? {
        return match <[zip::Zip; 1]>::try_from(zip::Zip::read_chain(src, size)?) {
            Err(several) => dcp::describe(src, several),
            Ok([zip]) if torch::is_torch(&zip) => torch::describe(src, zip),
            Ok([zip]) if hdf5::is_keras(&zip) => hdf5::describe_keras(src, zip),
            Ok([zip]) if npy::is_npz(&zip) => npy::describe_zip(src, zip),
            Ok([zip]) if nested::is_nested(src, &zip)? => nested::describe(src, zip),
            Ok([zip]) => read::bad(zip.foreign()),
        };
    }
    let readers = [
        safetensors::describe,
        hdf5::describe,
        elasticdl::describe,
        npy::describe,
        legacy::describe,
        pickled::describe,
        flax::describe,
    ];
    for describe in readers {
        if let Some(description) = describe(src, size)? {
            return Ok(description);
        }
    }
    read::bad(magic::words(src, size)?)
}
