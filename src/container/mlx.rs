//! The state of MLX's optimizers, as `tree_flatten(optimizer.state)` names it: `layers.0.weight.m` and
//! `layers.0.weight.v` beside `step` and `learning_rate`.
//!
//! A file is such a state only if it holds nothing else, and both moments of each parameter. MLX's Adam and Adamax have
//! these two: `encode/plan/adam.rs` tells them apart. Its RMSprop, Adagrad, SGD and Muon have `v` alone, for three
//! different things, and Lion `m`; these stay exact.

use std::rc::Rc;

use super::kinds::OPEN_MOMENTS;
use super::slots::{Optimizers, Parameter, Standing};
use super::{Role, Tensor};

/// The only mapping of such a file has the number 0.
const OWNER: u32 = 1;

/// What the state has once.
const ONCE: [&str; 2] = ["step", "learning_rate"];

/// Makes slots of the tensors of such a file. The tensors have distinct paths.
pub(super) fn state(tensors: &mut [Tensor], standings: &mut [Option<Standing>], optimizers: &mut Optimizers) {
    let is_once = |t: &&Tensor| t.shape.is_empty() && ONCE.contains(&t.path.as_str());
    let slot = |t: &Tensor| {
        let (name, moment) = t.path.rsplit_once('.')?;
        let at = ["m", "v"].iter().position(|known| *known == moment)?;
        Some((at, name.to_string()))
    };
    let slots: Vec<_> = tensors.iter().map(slot).collect();
    let names = |at: usize| {
        let mut names: Vec<&str> = slots.iter().flatten().filter(|s| s.0 == at).map(|s| s.1.as_str()).collect();
        names.sort_unstable();
        names
    };
    let parameters = names(0);
    let is_whole = tensors.iter().filter(is_once).count() == ONCE.len()
        && 2 * parameters.len() + ONCE.len() == tensors.len()
        && parameters == names(1);
    if !is_whole || parameters.is_empty() {
        return;
    }
    optimizers.groups.insert(OWNER, Rc::new(vec![parameters.len() as u64]));
    for ((tensor, standing), slot) in tensors.iter_mut().zip(standings).zip(&slots) {
        (tensor.role, tensor.why) = (Role::Optimizer, "in a state of MLX");
        if let Some((at, name)) = slot {
            let (parameter, slot) = (Parameter::Name(name.clone()), OPEN_MOMENTS[*at].to_string());
            *standing = Some(Standing::Slot { owner: OWNER, parameter, slot });
        }
    }
}
