//! Large files in pieces, on all cores.

use std::ops::Range;

use rayon::prelude::*;

/// Bytes that a thread takes at a time: so many that waking it costs nothing, and so few that all threads end together. Whole
/// elements of every type.
const SPAN: u64 = 4 << 20;

/// Cuts a range of bytes into spans.
pub(super) fn spans(range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let end = range.end;
    range.step_by(SPAN as usize).map(move |at| at..end.min(at + SPAN))
}

/// Makes something of each item, and answers in the order of the items. Threads take the items in that order, so that files
/// are read from front to back. Each thread has one `S` to work in.
///
/// # Errors
/// One of `make`; no thread takes an item after it.
pub(super) fn in_order<S: Default, I: Send, T: Send, E: Send>(
    items: impl Iterator<Item = I> + Send,
    make: impl Fn(&mut S, I) -> Result<T, E> + Sync,
) -> Result<Vec<T>, E> {
    let made = items.enumerate().par_bridge().map_init(S::default, |room, (at, item)| Ok((at, make(room, item)?)));
    let mut made = made.collect::<Result<Vec<_>, E>>()?;
    made.sort_unstable_by_key(|(at, _)| *at);
    Ok(made.into_iter().map(|(_, made)| made).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_come_in_the_order_of_the_items_until_one_fails() {
        for threads in [1, 3] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let of = |fails: u64| {
                pool.install(|| in_order(0..1000, |(): &mut (), item| if item == fails { Err(item) } else { Ok(item) }))
            };
            assert_eq!(of(1000), Ok((0..1000).collect()));
            assert_eq!(of(7), Err(7));
        }
    }

    #[test]
    fn spans_are_the_range() {
        let found = |range: Range<u64>| spans(range).map(|span| (span.start, span.end)).collect::<Vec<_>>();
        assert_eq!(found(5..5), []);
        assert_eq!(found(5..SPAN + 5), [(5, SPAN + 5)]);
        assert_eq!(found(5..2 * SPAN), [(5, SPAN + 5), (SPAN + 5, 2 * SPAN)]);
    }
}
