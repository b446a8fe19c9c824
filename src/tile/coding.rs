//! How a tensor's tiles are encoded (docs/FORMAT.md, "Decoding").

use crate::codec::moment::Rule;

use super::State;

/// How a tensor's tiles are encoded. `parent` is an index in the parent object's table of tensors; every other index is
/// one in the same object's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Coding {
    /// Lossless, alone.
    Lossless,
    /// Lossless, as ordered-integer difference to the parent's tensor.
    LosslessDelta {
        /// Tensor of the parent object.
        parent: u32,
    },
    /// R = fl(K + g*A), with A as difference to the parent tensor's accumulators. If the parent is lossless, those are
    /// 0, and the parent is K.
    Lattice {
        /// Tensor of the parent object.
        parent: u32,
        /// Step g of the lattice; the parent's may differ.
        step: f64,
    },
    /// R = fl(g*A): a lattice keyframe, decodes without any other object.
    LatticeKey {
        /// Step g of the lattice.
        step: f64,
    },
    /// R = fl(K + g*A) with K in the same tiles: for a state whose K was in an object that is removed.
    LatticeWithKeyframe {
        /// Step g of the lattice.
        step: f64,
    },
    /// The same state as `Lattice`, with differences by row, for tables with mostly unchanged rows.
    Rows {
        /// Tensor of the parent object.
        parent: u32,
        /// Step g of the lattice; every row uses a power of two times it.
        step: f64,
    },
    /// The same state as `LatticeKey`, by rows.
    RowsKey {
        /// Step g of the lattice; every row uses a power of two times it.
        step: f64,
    },
    /// A logarithmic lattice with its factors; its steps as difference to the parent's, which has the same unit.
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
    /// A first moment, in units of its companion or of the companion's root, by the rule.
    Moment {
        /// The second moment.
        second: u32,
        /// Step of the ratio.
        step: f64,
        /// The optimizer's use of the two; never [`Rule::Sign`].
        rule: Rule,
    },
    /// In units of the size of its row and column, from factors of its own.
    Sized {
        /// Step of the ratio.
        step: f64,
        /// [`Rule::Norm`] or [`Rule::Sign`].
        rule: Rule,
    },
    /// Another tensor of this object, with each element rounded to this one's type. No payload.
    Cast {
        /// The tensor with more bits.
        of: u32,
    },
    /// A published system's ([`crate::published`]), as a difference to the parent's tensor. Its payloads name the
    /// system.
    External {
        /// Tensor of the parent object.
        parent: u32,
    },
    /// A published system's, alone.
    ExternalKey,
}

impl Coding {
    /// The tensor of the parent object that this one needs for decoding.
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

    /// True if it is a published system's.
    pub fn is_external(self) -> bool {
        matches!(self, Coding::External { .. } | Coding::ExternalKey)
    }

    /// The tensor of the same object that this one needs for decoding: its companion.
    pub fn companion(self) -> Option<u32> {
        match self {
            Coding::Moment { second, .. } => Some(second),
            Coding::Cast { of } => Some(of),
            _ => None,
        }
    }

    /// A companion has a lower rank than the tensor that needs it, so no tensor can need itself.
    pub fn rank(self) -> u8 {
        match self {
            Coding::Moment { .. } => 1,
            Coding::Cast { .. } => 2,
            _ => 0,
        }
    }

    /// The lattice's step in the tensor's own units, if the state is one of [`crate::codec::lattice`].
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

    /// True if a tensor keeps its coding when its object becomes a difference to another parent.
    pub fn stands_alone(self) -> bool {
        self.companion().is_some() || matches!(self, Coding::ExternalKey | Coding::Sized { .. })
    }

    /// The coding to encode such a state alone.
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

    /// The coding to encode such a state as a difference to tensor `parent` of another object.
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

    /// True if factors are stored with it.
    pub fn has_factors(self) -> bool {
        matches!(self, Coding::Log { .. } | Coding::LogKey { .. } | Coding::Sized { .. })
    }

    /// True if the decoded bytes may differ from the written ones.
    pub fn is_lossy(self) -> bool {
        !matches!(self, Coding::Lossless | Coding::LosslessDelta { .. })
    }

    /// The codec's name, for people.
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
