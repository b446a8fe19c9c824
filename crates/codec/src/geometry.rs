//! The position of a tile's elements in their tensor.

/// The position of a tile's elements in rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// Elements of one row.
    pub width: u64,
    /// Index of the tile's first element in the tensor.
    pub first: u64,
}

impl Rows {
    /// Lengths of the rows in a tile of this many elements, including cut rows at its ends. Width 0 has none.
    pub(super) fn lengths(self, elements: usize) -> impl Iterator<Item = usize> {
        let width = usize::try_from(self.width).unwrap_or(usize::MAX);
        let mut length = self.width.saturating_sub(self.first.checked_rem(self.width).unwrap_or(0));
        let mut left = if width == 0 { 0 } else { elements };
        std::iter::from_fn(move || {
            let now = left.min(usize::try_from(length).unwrap_or(usize::MAX));
            (left, length) = (left - now, self.width);
            (now > 0).then_some(now)
        })
    }
}
