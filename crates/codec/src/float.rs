//! The floating-point types of the lattice: exact widening to f64, and rounding back.
//!
//! An f64 is rounded once, to the nearest element; of two equally near ones, to the even one. For the 16-bit types the
//! f64 first becomes an f32, so it is rounded twice. If the f32 is not exact, its last bit is set (*rounding to odd*):
//! then it never looks like the middle of two elements, and both roundings together give what one would. (Boldo and
//! Melquiond, "When double rounding is odd", 2005: two spare bits suffice, f32 has 13 and 16.) There is no branch on
//! values, so the compiler may vectorize it, and the bits are the same on every machine.

use std::ops::{Add, Div, Mul, Neg};

/// A floating-point element in its stored, little-endian form.
pub trait Float {
    /// Its bytes.
    type Bytes: Copy;
    /// The precision of roots and quotients: f32 for the types that f32 holds, else f64.
    type Work: Real;
    /// True if f32 holds every element exactly.
    const IN_F32: bool;
    /// The bytes as whole elements; a remainder is left out.
    fn elements(data: &[u8]) -> &[Self::Bytes];
    /// The bytes as whole elements, mutable.
    fn elements_mut(data: &mut [u8]) -> &mut [Self::Bytes];
    /// Largest finite value.
    const LARGEST: f64;
    /// Smallest positive value, a subnormal. For f64 it is the smallest normal value, since only f64 itself could hold
    /// its subnormals.
    const LEAST: f64;
    /// The value in f32: exact if [`Float::IN_F32`].
    fn single(element: Self::Bytes) -> f32;
    /// The element nearest to an f32, ties to even.
    fn of_single(value: f32) -> Self::Bytes;
    /// True if an f32 may lie in the middle of two elements. If that f32 was rounded from another number,
    /// [`Float::of_single`] of it may be another element than [`Float::round`] of the number.
    fn may_be_tie(value: f32) -> bool;
    /// The value, exactly.
    fn widen(element: Self::Bytes) -> f64;
    /// The nearest element, ties to even.
    fn round(value: f64) -> Self::Bytes;
    /// The bits, for exceptions.
    fn to_raw(element: Self::Bytes) -> u64;
    /// The element with these bits; `None` if they are too many.
    fn from_raw(raw: u64) -> Option<Self::Bytes>;
}

/// The numbers that a loop computes with. The format's results are those of f64. A loop in f32 is faster, because a
/// vector has twice as many numbers, and marks each element where f64 may give another one.
pub trait Real:
    Copy
    + Default
    + PartialOrd
    + Into<f64>
    + Add<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
{
    /// Largest finite value.
    const MAX: Self;
    /// Bits of the fraction.
    const FRACTION: u32;
    /// Number of exponents of normal numbers.
    const EXPONENTS: u32;
    /// The exponent's bias is this much below that of f64.
    const BELOW: i32;
    /// An element's value; f32 must hold it.
    fn of<F: Float>(element: F::Bytes) -> Self;
    /// The nearest element, ties to even.
    fn element<F: Float>(self) -> F::Bytes;
    /// The nearest number to an f64.
    fn near(value: f64) -> Self;
    /// The nearest number to an integer.
    fn of_integer(value: i32) -> Self;
    /// The square root, correctly rounded.
    fn sqrt(self) -> Self;
    /// The magnitude.
    fn abs(self) -> Self;
    /// Itself, or 0 unless `kept`: without a branch, which would keep a loop from being vectorized.
    fn only_if(self, kept: bool) -> Self;
    /// The highest bits, down to so many of the fraction.
    fn high_bits(self, fraction: u32) -> i32;
    /// The number with these high bits and no others.
    fn of_high_bits(bits: i32, fraction: u32) -> Self;
    /// True for 0 without a sign.
    fn is_plain_zero(self) -> bool;
    /// True if this product, computed in f64, may give another element.
    fn is_in_doubt<F: Float>(self) -> bool;
    /// The element nearest to a sum, and whether the sum in f64 may give another one.
    fn sum<F: Float>(self, x: Self) -> (F::Bytes, bool);
}

macro_rules! real {
    ($real:ty, $bits:ty, $fraction:expr, $below:expr, $of:ident, $element:ident, |$doubted:ident, $F:ident| $in_doubt:expr,
     |$k:ident, $x:ident, $G:ident| $sum:expr) => {
        impl Real for $real {
            const MAX: $real = <$real>::MAX;
            const FRACTION: u32 = $fraction;
            const EXPONENTS: u32 = <$real>::MAX_EXP as u32 * 2 - 2;
            const BELOW: i32 = $below;
            #[inline(always)]
            fn of<F: Float>(element: F::Bytes) -> $real {
                F::$of(element)
            }
            #[inline(always)]
            fn element<F: Float>(self) -> F::Bytes {
                F::$element(self)
            }
            #[inline(always)]
            #[allow(clippy::unnecessary_cast)]
            fn near(value: f64) -> $real {
                value as $real
            }
            #[inline(always)]
            fn of_integer(value: i32) -> $real {
                value as $real
            }
            #[inline(always)]
            fn sqrt(self) -> $real {
                <$real>::sqrt(self)
            }
            #[inline(always)]
            fn abs(self) -> $real {
                <$real>::abs(self)
            }
            #[inline(always)]
            fn only_if(self, kept: bool) -> $real {
                <$real>::from_bits(self.to_bits() & <$bits>::from(!kept).wrapping_sub(1))
            }
            #[inline(always)]
            fn high_bits(self, fraction: u32) -> i32 {
                (self.to_bits() >> (Self::FRACTION - fraction)) as i32
            }
            #[inline(always)]
            fn of_high_bits(bits: i32, fraction: u32) -> $real {
                <$real>::from_bits((bits as $bits) << (Self::FRACTION - fraction))
            }
            #[inline(always)]
            fn is_plain_zero(self) -> bool {
                self.to_bits() == 0
            }
            #[inline(always)]
            fn is_in_doubt<$F: Float>(self) -> bool {
                let $doubted = self;
                $in_doubt
            }
            #[inline(always)]
            fn sum<$G: Float>(self, $x: $real) -> ($G::Bytes, bool) {
                let $k = self;
                $sum
            }
        }
    };
}

real!(f64, u64, 52, 0, widen, round, |_value, F| false, |k, x, F| (F::round(k + x), false));
real!(f32, u32, 23, 1023 - 127, single, of_single, |value, F| F::may_be_tie(value), |k, x, F| {
    let sum = k + x;
    // The error of the sum (Knuth, TAOCP 2, section 4.2.2, theorem B).
    let of_x = sum - k;
    let rounded_off = (k - (sum - of_x)) + (x - of_x);
    (F::of_single(sum), F::may_be_tie(sum) & (rounded_off != 0.0))
});

/// IEEE's half precision.
pub struct F16;
/// bfloat16: the upper half of an f32.
pub struct Bf16;
pub(crate) struct F32;
pub(super) struct F64;

/// Calls a generic function for the element type, or returns `$else` if the type is none of these four.
macro_rules! for_float {
    ($dtype:expr, $F:ident => $call:expr, else $else:expr) => {
        match $dtype {
            $crate::Dtype::F16 => {
                type $F = $crate::float::F16;
                $call
            }
            $crate::Dtype::Bf16 => {
                type $F = $crate::float::Bf16;
                $call
            }
            $crate::Dtype::F32 => {
                type $F = $crate::float::F32;
                $call
            }
            $crate::Dtype::F64 => {
                type $F = $crate::float::F64;
                $call
            }
            _ => $else,
        }
    };
}

pub(super) use for_float;

macro_rules! float {
    (
        $name:ident, $in_f32:expr, $bits:ty, $least:expr, $largest:expr, $work:ty,
        |$s:ident| $single:expr, |$narrow:ident| $of_single:expr, |$tie:ident| $may_be_tie:expr,
        |$b:ident| $widen:expr, |$value:ident| $round:expr
    ) => {
        impl Float for $name {
            type Bytes = [u8; size_of::<$bits>()];
            type Work = $work;
            const IN_F32: bool = $in_f32;
            const LARGEST: f64 = $largest;
            const LEAST: f64 = f64::from_bits(((1023i64 + $least) as u64) << 52);
            #[inline(always)]
            fn elements(data: &[u8]) -> &[Self::Bytes] {
                data.as_chunks().0
            }
            #[inline(always)]
            fn elements_mut(data: &mut [u8]) -> &mut [Self::Bytes] {
                data.as_chunks_mut().0
            }
            #[inline(always)]
            fn single(element: Self::Bytes) -> f32 {
                let $s = <$bits>::from_le_bytes(element);
                $single
            }
            #[inline(always)]
            fn of_single($narrow: f32) -> Self::Bytes {
                let bits: $bits = $of_single;
                bits.to_le_bytes()
            }
            #[inline(always)]
            fn may_be_tie($tie: f32) -> bool {
                $may_be_tie
            }
            #[inline(always)]
            fn widen(element: Self::Bytes) -> f64 {
                let $b = <$bits>::from_le_bytes(element);
                $widen
            }
            #[inline(always)]
            fn round($value: f64) -> Self::Bytes {
                let bits: $bits = $round;
                bits.to_le_bytes()
            }
            fn to_raw(element: Self::Bytes) -> u64 {
                <$bits>::from_le_bytes(element).into()
            }
            fn from_raw(raw: u64) -> Option<Self::Bytes> {
                Some(<$bits>::try_from(raw).ok()?.to_le_bytes())
            }
        }
    };
}

float!(
    F16,
    true,
    u16,
    -24,
    65504.0,
    f32,
    |bits| f16_to_f32(bits),
    |value| f32_to_f16(value),
    |_value| true,
    |bits| f16_to_f32(bits).into(),
    |value| f32_to_f16(round_to_odd(value))
);
float!(
    Bf16,
    true,
    u16,
    -133,
    f32::from_bits(0x7f7f_0000) as f64,
    f32,
    |bits| f32::from_bits(u32::from(bits) << 16),
    |value| f32_to_bf16(value),
    |value| value.to_bits() & 0xffff == 0x8000,
    |bits| f32::from_bits(u32::from(bits) << 16).into(),
    |value| f32_to_bf16(round_to_odd(value))
);
float!(
    F32,
    true,
    u32,
    -149,
    f32::MAX as f64,
    f32,
    |bits| f32::from_bits(bits),
    |value| value.to_bits(),
    |_value| false,
    |bits| f32::from_bits(bits).into(),
    |value| (value as f32).to_bits()
);
float!(
    F64,
    false,
    u64,
    -1022,
    f64::MAX,
    f64,
    |bits| f64::from_bits(bits) as f32,
    |value| f64::from(value).to_bits(),
    |_value| true,
    |bits| f64::from_bits(bits),
    |value| value.to_bits()
);

/// The f32 next to `value` on the side of zero, with its last bit set; `value` itself if it is one.
#[inline(always)]
fn round_to_odd(value: f64) -> f32 {
    let nearest = value as f32;
    let back = f64::from(nearest);
    let towards_zero = nearest.to_bits().wrapping_sub(u32::from(back.abs() > value.abs()));
    f32::from_bits(towards_zero | u32::from(back != value))
}

#[inline(always)]
fn f32_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    // Rounding must not turn a NaN into an infinity or a zero.
    (if value.is_nan() { bits >> 16 | 0x40 } else { rounded }) as u16
}

#[inline(always)]
fn f16_to_f32(half: u16) -> f32 {
    let magnitude = u32::from(half & 0x7fff);
    let sign = u32::from(half & 0x8000) << 16;
    // The exponent's bias is 15 there and 127 here. An exact subtraction makes subnormals normal.
    let normal = (magnitude << 13) + ((127 - 15) << 23);
    let subnormal =
        (f32::from_bits((magnitude << 13) + ((128 - 15) << 23)) - f32::from_bits((128 - 15) << 23)).to_bits();
    let special = (magnitude << 13) | 0x7f80_0000;
    let bits = if magnitude < 0x400 {
        subnormal
    } else if magnitude >= 0x7c00 {
        special
    } else {
        normal
    };
    f32::from_bits(sign | bits)
}

#[inline(always)]
fn f32_to_f16(value: f32) -> u16 {
    let sign = value.to_bits() >> 16 & 0x8000;
    let magnitude = value.to_bits() & 0x7fff_ffff;
    // Normal results: rebias, round to nearest even on 13 bits. From 65520 on that carries into infinity.
    let rebiased = magnitude.wrapping_sub((127 - 15) << 23);
    let normal = rebiased.wrapping_add(0xfff + (rebiased >> 13 & 1)) >> 13;
    // Subnormal results: the sum's last place is that of the subnormals, so the addition itself rounds to nearest even.
    let magic = 0.5f32;
    let subnormal = (f32::from_bits(magnitude) + magic).to_bits().wrapping_sub(magic.to_bits());
    let bits = if magnitude > 0x7f80_0000 {
        0x7e00
    } else if magnitude >= 0x477f_f000 {
        0x7c00
    } else if magnitude < 113 << 23 {
        subnormal
    } else {
        normal
    };
    (sign | bits) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_widens_exactly_and_rounds_back() {
        for bits in 0..=u16::MAX {
            let wide = F16::widen(bits.to_le_bytes());
            let oracle = half::f16::from_bits(bits);
            if oracle.is_nan() {
                assert!(wide.is_nan());
            } else {
                assert_eq!(wide.to_bits(), oracle.to_f64().to_bits(), "{bits:04x}");
                assert_eq!(F16::round(wide), bits.to_le_bytes());
            }
            let wide = Bf16::widen(bits.to_le_bytes());
            let oracle = half::bf16::from_bits(bits);
            if oracle.is_nan() {
                assert!(wide.is_nan() && Bf16::widen(Bf16::round(wide)).is_nan());
            } else {
                assert_eq!(wide.to_bits(), oracle.to_f64().to_bits(), "{bits:04x}");
                assert_eq!(Bf16::round(wide), bits.to_le_bytes());
            }
        }
    }

    /// Between every two neighbours: their midpoint (a tie), and the values just off it and just off the ends.
    #[test]
    fn rounding_is_to_nearest_even_between_all_neighbours() {
        fn check<F: Float<Bytes = [u8; 2]>>(infinity: u16) {
            for low in 0..infinity - 1 {
                let (a, b) = (F::widen(low.to_le_bytes()), F::widen((low + 1).to_le_bytes()));
                let middle = a + (b - a) / 2.0;
                let even = low + (low & 1);
                for (value, want) in [
                    (middle, even),
                    (middle.next_down(), low),
                    (middle.next_up(), low + 1),
                    (a.next_up(), low),
                    (b.next_down(), low + 1),
                ] {
                    assert_eq!(u16::from_le_bytes(F::round(value)), want, "{value:e} above {low:04x}");
                    assert_eq!(u16::from_le_bytes(F::round(-value)), want | 0x8000, "{value:e} above -{low:04x}");
                }
            }
            let largest = F::widen((infinity - 1).to_le_bytes());
            let step = largest - F::widen((infinity - 2).to_le_bytes());
            assert_eq!(u16::from_le_bytes(F::round((largest + step / 2.0).next_down())), infinity - 1);
            for value in [largest + step / 2.0, largest * 2.0, f64::MAX, f64::INFINITY] {
                assert_eq!(u16::from_le_bytes(F::round(value)), infinity);
            }
        }
        check::<F16>(0x7c00);
        check::<Bf16>(0x7f80);
    }
}
