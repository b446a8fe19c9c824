//! Floats as integers in the order of their values: neighbours differ by one, and a small update is a small difference.

/// How an element's bits become an integer with small differences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// The bits already are one.
    Integer,
    /// Sign and magnitude, as in every IEEE-like float: negative values count downwards.
    Float,
}

/// An element of 1, 2, 4 or 8 bytes as an unsigned integer.
pub(super) trait Word: Copy {
    /// Its bytes, little-endian.
    type Bytes: Copy;
    /// Number of bytes.
    const BYTES: usize;
    fn from_bytes(bytes: Self::Bytes) -> Self;
    fn to_bytes(self) -> Self::Bytes;
    fn elements(data: &[u8]) -> &[Self::Bytes];
    fn elements_mut(data: &mut [u8]) -> &mut [Self::Bytes];
    /// Byte `i`, counted from the lowest.
    fn byte(self, i: usize) -> u8;
    /// A word with only byte `i` set.
    fn from_byte(byte: u8, i: usize) -> Self;
    fn or(self, other: Self) -> Self;
    /// zigzag(order(self) - order(parent)), wrapping: reversible for any bits.
    fn difference(self, parent: Self, order: Order) -> Self;
    /// The element with this [`Word::difference`] to `parent`.
    fn undo(self, parent: Self, order: Order) -> Self;
    /// A float's sign moved below its mantissa, so that the top byte is all exponent.
    fn exponent_first(self) -> Self;
    /// Undoes [`Word::exponent_first`].
    fn sign_first(self) -> Self;
}

/// The sign bit.
macro_rules! sign {
    ($u:ty) => {
        (1 as $u).rotate_right(1)
    };
}

/// Positive floats: sign bit set, above all negative ones; negative floats: all bits inverted.
macro_rules! ordered {
    ($x:expr, $order:expr, $u:ty, $i:ty) => {
        match $order {
            Order::Integer => $x,
            Order::Float => $x ^ ((($x as $i) >> (<$i>::BITS - 1)) as $u | sign!($u)),
        }
    };
}

macro_rules! word {
    ($u:ty, $i:ty) => {
        impl Word for $u {
            type Bytes = [u8; size_of::<$u>()];
            const BYTES: usize = size_of::<$u>();
            #[inline(always)]
            fn from_bytes(bytes: Self::Bytes) -> Self {
                <$u>::from_le_bytes(bytes)
            }
            #[inline(always)]
            fn to_bytes(self) -> Self::Bytes {
                self.to_le_bytes()
            }
            #[inline(always)]
            fn elements(data: &[u8]) -> &[Self::Bytes] {
                data.as_chunks().0
            }
            #[inline(always)]
            fn elements_mut(data: &mut [u8]) -> &mut [Self::Bytes] {
                data.as_chunks_mut().0
            }
            #[inline(always)]
            fn byte(self, i: usize) -> u8 {
                (self >> (8 * i)) as u8
            }
            #[inline(always)]
            fn from_byte(byte: u8, i: usize) -> Self {
                (byte as $u) << (8 * i)
            }
            #[inline(always)]
            fn or(self, other: Self) -> Self {
                self | other
            }
            #[inline(always)]
            fn difference(self, parent: Self, order: Order) -> Self {
                let d = ordered!(self, order, $u, $i).wrapping_sub(ordered!(parent, order, $u, $i)) as $i;
                ((d << 1) ^ (d >> (<$i>::BITS - 1))) as $u
            }
            #[inline(always)]
            fn undo(self, parent: Self, order: Order) -> Self {
                let d = (self >> 1) ^ (self & 1).wrapping_neg();
                let sum = ordered!(parent, order, $u, $i).wrapping_add(d);
                match order {
                    Order::Integer => sum,
                    // The map is not its own inverse: below the middle the magnitude is inverted, sign included.
                    Order::Float => sum ^ (!((sum as $i) >> (<$i>::BITS - 1)) as $u | sign!($u)),
                }
            }
            #[inline(always)]
            fn exponent_first(self) -> Self {
                self.rotate_left(1)
            }
            #[inline(always)]
            fn sign_first(self) -> Self {
                self.rotate_right(1)
            }
        }
    };
}

word!(u8, i8);
word!(u16, i16);
word!(u32, i32);
word!(u64, i64);
