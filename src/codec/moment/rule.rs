//! What an optimizer divides by, and what its use of the quotient allows to be lost.

use crate::codec::float::Float;

/// What is done with m and what lies beside it, and so what must hold of what comes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// m / sqrt(v) is the update (Adam): it grows by half a step at most.
    Root,
    /// m / v is the update (Adamax, whose v is a norm), or v is the size that m's row and column have: it grows by half a step
    /// at most.
    Norm,
    /// The update divides by sqrt(v - m^2) (centered RMSprop). |m| / sqrt(v) never grows, so (v - m^2) / v never shrinks.
    Inward,
    /// The update asks for nothing of m but its sign (Rprop). No sign changes, and nothing but 0 is 0. The divisor is v itself,
    /// the size that m's row and column have.
    Sign,
}

impl Rule {
    /// All rules.
    pub const ALL: [Rule; 4] = [Rule::Root, Rule::Norm, Rule::Inward, Rule::Sign];

    /// Steps by which a quotient may be off, but for roundings.
    pub fn steps(self) -> f64 {
        match self {
            Rule::Root | Rule::Norm => 0.5,
            Rule::Inward | Rule::Sign => 1.0,
        }
    }
}

/// A rule that is known when its loops are compiled.
pub(super) trait Divide {
    /// Steps by which a quotient may grow.
    const GROWS: f64;
    /// And least values of the type, by the rounding to it.
    const LEAST: f64 = 0.5;
    /// Whether quotients may not grow at all.
    const INWARD: bool = false;
    /// Whether 0 comes back for 0 alone.
    const SIGNS: bool = false;
    /// d of an element.
    fn divisor<F: Float>(v: f64) -> f64;
    /// m / d, computed in f32 for the types that f32 holds.
    fn quotient<F: Float>(m: f64, v: f64) -> f64;
    /// m / d, in f64.
    fn exact(m: f64, v: f64) -> f64;
    /// A whole number of steps for so many, of an element m.
    #[inline(always)]
    fn rounded(steps: f64, _m: f64, _shrink: f64) -> f64 {
        // The addition that follows rounds.
        steps
    }
    /// What a product becomes before it is rounded.
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
    const GROWS: f64 = 0.5;
    #[inline(always)]
    fn divisor<F: Float>(v: f64) -> f64 {
        F::sqrt(v)
    }
    #[inline(always)]
    fn quotient<F: Float>(m: f64, v: f64) -> f64 {
        F::quotient(m, v)
    }
    #[inline(always)]
    fn exact(m: f64, v: f64) -> f64 {
        m / v.sqrt()
    }
}

impl Divide for Norm {
    const GROWS: f64 = 0.5;
    #[inline(always)]
    fn divisor<F: Float>(v: f64) -> f64 {
        v
    }
    #[inline(always)]
    fn quotient<F: Float>(m: f64, v: f64) -> f64 {
        F::ratio(m, v)
    }
    #[inline(always)]
    fn exact(m: f64, v: f64) -> f64 {
        m / v
    }
}

impl Divide for Inward {
    const GROWS: f64 = 0.0;
    const INWARD: bool = true;
    #[inline(always)]
    fn divisor<F: Float>(v: f64) -> f64 {
        Root::divisor::<F>(v)
    }
    #[inline(always)]
    fn quotient<F: Float>(m: f64, v: f64) -> f64 {
        Root::quotient::<F>(m, v)
    }
    #[inline(always)]
    fn exact(m: f64, v: f64) -> f64 {
        Root::exact(m, v)
    }
    #[inline(always)]
    fn rounded(steps: f64, _m: f64, shrink: f64) -> f64 {
        // Toward 0, and from a whole number to the one before, so that no rounding can take it beyond what it was.
        (steps * shrink).trunc()
    }
}

impl Divide for Sign {
    const GROWS: f64 = 1.0;
    const LEAST: f64 = 1.0;
    const SIGNS: bool = true;
    #[inline(always)]
    fn divisor<F: Float>(v: f64) -> f64 {
        v
    }
    #[inline(always)]
    fn quotient<F: Float>(m: f64, v: f64) -> f64 {
        F::ratio(m, v)
    }
    #[inline(always)]
    fn exact(m: f64, v: f64) -> f64 {
        m / v
    }
    #[inline(always)]
    fn rounded(steps: f64, m: f64, _shrink: f64) -> f64 {
        // The nearest odd number: there is none between the two signs.
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
            $crate::codec::moment::Rule::Root => {
                type $R = $crate::codec::moment::rule::Root;
                $call
            }
            $crate::codec::moment::Rule::Norm => {
                type $R = $crate::codec::moment::rule::Norm;
                $call
            }
            $crate::codec::moment::Rule::Inward => {
                type $R = $crate::codec::moment::rule::Inward;
                $call
            }
            $crate::codec::moment::Rule::Sign => {
                type $R = $crate::codec::moment::rule::Sign;
                $call
            }
        }
    };
}

pub(super) use for_rule;
