//! The divisor of each optimizer, and the permitted loss of its quotient.

use crate::float::{Float, Real};

/// An optimizer's use of m and of its companion tensor, which decides the guarantees for decoded values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// m / sqrt(v) is the update (Adam): it grows by half a step at most, plus the rounding outward ([`OUTWARD`]).
    Root,
    /// m / v is the update (Adamax, whose v is a norm), or v is the size of m's row and column. It grows by as much at
    /// most.
    Norm,
    /// The update divides by sqrt(v - m^2) (centered RMSprop). |m| / sqrt(v) never grows, so (v - m^2) / v never
    /// shrinks.
    Inward,
    /// The update only uses the sign of m (Rprop). No sign changes, and only 0 becomes 0. The divisor is v itself, the
    /// size of m's row and column.
    Sign,
}

/// Largest share of a step that is added to a quotient before rounding.
///
/// A long step makes most quotients 0, and their momentum is lost: an eighth of it at 2.6 root mean squares. A restored
/// run then begins more slowly. Rounding the others a little outward makes up for it, at the same number of bits.
pub const OUTWARD: f64 = 1.0 / 16.0;

impl Rule {
    /// All rules.
    pub const ALL: [Rule; 4] = [Rule::Root, Rule::Norm, Rule::Inward, Rule::Sign];

    /// Maximum error of a quotient in steps, without roundings.
    pub fn steps(self) -> f64 {
        match self {
            Rule::Root | Rule::Norm => 0.5 + OUTWARD,
            Rule::Inward | Rule::Sign => 1.0,
        }
    }
}

/// A rule that is known when its loops are compiled.
pub(super) trait Divide {
    /// Steps by which a quotient may grow.
    const GROWS: f64;
    /// Further growth by rounding, in least values of the type.
    const LEAST: f64 = 0.5;
    /// True if quotients may not grow at all.
    const INWARD: bool = false;
    /// True if only 0 decodes to 0.
    const SIGNS: bool = false;
    /// True if d is the square root of v, false if it is v.
    const SQUARE: bool;
    /// d of an element.
    #[inline(always)]
    fn divisor<P: Real>(v: P) -> P {
        if Self::SQUARE { v.sqrt() } else { v }
    }
    /// m / d.
    #[inline(always)]
    fn quotient<P: Real>(m: P, v: P) -> P {
        m / Self::divisor(v)
    }
    /// Rounds a number of steps for an element m to a whole one; `outward` is added first.
    #[inline(always)]
    fn rounded(steps: f64, _m: f64, outward: f64, _shrink: f64) -> f64 {
        // The addition that follows rounds.
        steps + outward.copysign(steps)
    }
    /// Adjusts a product before it is rounded.
    #[inline(always)]
    fn kept<F: Float>(value: f64) -> f64 {
        value
    }
}

pub(super) struct Root;
pub(super) struct Norm;
pub(super) struct Inward;
pub(super) struct Sign;

impl Divide for Root {
    const SQUARE: bool = true;
    const GROWS: f64 = 0.5 + OUTWARD;
}

impl Divide for Norm {
    const SQUARE: bool = false;
    const GROWS: f64 = 0.5 + OUTWARD;
}

impl Divide for Inward {
    const SQUARE: bool = true;
    const GROWS: f64 = 0.0;
    const INWARD: bool = true;
    #[inline(always)]
    fn rounded(steps: f64, _m: f64, _outward: f64, shrink: f64) -> f64 {
        // Toward 0, and from a whole number to the one before, so that no rounding can exceed the original.
        (steps * shrink).trunc()
    }
}

impl Divide for Sign {
    const SQUARE: bool = false;
    const GROWS: f64 = 1.0;
    const LEAST: f64 = 1.0;
    const SIGNS: bool = true;
    #[inline(always)]
    fn rounded(steps: f64, m: f64, _outward: f64, _shrink: f64) -> f64 {
        // The nearest odd number: no symbol of 0 lies between the two signs.
        let odd = 2.0 * (steps.abs() * 0.5).floor() + 1.0;
        if m == 0.0 { 0.0 } else { odd.copysign(m) }
    }
    #[inline(always)]
    fn kept<F: Float>(value: f64) -> f64 {
        let least = F::LEAST.copysign(value);
        if value != 0.0 && value.abs() < F::LEAST { least } else { value }
    }
}

/// Calls a generic function for the rule.
macro_rules! for_rule {
    ($rule:expr, $R:ident => $call:expr) => {
        match $rule {
            $crate::moment::Rule::Root => {
                type $R = $crate::moment::rule::Root;
                $call
            }
            $crate::moment::Rule::Norm => {
                type $R = $crate::moment::rule::Norm;
                $call
            }
            $crate::moment::Rule::Inward => {
                type $R = $crate::moment::rule::Inward;
                $call
            }
            $crate::moment::Rule::Sign => {
                type $R = $crate::moment::rule::Sign;
                $call
            }
        }
    };
}

pub(super) use for_rule;
