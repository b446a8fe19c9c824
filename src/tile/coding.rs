//! How a tensor's tiles are encoded (docs/FORMAT.md, "Decoding").

use crate::codec::moment::Rule;

use super::State;

/// How a tensor's tiles are encoded. `parent` is an index in the parent object's table of tensors; every other index is one
/// in the same object's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Coding {
    /// Lossless, alone.
    Lossless,
    /// Lossless, as ordered-integer difference to the parent's tensor.
    LosslessDelta {
        /// Tensor of the parent object.
        parent: u32,
    },
    /// R = fl(K + g*A), A as difference to the parent tensor's accumulators (0 when that one is lossless, and then K).
    Lattice {
        /// Tensor of the parent object.
        parent: u32,
        /// Step g of the lattice; the parent's may be another.
        step: f64,
    },
    /// R = fl(g*A): a lattice keyframe, decodes without any other object.
    LatticeKey {
        /// Step g of the lattice.
        step: f64,
    },
    /// R = fl(K + g*A) with K in the same tiles: what a state becomes when the object that held its K goes.
    LatticeWithKeyframe {
        /// Step g of the lattice.
        step: f64,
    },
    /// The same state as `Lattice`; the differences are by rows, for tables of which most rows stay as they are.
    Rows {
        /// Tensor of the parent object.
        parent: u32,
        /// Step g of the lattice, of which every row takes a power of two.
        step: f64,
    },
    /// The same state as `LatticeKey`, by rows.
    RowsKey {
        /// Step g of the lattice, of which every row takes a power of two.
        step: f64,
    },
    /// A logarithmic lattice with its factors; its steps as difference to those of the parent, which has the same unit.
    Log {
        /// Tensor of the parent object.
        parent: u32,
        /// Step in octaves / 65536.
        unit: u32,
    },
    /// A logarithmic lattice with its factors, alone.
    LogKey {
        /// Step in octaves / 65536.
        unit: u32,
    },
    /// In units of what lies beside it, or of its root, as the rule says: a first moment.
    Moment {
        /// The second moment.
        second: u32,
        /// Step of the ratio.
        step: f64,
        /// What is done with the two; never [`Rule::Sign`].
        rule: Rule,
    },
    /// In units of the size that its row and column have, from factors of its own.
    Sized {
        /// Step of the ratio.
        step: f64,
        /// [`Rule::Norm`] or [`Rule::Sign`].
        rule: Rule,
    },
    /// Another tensor of this object, each element rounded to this one's type. No payload.
    Cast {
        /// The tensor with more bits.
        of: u32,
    },
    /// A published system's ([`crate::published`]), as a difference to the parent's tensor. Its payloads name the system.
    External {
        /// Tensor of the parent object.
        parent: u32,
    },
    /// A published system's, alone.
    ExternalKey,
}

impl Coding {
    /// The tensor of the parent object that is needed to decode this one.
    pub fn parent(self) -> Option<u32> {
        use Coding::*;
        match self {
            LosslessDelta { parent }
            | Lattice { parent, .. }
            | Rows { parent, .. }
            | Log { parent, .. }
            | External { parent } => Some(parent),
            Lossless
            | LatticeKey { .. }
            | LatticeWithKeyframe { .. }
            | RowsKey { .. }
            | LogKey { .. }
            | Moment { .. }
            | Sized { .. }
            | Cast { .. }
            | ExternalKey => None,
        }
    }

    /// Whether it is a published system's.
    pub fn is_external(self) -> bool {
        matches!(self, Coding::External { .. } | Coding::ExternalKey)
    }

    /// The tensor of the same object that is needed to decode this one: its companion.
    pub fn companion(self) -> Option<u32> {
        match self {
            Coding::Moment { second, .. } => Some(second),
            Coding::Cast { of } => Some(of),
            _ => None,
        }
    }

    /// A companion has a lower rank than the tensor that needs it: no tensor can need itself.
    pub fn rank(self) -> u8 {
        match self {
            Coding::Moment { .. } => 1,
            Coding::Cast { .. } => 2,
            _ => 0,
        }
    }

    /// The lattice's step, when the state is one of [`crate::codec::lattice`]: in the tensor's own units.
    pub fn step(self) -> Option<f64> {
        use Coding::*;
        match self {
            Lattice { step, .. }
            | LatticeKey { step }
            | LatticeWithKeyframe { step }
            | Rows { step, .. }
            | RowsKey { step } => Some(step),
            _ => None,
        }
    }

    /// The unit of a logarithmic lattice: its step in octaves / 65536.
    pub fn unit(self) -> Option<u32> {
        match self {
            Coding::Log { unit, .. } | Coding::LogKey { unit } => Some(unit),
            _ => None,
        }
    }

    /// The step in ratios, and the rule they follow.
    pub fn ratio(self) -> Option<(f64, Rule)> {
        match self {
            Coding::Moment { step, rule, .. } | Coding::Sized { step, rule } => Some((step, rule)),
            _ => None,
        }
    }

    /// Whether a tensor keeps its coding when its object becomes a difference to another parent.
    pub fn stands_alone(self) -> bool {
        self.companion().is_some() || matches!(self, Coding::ExternalKey | Coding::Sized { .. })
    }

    /// How to encode a state of this coding alone.
    pub fn alone(self, state: &State) -> Coding {
        match (state, self) {
            (_, coding) if coding.stands_alone() => coding,
            (State::External { .. }, _) => Coding::ExternalKey,
            (_, coding) if coding.is_external() => Coding::ExternalKey,
            (State::Bytes(_) | State::Moment { .. }, _) => Coding::Lossless,
            (State::Lattice { keyframe: None, step, .. }, Coding::Rows { .. } | Coding::RowsKey { .. }) => {
                Coding::RowsKey { step: *step }
            }
            (State::Lattice { keyframe: None, step, .. }, _) => Coding::LatticeKey { step: *step },
            (State::Lattice { keyframe: Some(_), step, .. }, _) => Coding::LatticeWithKeyframe { step: *step },
            (State::Log { unit, .. }, _) => Coding::LogKey { unit: *unit },
        }
    }

    /// How to encode a state of this coding as a difference to tensor `parent` of another object.
    pub fn as_difference(self, state: &State, parent: u32) -> Coding {
        match (state, self) {
            (State::Lattice { step, .. }, Coding::Rows { .. } | Coding::RowsKey { .. }) => {
                Coding::Rows { parent, step: *step }
            }
            (State::Lattice { step, .. }, _) => Coding::Lattice { parent, step: *step },
            (State::Log { unit, .. }, _) => Coding::Log { parent, unit: *unit },
            (State::External { .. }, _) => Coding::External { parent },
            (_, coding) if coding.is_external() => Coding::External { parent },
            (State::Bytes(_) | State::Moment { .. }, _) => Coding::LosslessDelta { parent },
        }
    }

    /// Whether factors are stored with it.
    pub fn has_factors(self) -> bool {
        matches!(self, Coding::Log { .. } | Coding::LogKey { .. } | Coding::Sized { .. })
    }

    /// Whether the bytes may differ from those that were written.
    pub fn is_lossy(self) -> bool {
        !matches!(self, Coding::Lossless | Coding::LosslessDelta { .. })
    }

    /// The codec's name, as people are shown it.
    pub fn codec(self) -> &'static str {
        use Coding::*;
        match self {
            Lossless | LosslessDelta { .. } => "lossless",
            Lattice { .. } | LatticeKey { .. } | LatticeWithKeyframe { .. } => "lattice",
            Rows { .. } | RowsKey { .. } => "rows",
            Log { .. } | LogKey { .. } => "log",
            Moment { .. } => "moment",
            Sized { rule: Rule::Sign, .. } => "signs",
            Sized { .. } => "sized",
            Cast { .. } => "cast",
            External { .. } | ExternalKey => "published",
        }
    }
}
