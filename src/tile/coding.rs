//! How a tensor's tiles are encoded (docs/FORMAT.md, "Decoding").

use codec::log;
use codec::moment::Rule;

use super::State;

/// How a tensor's tiles are encoded: by which codec, and relative to what.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Coding {
    /// The codec.
    pub codec: Codec,
    /// The tensor that the tiles are differences to: an index in the parent object's table. Every other index is one
    /// in the same object's.
    pub parent: Option<u32>,
}

/// A codec, and its constants for one tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Codec {
    /// Bit for bit. Differences are of ordered integers.
    Lossless,
    /// R = fl(K + g*A). A difference is one of the parent's A; if the parent is lossless, those are 0, and the parent is
    /// K. Without a parent, K is 0 or in the same tiles: the state's K was then in an object that is removed.
    Lattice {
        /// Step g of the lattice; the parent's may differ.
        step: f64,
    },
    /// The same state as `Lattice`, by rows, for tables with mostly unchanged rows.
    Rows {
        /// Step g of the lattice; every row uses a power of two times it.
        step: f64,
    },
    /// A logarithmic lattice with its factors. A difference is one of its steps, to a parent with the same unit.
    Log {
        /// Step in octaves / 65536.
        unit: u32,
    },
    /// A first moment, in units of its companion or of the companion's root, by the rule. Never a difference.
    Moment {
        /// The second moment.
        second: u32,
        /// Step of the ratio.
        step: f64,
        /// The optimizer's use of the two; never [`Rule::Sign`].
        rule: Rule,
    },
    /// In units of the size of its row and column, from factors of its own. Never a difference.
    Sized {
        /// Step of the ratio.
        step: f64,
        /// [`Rule::Norm`] or [`Rule::Sign`].
        rule: Rule,
    },
    /// Another tensor of this object, with each element rounded to this one's type. No payload, and never a difference.
    Cast {
        /// The tensor with more bits.
        of: u32,
    },
    /// A published system's ([`papers`]). Its payloads name the system.
    External,
}

impl Codec {
    /// Without a parent.
    pub const fn alone(self) -> Coding {
        Coding { codec: self, parent: None }
    }

    /// As a difference to this tensor of the parent object.
    pub const fn on(self, parent: u32) -> Coding {
        Coding { codec: self, parent: Some(parent) }
    }

    /// Its name, for people.
    pub fn name(self) -> &'static str {
        match self {
            Codec::Lossless => "lossless",
            Codec::Lattice { .. } => "lattice",
            Codec::Rows { .. } => "rows",
            Codec::Log { .. } => "log",
            Codec::Moment { .. } => "moment",
            Codec::Sized { rule: Rule::Sign, .. } => "signs",
            Codec::Sized { .. } => "sized",
            Codec::Cast { .. } => "cast",
            Codec::External => "published",
        }
    }

    /// True if its tiles can be differences to a parent's.
    pub fn has_differences(self) -> bool {
        !matches!(self, Codec::Moment { .. } | Codec::Sized { .. } | Codec::Cast { .. })
    }
}

impl Coding {
    /// Bit for bit, and alone.
    pub const LOSSLESS: Coding = Codec::Lossless.alone();

    /// True if it is a published system's.
    pub fn is_external(self) -> bool {
        self.codec == Codec::External
    }

    /// True if it is that of a logarithmic lattice.
    pub fn is_log(self) -> bool {
        matches!(self.codec, Codec::Log { .. })
    }

    /// True if it is by rows.
    pub fn is_by_rows(self) -> bool {
        matches!(self.codec, Codec::Rows { .. })
    }

    /// The tensor of the same object that this one needs for decoding: its companion.
    pub fn companion(self) -> Option<u32> {
        match self.codec {
            Codec::Moment { second: other, .. } | Codec::Cast { of: other } => Some(other),
            _ => None,
        }
    }

    /// A companion has a lower rank than the tensor that needs it, so no tensor can need itself.
    pub fn rank(self) -> u8 {
        match self.codec {
            Codec::Moment { .. } => 1,
            Codec::Cast { .. } => 2,
            _ => 0,
        }
    }

    /// The lattice's step in the tensor's own units, if the state is one of [`codec::lattice`].
    pub fn step(self) -> Option<f64> {
        match self.codec {
            Codec::Lattice { step } | Codec::Rows { step } => Some(step),
            _ => None,
        }
    }

    /// The unit of a logarithmic lattice: its step in octaves / 65536.
    pub fn unit(self) -> Option<u32> {
        match self.codec {
            Codec::Log { unit } => Some(unit),
            _ => None,
        }
    }

    /// The step in ratios, and the rule they follow.
    pub fn ratio(self) -> Option<(f64, Rule)> {
        match self.codec {
            Codec::Moment { step, rule, .. } | Codec::Sized { step, rule } => Some((step, rule)),
            _ => None,
        }
    }

    /// True if a tensor keeps its coding when its object becomes a difference to another parent.
    pub fn stands_alone(self) -> bool {
        !self.codec.has_differences() || self == Codec::External.alone()
    }

    /// The coding to encode such a state again, alone or as a difference to another tensor.
    pub fn again(self, state: &State, parent: Option<u32>) -> Coding {
        let codec = match (state, self.codec) {
            _ if self.stands_alone() => return self,
            (State::Lattice { step, .. }, Codec::Rows { .. }) => Codec::Rows { step: *step },
            (State::Lattice { step, .. }, _) => Codec::Lattice { step: *step },
            (State::Log { unit, .. }, _) => Codec::Log { unit: *unit },
            (State::External { .. }, _) | (_, Codec::External) => Codec::External,
            (State::Bytes(_) | State::Moment { .. }, _) => Codec::Lossless,
        };
        Coding { codec, parent }
    }

    /// True if factors are stored with it.
    pub fn has_factors(self) -> bool {
        matches!(self.codec, Codec::Log { .. } | Codec::Sized { .. })
    }

    /// True if the decoded bytes may differ from the written ones.
    pub fn is_lossy(self) -> bool {
        self.codec != Codec::Lossless
    }

    /// Maximum error of a tensor in this coding once it is read back; `found` is the error when it was quantized.
    pub fn bound(self, found: f64) -> f64 {
        match self.codec {
            Codec::Lossless => 0.0,
            Codec::Lattice { step } => step / 2.0,
            // The codec defines the allowance for its roundings.
            Codec::Moment { step, rule, .. } | Codec::Sized { step, rule } => found.max(step * rule.steps()),
            Codec::Log { unit } => log::bound(unit, self.parent.is_some()),
            // Quantizing checked each row's own bound. A cast has the error of its source. Published systems promise
            // nothing.
            Codec::Rows { .. } | Codec::Cast { .. } | Codec::External => found,
        }
    }
}
