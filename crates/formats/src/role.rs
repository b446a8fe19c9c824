//! What a tensor is to training, judged by where it stands and what it is called.
//!
//! Structure decides first: what lies below a mapping with `state` and `param_groups` is an optimizer's; a mapping
//! with string keys in which nearly all values are tensors is a state dict. Names only take roles away: an unknown
//! name never makes a tensor a weight, and state that is not known to be a parameter must never be called one, since
//! weights may be quantized. A wrong `Other` costs space, a wrong `Weight` costs correctness.

use super::Role;
use codec::Dtype;

/// What is known from the containers above a tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Context {
    /// Nothing speaks against parameters.
    Open,
    /// Everything below has this role, for this reason.
    Closed(Role, &'static str),
}

/// A mapping that is an optimizer's `state_dict()`.
pub(super) const OPTIMIZER_STATE: Context =
    Context::Closed(Role::Optimizer, "below a mapping with `state` and `param_groups`");

/// A mapping that has, by its name, one parameter's optimizer state in it.
pub(super) const BESIDE_SLOT: Context = Context::Closed(Role::Optimizer, BESIDE);

/// Below one of two keys that name the moments of Adam.
pub(super) const MOMENT: Context = Context::Closed(Role::Optimizer, BY_MOMENT);

/// A mapping with the same keys as a sibling that is named like a model, without being named so itself.
pub(super) const PAIRED: Context =
    Context::Closed(Role::Other, "same keys as the model's mapping beside it: may be state of an optimizer");

/// Reasons that are names alone.
const BESIDE: &str = "beside a tensor named like optimizer state";
const BY_MOMENT: &str = "below one of two keys that name Adam's moments";
const BY_KEY: &str = "below a key that names optimizer state";
const BY_NAME: &str = "named like optimizer state";

/// Of a tensor that may be a weight, but whose mapping is none of tensors alone.
pub(super) const NOT_LISTED: &str = "not in a state dict";

/// Whether the reason for an optimizer's role is a name that is not an optimizer's own.
pub(super) fn by_name_only(why: &str) -> bool {
    [BESIDE, BY_MOMENT, BY_KEY, BY_NAME].contains(&why)
}

/// Parts of names that only optimizers use for their per-parameter state.
const SLOT_PARTS: [&str; 7] =
    ["exp_avg", "momentum_buffer", "square_avg", "grad_avg", "acc_delta", "exp_inf", "second_moment"];

/// Whole keys that optimizers use for per-parameter state (torch.optim, Adafactor, LBFGS, Shampoo, 8-bit Adam) and
/// models hardly.
const SLOTS: [&str; 34] = [
    "sum", "step", "step_size", "prev", "ax", "mu", "eta", "row_var", "col_var", "row_variance", "col_variance",
    "variance", "momentum", "velocity", "first_moment", "fp32_from_fp16_params", "single_partition_of_fp32_groups",
    "h_diag", "old_dirs", "old_stps", "prev_flat_grad", "prev_loss", "preconditioner", "inv_preconditioner", "precond",
    "state1", "state2", "qmap1", "qmap2", "absmax1", "absmax2", "max_v", "delta", "rms",
];

/// Keys of the two moments in hand-written Adams. Each alone may mean anything (`m` for a model), both do not.
const MOMENTS: [[&str; 2]; 2] = [["m", "v"], ["mu", "nu"]];

/// Words in the name of a container below which nothing is a parameter.
const NOT_MODELS: [&str; 37] = [
    "scaler", "rng", "random", "seed", "lr", "sampler", "dataloader", "loader", "callback", "callbacks", "loop",
    "loops", "grad", "grads", "gradient", "gradients", "metric", "metrics", "history", "replay", "buffer", "buffers",
    "dataset", "data", "cache", "loss", "losses", "queue", "stats", "statistics", "residual", "residuals", "batch",
    "rollout", "trajectory", "activations", "results",
];

/// Words in the name of a container that say that it is a model.
const MODELS: [&str; 14] = [
    "model", "models", "module", "net", "network", "params", "param", "parameters", "weights", "ema", "teacher",
    "student", "target", "policy",
];

/// Keys of buffers, by their last part: statistics and tables that are no parameters.
const BUFFERS: [&str; 27] = [
    "num_batches_tracked", "inv_freq", "position_ids", "freqs_cis", "amax_history", "cluster_size", "embed_avg",
    "scale_inv", "scales", "zeros", "qzeros", "zero_point", "zero_points", "absmax", "quant_map", "quant_state",
    "nested_absmax", "obs", "observations", "actions", "rewards", "returns", "advantages", "log_probs", "labels",
    "targets", "inputs",
];

/// Words of a name, in lower case.
fn words(name: &str) -> impl Iterator<Item = String> {
    name.split(|c: char| !c.is_alphanumeric()).filter(|w| !w.is_empty()).map(str::to_lowercase)
}

fn is_optimizer_word(word: &str) -> bool {
    word.starts_with("optim") || word == "opt" || word == "opts"
}

fn has_slot_part(name: &str) -> bool {
    SLOT_PARTS.iter().any(|part| name.contains(part))
}

/// The context below a container called `name`.
pub(super) fn below(context: Context, name: &str) -> Context {
    if context != Context::Open {
        return context;
    }
    let lower = name.to_lowercase();
    if words(name).any(|w| is_optimizer_word(&w)) {
        return Context::Closed(Role::Optimizer, "below a key that names an optimizer");
    }
    let slot = |list: &[&str]| list.contains(&lower.as_str());
    if has_slot_part(&lower) || slot(&SLOTS) {
        return Context::Closed(Role::Optimizer, BY_KEY);
    }
    if lower == "_buffers" {
        return Context::Closed(Role::Other, "a buffer of a module, not a parameter");
    }
    if words(name).any(|w| w.starts_with("sched") || NOT_MODELS.contains(&w.as_str())) {
        return Context::Closed(Role::Other, "below a key that names something else than a model");
    }
    Context::Open
}

/// Whether the key is that of one parameter's optimizer state, and not the name of a parameter with such a part.
pub(super) fn is_slot(key: &str) -> bool {
    has_slot_part(key) && !key.contains(['.', '/', ':'])
}

/// Which of the moments' keys, if the mapping has both.
pub(super) fn moments(has: impl Fn(&str) -> bool) -> Option<[&'static str; 2]> {
    MOMENTS.into_iter().find(|pair| pair.iter().all(|k| has(k)))
}

/// The key of the second moment beside that of the first.
pub(super) fn second_moment(first: &str) -> Option<&'static str> {
    MOMENTS.into_iter().find_map(|[m, v]| (m == first).then_some(v))
}

/// Whether a container's name says that it is a model.
pub(super) fn names_model(name: &str) -> bool {
    words(name).any(|w| w.starts_with("net") || MODELS.contains(&w.as_str()))
}

/// The role of a tensor under `key`. `listed`: its mapping is a state dict, or it is an `nn.Parameter`.
pub(super) fn tensor(context: Context, listed: bool, key: &str, dtype: Dtype) -> (Role, &'static str) {
    if let Context::Closed(role, why) = context {
        return (role, why);
    }
    let lower = key.to_lowercase();
    let mut parts = lower.split(['.', '/', ':']);
    let is_optimizer = |part: &str| is_optimizer_word(part) || part.starts_with("opt_");
    if parts.clone().next().is_some_and(is_optimizer) {
        return (Role::Optimizer, "its name begins with an optimizer");
    }
    let last = parts.next_back().unwrap_or("");
    if has_slot_part(&lower) || SLOTS.contains(&last) {
        return (Role::Optimizer, BY_NAME);
    }
    if !is_float(dtype) {
        return (Role::Other, "not a floating-point type");
    }
    if !listed {
        return (Role::Other, NOT_LISTED);
    }
    if BUFFERS.contains(&last)
        || last.starts_with("running_")
        || last.starts_with("moving_")
        || last.ends_with("_scale")
    {
        return (Role::Other, "named like a buffer, not a parameter");
    }
    (Role::Weight, "floating point, in a state dict")
}

/// Whether a tensor stands in a module and is called as layers call their parameters: `weight`, `kernel`,
/// `weight_ih_l0`, `lora_A.default`, `gate_up_proj`. A name proves nothing by itself.
pub fn is_of_layer(path: &str) -> bool {
    // `weight_mask`, `weight_mean` and the like are about a weight.
    const ABOUT: [&str; 19] = [
        "mask", "scale", "scales", "inv", "zero", "absmax", "quant", "norm", "u", "mean", "sq", "var", "std", "avg",
        "ema", "cov", "sum", "grad", "count",
    ];
    // A chunk's path ends with its place in the tensor.
    let path = path.strip_suffix(']').and_then(|path| path.rsplit_once('[')).map_or(path, |(path, _)| path);
    let Some(at) = path.rfind(['.', '/']) else { return false };
    let (module, name) = (&path[..at], &path[at + 1..]);
    let of_adapter = |part: &str| part.starts_with("lora_");
    // peft: `lora_A.default.weight`, `lora_embedding_A.default`.
    if of_adapter(name) || module.rsplit(['.', '/']).next().is_some_and(of_adapter) {
        return true;
    }
    let about = || name.split('_').any(|word| ABOUT.contains(&word));
    match name {
        "weight" | "bias" | "kernel" | "embedding" | "original0" | "original1" | "weight_orig" | "weight_g"
        | "weight_v" => true,
        _ if ["weight_ih", "weight_hh", "weight_hr", "bias_ih", "bias_hh"].iter().any(|own| name.starts_with(own)) => {
            true
        }
        _ => (name.ends_with("_weight") || name.ends_with("_proj")) && !about(),
    }
}

fn is_float(dtype: Dtype) -> bool {
    use Dtype::*;
    matches!(dtype, F16 | Bf16 | F32 | F64 | F8E4m3 | F8E5m2 | C64 | C128)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn role_of(containers: &[&str], key: &str, dtype: Dtype) -> Role {
        let context = containers.iter().fold(Context::Open, |c, k| below(c, k));
        tensor(context, true, key, dtype).0
    }

    #[test]
    fn names_take_roles_away_and_never_give_them() {
        use Role::*;
        for (containers, key, role) in [
            (&["model"][..], "h.0.attn.c_attn.weight", Weight),
            (&["state_dict"], "model.embed_tokens.weight", Weight),
            (&["module", "language_model", "encoder"], "layers.0.norm.bias", Weight),
            (&["ema"], "w", Weight),
            (&["model"], "bn.running_var", Other),
            (&["model"], "rotary.inv_freq", Other),
            (&["model"], "fc.weight_scale", Other),
            (&["optimizer_states", ""], "w", Optimizer),
            (&["optG_optimizer"], "w", Optimizer),
            (&["optimizer", "rng"], "w", Optimizer),
            (&["lr_scheduler"], "w", Other),
            (&["rng_state"], "w", Other),
            (&["replay_buffer"], "obs", Other),
            (&["m"], "layer.weight", Weight),
            (&["exp_avg"], "layer.weight", Optimizer),
            (&[], "exp_avg.layer.weight", Optimizer),
            (&[], "layer.weight.momentum_buffer", Optimizer),
            (&[], "optimizer.state.0.x", Optimizer),
            (&[], "opt_state/0/trace/dense/kernel", Optimizer),
            (&[], "mu", Optimizer),
        ] {
            assert_eq!(role_of(containers, key, Dtype::F32), role, "{containers:?} {key}");
        }
        assert_eq!(role_of(&["model"], "ids", Dtype::I64), Other);
        assert_eq!(tensor(Context::Open, false, "w", Dtype::F32).0, Other);
    }

    #[test]
    fn layers_call_their_parameters_so() {
        for name in [
            "h.0.attn.weight", "dense/kernel", "q.lora_A.default.weight", "mlp.gate_up_proj", "rnn.weight_ih_l0",
            "rnn.bias_hh_l0",
        ] {
            assert!(is_of_layer(name), "{name}");
        }
        for name in
            ["obs", "norm._mean", "fc.weight_mask", "running_var", "queue", "embed_avg", "fc.weight_scale_inv", "probs"]
        {
            assert!(!is_of_layer(name), "{name}");
        }
    }
}
