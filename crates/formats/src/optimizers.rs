//! The optimizers that stepfs knows: of each one, what it keeps of a parameter, and what each slot means to its update.
//!
//! An optimizer is known by all that it keeps of one parameter, tensors and other values. One name more, and it is
//! another optimizer, which may mean something else by the same names: its state stays exact.
//!
//! A new optimizer is one row of [`KNOWN`]: docs/CONTAINERS.md leads through it. Its slots have the names that the walk of a
//! pickle or a format's own naming function gives: torch's, and those of [`keras_slots`].

use super::{Role, Tensor, Use};
use codec::Dtype;

/// One row of the table: all that an optimizer keeps of a parameter.
struct Optimizer {
    /// The reason that people are shown.
    why: &'static str,
    stands: Stands,
    /// Tensors with an entry for each element of the parameter, of one shape and one type that lossy codecs know.
    slots: &'static [Slot],
    /// Such slots that it may have or not. One of another shape or type is exact.
    optional: &'static [Slot],
    /// Tensors of other shapes that it must have; they are exact.
    factors: &'static [&'static str],
    /// Values that are no tensors and that it must have.
    values: &'static [&'static str],
    /// What it may have and means nothing else by, beside `step`. A name that ends in `/` is the beginning of several.
    beside: &'static [&'static str],
}

/// Where the state must stand, so that its slots mean what their names say.
#[derive(Clone, Copy)]
enum Stands {
    /// Anywhere, since the slots bear each other out.
    Anywhere,
    /// In an optimizer's state, or where the file has a parameter of its name or number and its shape.
    Somewhere,
    /// In an optimizer's state.
    InState,
    /// Outside of an optimizer's state, where the file has a parameter of its name and its shape.
    Outside,
}

use Stands::{Anywhere, InState, Outside, Somewhere};

/// A slot, its meaning to the update, and the slot that the update divides it by, or that it divides. The meaning says
/// how it may lose: docs/OPTIMIZERS.md has the rule for each.
#[derive(Clone, Copy)]
struct Slot {
    name: &'static str,
    role: Role,
    used: Use,
    partner: Option<&'static str>,
}

/// A slot that stays exact.
const fn exact(name: &'static str) -> Slot {
    alone(name, Role::Optimizer)
}

const fn alone(name: &'static str, role: Role) -> Slot {
    Slot { name, role, used: Use::ByRole, partner: None }
}

const fn momentum(name: &'static str) -> Slot {
    alone(name, Role::Momentum)
}

/// A mean of squared gradients.
const fn squares(name: &'static str) -> Slot {
    alone(name, Role::SecondMoment)
}

/// Another iterate of the parameter, or its average.
const fn iterate(name: &'static str) -> Slot {
    alone(name, Role::Master).used(Use::Iterate)
}

/// A mean of gradients and what the update divides it by: of a mean of squares the root, unless `used` says otherwise.
const fn pair(first: &'static str, second: &'static str, used: Use) -> [Slot; 2] {
    [alone(first, Role::FirstMoment).with(second).used(used), squares(second).with(first).used(used)]
}

impl Slot {
    const fn with(self, partner: &'static str) -> Slot {
        Slot { partner: Some(partner), ..self }
    }

    const fn used(self, used: Use) -> Slot {
        Slot { used, ..self }
    }
}

const fn row(why: &'static str, stands: Stands, slots: &'static [Slot]) -> Optimizer {
    Optimizer { why, stands, slots, optional: &[], factors: &[], values: &[], beside: &[] }
}

impl Optimizer {
    const fn or(self, optional: &'static [Slot]) -> Optimizer {
        Optimizer { optional, ..self }
    }

    const fn factors(self, factors: &'static [&'static str]) -> Optimizer {
        Optimizer { factors, ..self }
    }

    const fn values(self, values: &'static [&'static str]) -> Optimizer {
        Optimizer { values, ..self }
    }

    const fn beside(self, beside: &'static [&'static str]) -> Optimizer {
        Optimizer { beside, ..self }
    }
}

/// The parameter in full precision, as Transformer Engine and apex call it, and Megatron.
const COPIES: &[Slot] = &[alone("master_param", Role::Master), alone("fp32_param", Role::Master)];

/// Further state of optimizers like Adam. NAdam keeps a product of momenta. GaLore keeps a projection of the gradient,
/// and both moments are of the projected gradient, element by element.
const OF_ADAM: &[&str] = &["mu_product", "projector", "projector/", "max_exp_avg_sq"];

/// bitsandbytes keeps all tensors of a parameter in a mapping of this name, so that nobody casts them.
const BNB: &str = "__bnb_optimizer_quant_state__";
const BNB1: &str = "__bnb_optimizer_quant_state__/state1";
const BNB2: &str = "__bnb_optimizer_quant_state__/state2";

/// All that are known. Of several that fit the first one counts.
const KNOWN: &[Optimizer] = &[
    // The update divides by the root of the largest.
    row(
        "exp_avg beside max_exp_avg_sq and exp_avg_sq (AMSGrad)",
        Anywhere,
        &[
            alone("exp_avg", Role::FirstMoment).with("max_exp_avg_sq"),
            squares("max_exp_avg_sq").with("exp_avg"),
            squares("exp_avg_sq").with("exp_avg"),
        ],
    )
    .or(COPIES)
    .beside(OF_ADAM),
    row("exp_avg beside exp_avg_sq of one parameter (Adam)", Anywhere, &pair("exp_avg", "exp_avg_sq", Use::ByRole))
        .or(COPIES)
        .beside(OF_ADAM),
    // fastai divides the one by the root of the other in each optimizer that has both.
    row("grad_avg beside sqr_avg (fastai's Adam)", InState, &pair("grad_avg", "sqr_avg", Use::ByRole))
        .beside(&["do_wd", "force_train"]),
    row("moment1 beside moment2 (Adam of Keras, Moonlight, Paddle)", InState, &pair("moment1", "moment2", Use::ByRole))
        .beside(&["beta1_pow_acc", "beta2_pow_acc"]),
    row("state1 beside state2 of 32 bits (bitsandbytes)", InState, &pair("state1", "state2", Use::ByRole)),
    row("state1 beside state2 of 32 bits (bitsandbytes)", InState, &pair(BNB1, BNB2, Use::ByRole)).beside(&[BNB]),
    row("m beside v, both of a weight's name and shape (Adam)", Outside, &pair("m", "v", Use::ByRole)),
    row("mu beside nu, both of a weight's name and shape (Adam)", Outside, &pair("mu", "nu", Use::ByRole)),
    // It divides gradients by the root before it averages them, so the average is in units of the weights.
    row(
        "exp_avg of Adafactor, an average of updates, beside exp_avg_sq of a vector",
        InState,
        &[momentum("exp_avg"), squares("exp_avg_sq")],
    )
    .factors(&["RMS"]),
    row("exp_avg_sq of Adafactor, of a vector: nothing is factored", InState, &[squares("exp_avg_sq")])
        .factors(&["RMS"]),
    row("exp_avg of Adafactor: an average of updates", InState, &[momentum("exp_avg")])
        .factors(&["RMS", "exp_avg_sq_row", "exp_avg_sq_col"])
        .beside(&["projector", "projector/"]),
    // Adam in a basis of its own. The squares are of gradients in that basis and divide there, element by element, so
    // octaves bound what becomes of an update. The first moment is in the parameter's basis: an error in it is spread
    // over directions whose divisors differ by orders of magnitude.
    row("exp_avg of SOAP, and exp_avg_sq in a rotated basis", InState, &[exact("exp_avg"), squares("exp_avg_sq")])
        .values(&["GG", "Q"])
        .beside(&["precondition_frequency", "shampoo_beta"]),
    row(
        "exp_avg beside exp_inf, the largest gradient, which divides it (Adamax)",
        Somewhere,
        &pair("exp_avg", "exp_inf", Use::Norm),
    ),
    // The difference of square_avg and grad_avg squared must stay positive.
    row("square_avg beside grad_avg (centered RMSprop)", Somewhere, &pair("grad_avg", "square_avg", Use::Centered))
        .or(&[momentum("momentum_buffer")]),
    row("square_avg: mean of squared gradients (RMSprop, Adadelta)", Somewhere, &[squares("square_avg")])
        .or(&[momentum("momentum_buffer"), squares("acc_delta").used(Use::Updates)]),
    row("momentum_buffer, alone but for the step (SGD, Muon)", Somewhere, &[momentum("momentum_buffer")]),
    row(
        "exp_avg, alone but for the step: its direction is the update (Lion, Tiger)",
        InState,
        &[momentum("exp_avg").used(Use::Direction)],
    ),
    row(
        "prev: the last gradient, whose sign is asked for (Rprop)",
        InState,
        &[momentum("prev").used(Use::Sign), exact("step_size")],
    ),
    row("sum, alone but for the step: squared gradients so far (Adagrad)", Somewhere, &[alone("sum", Role::SquareSum)]),
    row("ax: the average of the parameter (ASGD)", Somewhere, &[iterate("ax")]).beside(&["eta", "mu"]),
    row("z: the parameter's other iterate (schedule-free SGD)", InState, &[iterate("z")]),
    row(
        "z, the parameter's other iterate, beside exp_avg_sq (schedule-free Adam)",
        InState,
        &[iterate("z"), squares("exp_avg_sq")],
    ),
];

/// Names of state that say what it is. Where that is not borne out, nobody knows what the tensor is.
const CLAIMS: [&str; 11] =
    ["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "sum", "ax", "m", "v", "mu", "nu"];

/// The slots that Keras's variables of an optimizer of this name are, by the ends of their names. A variable of another
/// name belongs to an optimizer that stepfs does not know, or to an option. The second Adam of a process is `adam_1`.
pub(super) fn keras_slots(optimizer: &str) -> &'static [(&'static str, &'static str)] {
    let word = optimizer.trim_end_matches(|c: char| c.is_ascii_digit());
    let name = if word.len() < optimizer.len() { word.strip_suffix('_') } else { Some(optimizer) };
    match name {
        Some("adam" | "adam_w" | "adamw") => &[("_momentum", "m"), ("_velocity", "v")],
        Some("adamax") => &[("_momentum", "exp_avg"), ("_norm", "exp_inf")],
        Some("sgd") => &[("_momentum", "momentum_buffer")],
        Some("rmsprop" | "rm_sprop") => &[("_velocity", "square_avg"), ("_momentum", "momentum_buffer")],
        _ => &[],
    }
}

/// Whether a slot has an entry for each element of the parameter.
pub(super) fn is_full(slot: &str) -> bool {
    // torch's Adafactor keeps the variance of a vector, and the factors of anything else.
    let mut slots = KNOWN.iter().flat_map(|optimizer| optimizer.slots.iter().chain(optimizer.optional));
    slot == "variance" || slots.any(|known| known.name == slot)
}

/// Whether a type has a sign, an exponent and a fraction that lossy codecs know.
pub(super) fn is_real(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F16 | Dtype::Bf16 | Dtype::F32 | Dtype::F64)
}

/// One parameter's state: slots with the indices of their tensors.
pub(super) type Slots<'a> = Vec<(&'a str, usize)>;

/// The role of a tensor, with its reason.
pub(super) struct Verdict {
    pub(super) tensor: usize,
    pub(super) role: Role,
    pub(super) used: Use,
    pub(super) why: &'static str,
    pub(super) partner: Option<usize>,
}

/// Everything with a name that says what it is becomes `Other`.
pub(super) fn doubt(slots: &Slots, why: &'static str) -> Vec<Verdict> {
    let claims = slots.iter().filter(|(slot, _)| CLAIMS.contains(slot));
    let other = |&(_, tensor)| Verdict { tensor, role: Role::Other, used: Use::ByRole, why, partner: None };
    claims.map(other).collect()
}

/// All that an optimizer keeps of one parameter.
pub(super) struct State<'a> {
    pub(super) tensors: &'a [Tensor],
    pub(super) slots: &'a Slots<'a>,
    /// Names of its state beside tensors: numbers, lists, objects.
    pub(super) foreign: &'a [String],
    /// It is below `state` of an optimizer's `state_dict()`.
    pub(super) known: bool,
    /// There is a parameter of its name or number, and its shape, in the file.
    pub(super) matched: bool,
}

impl State<'_> {
    /// The role of each tensor of this state. A tensor that is missing in the answer keeps its role.
    pub(super) fn verdicts(&self) -> Vec<Verdict> {
        let mut seen: Vec<&str> = self.slots.iter().map(|&(slot, _)| slot).collect();
        seen.extend(self.foreign.iter().map(String::as_str));
        seen.sort_unstable();
        // A pickle may repeat keys, and then nobody knows which one counts.
        let is_unique = seen.windows(2).all(|pair| pair[0] != pair[1]);
        match KNOWN.iter().find(|optimizer| is_unique && self.is_of(optimizer, &seen)) {
            Some(optimizer) => self.of(optimizer),
            None if self.known || self.matched => doubt(
                self.slots,
                "named like optimizer state, but its parameter's state is not that of a known optimizer",
            ),
            None => doubt(self.slots, "named like optimizer state, but nothing beside it bears that out"),
        }
    }

    fn get(&self, name: &str) -> Option<usize> {
        self.slots.iter().find(|(slot, _)| *slot == name).map(|&(_, tensor)| tensor)
    }

    /// Whether this is the state of that optimizer, whose names are `seen`.
    fn is_of(&self, optimizer: &Optimizer, seen: &[&str]) -> bool {
        let is_there = match optimizer.stands {
            Anywhere => true,
            Somewhere => self.known || self.matched,
            InState => self.known,
            Outside => self.matched && !self.known && !seen.contains(&"step"),
        };
        let has = |slot: &Slot| self.get(slot.name).is_some_and(|tensor| self.fits(optimizer, slot, tensor));
        let names = || {
            let slots = optimizer.slots.iter().chain(optimizer.optional).map(|slot| slot.name);
            slots.chain([optimizer.factors, optimizer.values, optimizer.beside].into_iter().flatten().copied())
        };
        let is_known = |name: &&str| {
            *name == "step" || names().any(|known| known == *name || known.ends_with('/') && name.starts_with(known))
        };
        // Of two copies of a parameter nobody knows which one the program reads.
        let is_one_copy = COPIES.iter().filter(|copy| seen.contains(&copy.name)).count() < 2;
        is_there
            && is_one_copy
            && optimizer.slots.iter().all(has)
            && optimizer.factors.iter().all(|name| self.get(name).is_some())
            && optimizer.values.iter().all(|name| self.foreign.iter().any(|own| own == name))
            && seen.iter().all(is_known)
    }

    /// Whether a tensor is such as the slot wants: of the shape and the type of the first slot. A copy of the parameter
    /// may have another type.
    fn fits(&self, optimizer: &Optimizer, slot: &Slot, tensor: usize) -> bool {
        let Some(first) = self.get(optimizer.slots[0].name).map(|first| &self.tensors[first]) else { return false };
        let tensor = &self.tensors[tensor];
        let is_copy = slot.role == Role::Master && slot.used == Use::ByRole;
        // Of an update that is a direction, a second name is more than a momentum.
        let is_alone = slot.used != Use::Direction || tensor.aliases.is_empty();
        tensor.shape == first.shape && is_real(tensor.dtype) && (is_copy || tensor.dtype == first.dtype) && is_alone
    }

    fn of(&self, optimizer: &Optimizer) -> Vec<Verdict> {
        let verdict = |slot: &Slot| {
            let tensor = self.get(slot.name)?;
            let (role, used, why) = match self.fits(optimizer, slot, tensor) {
                true => (slot.role, slot.used, optimizer.why),
                false => (Role::Other, Use::ByRole, "named like optimizer state, but not of its parameter's shape"),
            };
            Some(Verdict { tensor, role, used, why, partner: slot.partner.and_then(|partner| self.get(partner)) })
        };
        optimizer.slots.iter().chain(optimizer.optional).filter_map(verdict).collect()
    }
}
