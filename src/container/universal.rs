//! DeepSpeed's Universal checkpoint: each parameter has a directory with `fp32.pt`, `exp_avg.pt` and `exp_avg_sq.pt`.
//! Each of them is a torch zip with one tensor, `param`.
//!
//! A file alone says nothing of its tensor. All three together do, if their tensors have one shape and type, and if the
//! directory has a parameter's name: DeepSpeed's converter writes the three of buffers, too. Only `fp32.pt` loses
//! anything. An object never needs another file, so no moment can be quantized beside its partner, and both stay exact.

use std::io;
use std::path::Path;

use super::kinds::is_real;
use super::proof::BY_NAME;
use super::role::{self, Context};
use super::{Description, Kind, ReadAt, Role, Tensor, describe};

/// The files of one parameter, and the role of the tensor in each.
const PARTS: [(&str, Role, &str); 3] = [
    ("fp32.pt", Role::Weight, "fp32.pt beside the moments of one parameter (DeepSpeed Universal)"),
    ("exp_avg.pt", Role::Optimizer, "exp_avg.pt of DeepSpeed Universal: its partner is in another file"),
    ("exp_avg_sq.pt", Role::Optimizer, "exp_avg_sq.pt of DeepSpeed Universal: its partner is in another file"),
];

fn part(path: &Path) -> Option<usize> {
    let name = path.file_name()?;
    PARTS.iter().position(|(part, ..)| name == *part)
}

/// Whether a file has the name of one of these files.
pub(super) fn is_part(path: &Path) -> bool {
    part(path).is_some()
}

/// Gives the tensor of such a file its role, if the other two files bear it out. One that cannot be read does not.
pub(super) fn relate<T: ReadAt>(path: &Path, description: &mut Description, open: impl Fn(&Path) -> io::Result<T>) {
    let Some(own) = part(path) else { return };
    let Some(tensor) = only_tensor(description) else { return };
    let parameter = path.parent().and_then(Path::file_name).and_then(|name| name.to_str()).unwrap_or_default();
    if role::tensor(Context::Open, true, parameter, tensor.dtype).0 != Role::Weight {
        return;
    }
    let bears_out = |name: &str| {
        let other = open(&path.with_file_name(name)).and_then(|file| describe(&file));
        let is_like = |other: &Tensor| other.shape == tensor.shape && other.dtype == tensor.dtype;
        other.is_ok_and(|other| only_tensor(&other).is_some_and(is_like))
    };
    if PARTS.iter().enumerate().all(|(at, (name, ..))| at == own || bears_out(name)) {
        let (_, role, why) = PARTS[own];
        let tensor = &mut description.tensors[0];
        (tensor.role, tensor.why) = (role, why);
        tensor.trained = (role == Role::Weight).then_some(BY_NAME);
    }
}

/// The tensor of a file that has no other.
fn only_tensor(description: &Description) -> Option<&Tensor> {
    match &description.tensors[..] {
        [tensor] if description.kind == Kind::TorchZip && tensor.path == "param" && is_real(tensor.dtype) => {
            Some(tensor)
        }
        _ => None,
    }
}
