//! What kind of state each tensor is that an optimizer keeps of one parameter, by the whole set of them.
//!
//! An optimizer is known by its slots, and by what it keeps beside tensors. One slot more, and it is another optimizer,
//! which may mean something else by the same names. So each set here is exactly an optimizer's own.

use super::{Role, Tensor, Use};
use crate::codec::Dtype;

/// Names of state that say what it is.
const CLAIMS: [&str; 11] =
    ["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "sum", "ax", "m", "v", "mu", "nu"];

/// State with an entry for each element of the parameter.
pub(super) const FULL: [&str; 27] = [
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
    "momentum_buffer",
    "square_avg",
    "grad_avg",
    "sqr_avg",
    "acc_delta",
    "exp_inf",
    "master_param",
    "fp32_param",
    "sum",
    "ax",
    "z",
    "prev",
    "step_size",
    "variance",
    "m",
    "v",
    "mu",
    "nu",
    "moment1",
    "moment2",
    "state1",
    "state2",
    BNB1,
    BNB2,
];

/// The parameter in full precision, as Transformer Engine and apex call it, and Megatron.
const COPIES: [&str; 2] = ["master_param", "fp32_param"];

/// bitsandbytes keeps all tensors of a parameter in a mapping of this name, so that nobody casts them.
const BNB: &str = "__bnb_optimizer_quant_state__";
const BNB1: &str = "__bnb_optimizer_quant_state__/state1";
const BNB2: &str = "__bnb_optimizer_quant_state__/state2";

/// What optimizers like Adam keep beside the two moments without meaning anything else by them: the step, NAdam's product of
/// momenta, GaLore's projection of the gradient (both moments are of the projected one, element by element).
const BESIDE_MOMENTS: [&str; 3] = ["step", "mu_product", "projector"];

/// One parameter's state: slots with the indices of their tensors.
pub(super) type Slots<'a> = Vec<(&'a str, usize)>;

/// What a tensor turns out to be.
pub(super) struct Verdict {
    pub(super) tensor: usize,
    pub(super) role: Role,
    pub(super) used: Use,
    pub(super) why: &'static str,
    pub(super) partner: Option<usize>,
}

/// All that an optimizer keeps of one parameter.
pub(super) struct State<'a> {
    pub(super) tensors: &'a [Tensor],
    pub(super) slots: &'a Slots<'a>,
    /// Names of what it keeps beside tensors: numbers, lists, objects.
    pub(super) foreign: &'a [String],
    /// It is below `state` of an optimizer's `state_dict()`.
    pub(super) known: bool,
    /// There is a parameter of its name or number, and its shape, in the file.
    pub(super) matched: bool,
}

/// Whether a type has a sign, an exponent and a fraction that lossy codecs know.
pub(super) fn is_real(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F16 | Dtype::Bf16 | Dtype::F32 | Dtype::F64)
}

/// Everything with a name that says what it is becomes `Other`.
pub(super) fn doubt(slots: &Slots, why: &'static str) -> Vec<Verdict> {
    let claims = slots.iter().filter(|(slot, _)| CLAIMS.contains(slot));
    claims.map(|&(_, tensor)| is(tensor, Role::Other, why)).collect()
}

fn is(tensor: usize, role: Role, why: &'static str) -> Verdict {
    Verdict { tensor, role, used: Use::ByRole, why, partner: None }
}

/// A first moment and what it is divided by.
fn pair(m: usize, v: usize, used: Use, why: [&'static str; 2]) -> Vec<Verdict> {
    let first = Verdict { partner: Some(v), used, ..is(m, Role::FirstMoment, why[0]) };
    let second = Verdict { partner: Some(m), used, ..is(v, Role::SecondMoment, why[1]) };
    vec![first, second]
}

/// What one parameter's state is. What is not in the answer stays what it is.
pub(super) fn kinds(state: &State) -> Vec<Verdict> {
    // Two moments bear each other out. Everything else has to stand where optimizers do, or to fit a weight.
    if let Some(found) = state.soap().or_else(|| state.moments()) {
        return found;
    }
    if !state.known && !state.matched {
        return doubt(state.slots, "named like optimizer state, but nothing beside it bears that out");
    }
    let families = [
        State::squares,
        State::adamax,
        State::adafactor,
        State::momentum,
        State::signs,
        State::sums,
        State::averages,
        State::schedule_free,
    ];
    families.iter().find_map(|family| family(state)).unwrap_or_else(|| {
        doubt(state.slots, "named like optimizer state, but its parameter's state is not that of a known optimizer")
    })
}

impl State<'_> {
    fn get(&self, name: &str) -> Option<usize> {
        self.slots.iter().find(|(slot, _)| *slot == name).map(|&(_, i)| i)
    }

    /// The same, of a type that lossy codecs know.
    fn real(&self, name: &str) -> Option<usize> {
        self.get(name).filter(|&i| is_real(self.tensors[i].dtype))
    }

    /// Whether there is nothing but these and the step, and each once: a pickle may repeat keys, and then nobody knows which
    /// one counts.
    fn only(&self, names: &[&str]) -> bool {
        let mut seen: Vec<&str> = self.slots.iter().map(|&(slot, _)| slot).collect();
        seen.extend(self.foreign.iter().map(String::as_str));
        seen.sort_unstable();
        seen.iter().all(|slot| *slot == "step" || names.contains(slot)) && seen.windows(2).all(|w| w[0] != w[1])
    }

    /// Whether two are of one shape, and of one type that lossy codecs know.
    fn same(&self, a: usize, b: usize) -> bool {
        let (a, b) = (&self.tensors[a], &self.tensors[b]);
        a.shape == b.shape && a.dtype == b.dtype && is_real(a.dtype)
    }

    /// Adam's two moments, by all names that they have.
    fn moments(&self) -> Option<Vec<Verdict>> {
        if let Some((m, v)) = self.get("exp_avg").zip(self.get("exp_avg_sq")) {
            return Some(self.adam(m, v));
        }
        if let Some((m, v)) = self.get("grad_avg").zip(self.get("sqr_avg"))
            && self.known
            && self.only(&["grad_avg", "sqr_avg", "do_wd", "force_train"])
            && self.same(m, v)
        {
            // Each optimizer of fastai with both divides the one by the root of the other.
            let why = "grad_avg beside sqr_avg, and nothing but the step (fastai)";
            return Some(pair(m, v, Use::ByRole, [why, why]));
        }
        for [first, second, around] in [["moment1", "moment2", ""], ["state1", "state2", ""], [BNB1, BNB2, BNB]] {
            if let Some((m, v)) = self.get(first).zip(self.get(second))
                && self.known
                && self.only(&[first, second, around, "beta1_pow_acc", "beta2_pow_acc"])
                && self.same(m, v)
            {
                // Moonlight's Muon, for what is no matrix; bitsandbytes with 32 bits, and its small tensors with 8;
                // Keras, by number; Paddle, beside powers of its betas.
                let why = "one of two moments, beside nothing but the step (Adam of Moonlight, bitsandbytes, Keras or Paddle)";
                return Some(pair(m, v, Use::ByRole, [why, why]));
            }
        }
        let (m, v) = self.get("m").zip(self.get("v")).or(self.get("mu").zip(self.get("nu")))?;
        if self.known {
            return None;
        }
        if self.matched && self.only(&["m", "v", "mu", "nu"]) && self.slots.len() == 2 && self.same(m, v) {
            let why =
                ["m beside v, both of a weight's name and shape", "v beside m, both of a weight's name and shape"];
            return Some(pair(m, v, Use::ByRole, why));
        }
        Some(doubt(self.slots, "named like a moment, but not of a weight's name and shape"))
    }

    /// SOAP: Adam in a basis of its own. The squares are of gradients in that basis and divide there, element by
    /// element, so octaves bound what becomes of an update. The first moment is in the parameter's own basis: an error
    /// in it is spread over directions whose divisors differ by orders of magnitude.
    fn soap(&self) -> Option<Vec<Verdict>> {
        let bases = ["GG", "Q"];
        let has_bases = bases.iter().all(|name| self.foreign.iter().any(|foreign| foreign == name));
        let (m, v) = self.get("exp_avg").zip(self.get("exp_avg_sq")).filter(|_| has_bases && self.known)?;
        let names = ["exp_avg", "exp_avg_sq", "GG", "Q", "precondition_frequency", "shampoo_beta"];
        (self.only(&names) && self.same(m, v)).then_some(())?;
        let first = is(m, Role::Optimizer, "exp_avg of SOAP: in another basis than exp_avg_sq");
        Some(vec![first, is(v, Role::SecondMoment, "exp_avg_sq of SOAP: mean of squares in a rotated basis")])
    }

    fn adam(&self, m: usize, v: usize) -> Vec<Verdict> {
        if self.get("RMS").is_some() && self.known && self.only(&["exp_avg", "exp_avg_sq", "RMS"]) && self.same(m, v) {
            // It divides gradients by the root before it averages them, so the average is in units of the weights.
            let why = "exp_avg of Adafactor: an average of updates";
            let square = is(v, Role::SecondMoment, "exp_avg_sq of Adafactor, of a vector: nothing is factored");
            return vec![is(m, Role::Momentum, why), square];
        }
        // Transformer Engine, apex and Megatron keep the parameter's own copy among its state.
        let mut names = vec!["exp_avg", "exp_avg_sq", "max_exp_avg_sq"];
        names.extend(COPIES);
        names.extend(BESIDE_MOMENTS);
        let projected = |slot: &str| slot.starts_with("projector/");
        names.extend(self.slots.iter().map(|(slot, _)| *slot).filter(|slot| projected(slot)));
        if !self.only(&names) {
            return doubt(self.slots, "named like Adam's moments, beside state that Adam does not have");
        }
        if !self.same(m, v) {
            return doubt(self.slots, "named like Adam's moments, but they differ in shape or type");
        }
        let mut found = self.both_moments(m, v);
        let shape = &self.tensors[m].shape;
        let mut copies = COPIES.iter().filter_map(|name| self.real(name));
        if let Some(master) = copies.find(|&i| self.tensors[i].shape == *shape) {
            found.push(is(master, Role::Master, "beside Adam's moments: the parameter in full precision"));
        }
        found
    }

    /// What Adam's moments are to each other.
    fn both_moments(&self, m: usize, v: usize) -> Vec<Verdict> {
        let why =
            ["exp_avg beside exp_avg_sq of the same parameter", "exp_avg_sq beside exp_avg of the same parameter"];
        let Some(max) = self.get("max_exp_avg_sq") else {
            return pair(m, v, Use::ByRole, why);
        };
        if !self.same(max, m) {
            let mut found = pair(m, v, Use::ByRole, why);
            found.push(is(max, Role::Other, "named max_exp_avg_sq, but not of the moments' shape"));
            return found;
        }
        // AMSGrad divides by the root of the largest, so that one is what the first moment belongs to.
        let largest = "max_exp_avg_sq: the largest second moment so far (AMSGrad)";
        let mut found = pair(m, max, Use::ByRole, [why[0], largest]);
        found.push(Verdict { partner: Some(m), ..is(v, Role::SecondMoment, why[1]) });
        found
    }

    fn adamax(&self) -> Option<Vec<Verdict>> {
        let (m, norm) = self.get("exp_avg").zip(self.get("exp_inf")).filter(|_| self.only(&["exp_avg", "exp_inf"]))?;
        let why = ["exp_avg beside exp_inf (Adamax): divided by it", "exp_inf: the largest gradient so far (Adamax)"];
        self.same(m, norm).then(|| pair(m, norm, Use::Norm, why))
    }

    /// RMSprop and Adadelta.
    fn squares(&self) -> Option<Vec<Verdict>> {
        let square = self.real("square_avg")?;
        self.only(&["square_avg", "momentum_buffer", "grad_avg", "acc_delta"]).then_some(())?;
        let mut found = match self.get("grad_avg") {
            Some(mean) if self.same(mean, square) && self.get("acc_delta").is_none() => {
                let why = "centered RMSprop: the difference of square_avg and grad_avg squared must stay positive";
                pair(mean, square, Use::Centered, [why, why])
            }
            Some(_) => return None,
            None => {
                vec![is(square, Role::SecondMoment, "square_avg: mean of squared gradients (RMSprop, Adadelta)")]
            }
        };
        if let Some(delta) = self.get("acc_delta") {
            let why = "acc_delta: mean of squared updates (Adadelta)";
            found.push(match self.same(delta, square) {
                true => Verdict { used: Use::Updates, ..is(delta, Role::SecondMoment, why) },
                false => is(delta, Role::Other, "named acc_delta, but not of its parameter's shape"),
            });
        }
        if let Some(buffer) = self.get("momentum_buffer") {
            found.push(match self.same(buffer, square) {
                true => is(buffer, Role::Momentum, "momentum_buffer of RMSprop"),
                false => is(buffer, Role::Other, "named momentum_buffer, but not of its parameter's shape"),
            });
        }
        Some(found)
    }

    /// Adafactor as transformers has it, with `beta1` and without; the pair of a vector is [`State::adam`]'s to tell.
    fn adafactor(&self) -> Option<Vec<Verdict>> {
        self.get("RMS").filter(|_| self.known)?;
        if let Some(square) = self.real("exp_avg_sq").filter(|_| self.only(&["exp_avg_sq", "RMS"])) {
            return Some(vec![is(
                square,
                Role::SecondMoment,
                "exp_avg_sq of Adafactor, of a vector: nothing is factored",
            )]);
        }
        let factors = ["exp_avg_sq_row", "exp_avg_sq_col"];
        let mean = self.real("exp_avg").filter(|_| factors.iter().all(|name| self.get(name).is_some()))?;
        let projected = self.slots.iter().map(|(slot, _)| *slot).filter(|slot| slot.starts_with("projector/"));
        let names: Vec<&str> = ["exp_avg", "RMS", "projector"].into_iter().chain(factors).chain(projected).collect();
        self.only(&names).then(|| vec![is(mean, Role::Momentum, "exp_avg of Adafactor: an average of updates")])
    }

    fn momentum(&self) -> Option<Vec<Verdict>> {
        let buffer = self.real("momentum_buffer").filter(|_| self.only(&["momentum_buffer"]))?;
        Some(vec![is(buffer, Role::Momentum, "momentum_buffer, alone but for the step (SGD, Muon)")])
    }

    /// Optimizers that ask for a sign.
    fn signs(&self) -> Option<Vec<Verdict>> {
        // With another name as well it is more than that.
        let alone = |&i: &usize| self.known && self.tensors[i].aliases.is_empty() && self.only(&["exp_avg"]);
        if let Some(mean) = self.real("exp_avg").filter(alone) {
            let why = "exp_avg, alone but for the step: its direction is the update (Lion, Tiger)";
            return Some(vec![Verdict { used: Use::Direction, ..is(mean, Role::Momentum, why) }]);
        }
        let (prev, size) = self.real("prev").zip(self.real("step_size"))?;
        let is_rprop = self.known && self.only(&["prev", "step_size"]) && self.same(prev, size);
        // What `step_size` holds is exact.
        let why = "prev: the last gradient, whose sign is asked for (Rprop)";
        is_rprop.then(|| vec![Verdict { used: Use::Sign, ..is(prev, Role::Momentum, why) }])
    }

    fn sums(&self) -> Option<Vec<Verdict>> {
        let sum = self.real("sum").filter(|_| self.only(&["sum"]))?;
        Some(vec![is(sum, Role::SquareSum, "sum, alone but for the step: squared gradients so far (Adagrad)")])
    }

    fn averages(&self) -> Option<Vec<Verdict>> {
        let ax = self.real("ax").filter(|_| self.only(&["eta", "mu", "ax"]))?;
        let why = "ax: the average of the parameter (ASGD)";
        Some(vec![Verdict { used: Use::Iterate, ..is(ax, Role::Master, why) }])
    }

    fn schedule_free(&self) -> Option<Vec<Verdict>> {
        let z = self.real("z").filter(|_| self.known && self.only(&["z", "exp_avg_sq"]))?;
        let why = "z: the parameter's other iterate (schedule-free)";
        let mut found = vec![Verdict { used: Use::Iterate, ..is(z, Role::Master, why) }];
        if let Some(square) = self.get("exp_avg_sq") {
            self.same(z, square).then_some(())?;
            let why = "exp_avg_sq beside z: mean of squared gradients (schedule-free)";
            found.push(is(square, Role::SecondMoment, why));
        }
        Some(found)
    }
}
