//! Tables whose rows have ids and stand in a file in any order.
//!
//! What is archived of such a file is the file with each table's rows in ascending order of their ids, so that a row is
//! compared with the same row of another state. Its length and all bytes outside of tables are the file's; the ids are
//! among those, so they say where each row belongs.

use std::io;
use std::ops::Range;

use super::{Description, ReadAt};

/// The rows of a table. Ids are distinct.
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    /// Index in `Description::tensors`.
    pub tensor: usize,
    /// Bytes of the file.
    pub extent: Range<u64>,
    /// Bytes of a row: at least 1.
    pub row: u64,
    /// Ids, ascending.
    ids: Vec<u64>,
    /// Number in the file of each row, by ascending id. Empty if they are in that order.
    places: Vec<u32>,
}

impl Table {
    /// A table whose rows have these ids, in the file's order. At most 2^32 rows; `extent` is as long as they are.
    pub(super) fn new(tensor: usize, extent: Range<u64>, row: u64, ids: &[u64]) -> Table {
        let mut rows: Vec<(u64, u32)> = ids.iter().copied().zip(0..).collect();
        if rows.is_sorted() {
            return Table { tensor, extent, row, ids: ids.to_vec(), places: Vec::new() };
        }
        rows.sort_unstable();
        let (ids, places) = rows.into_iter().unzip();
        Table { tensor, extent, row, ids, places }
    }

    /// Whether two rows have the same id.
    pub(super) fn has_twins(&self) -> bool {
        self.ids.windows(2).any(|w| w[0] == w[1])
    }

    /// Where in the file the row is that is the `number`-th by its id.
    fn place(&self, number: usize) -> u64 {
        let place = self.places.get(number).map_or(number as u64, |place| u64::from(*place));
        self.extent.start + place * self.row
    }

    /// Whether the rows stand in the file in the order of their ids.
    pub fn is_in_order(&self) -> bool {
        self.places.is_empty()
    }

    /// Calls `run` with pieces of `range`, bytes of the file with its rows in the order of their ids: where each is in that
    /// file, and where in the file as it is. `range` lies in the table.
    pub fn runs(&self, range: Range<u64>, mut run: impl FnMut(Range<u64>, u64)) {
        let mut at = range.start;
        while at < range.end {
            let number = (at - self.extent.start) / self.row;
            let begin = self.extent.start + number * self.row;
            let place = self.place(number as usize);
            let mut end = begin + self.row;
            // Rows that stay together are one piece.
            let mut next = number + 1;
            while end < range.end && self.place(next as usize) == place + (end - begin) {
                end += self.row;
                next += 1;
            }
            let end = end.min(range.end);
            run(at..end, place + (at - begin));
            at = end;
        }
    }
}

/// A file with the rows of its tables in the order of their ids: what is archived of it.
pub struct InOrder<'a> {
    file: &'a (dyn ReadAt + Sync),
    /// Those that are not in order, by ascending extent.
    tables: Vec<&'a Table>,
}

impl<'a> InOrder<'a> {
    /// The described file.
    pub fn new(file: &'a (dyn ReadAt + Sync), description: &'a Description) -> InOrder<'a> {
        InOrder { file, tables: description.tables.iter().filter(|table| !table.is_in_order()).collect() }
    }
}

impl ReadAt for InOrder<'_> {
    fn size(&self) -> u64 {
        self.file.size()
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let end = offset.checked_add(buf.len() as u64).ok_or(io::ErrorKind::UnexpectedEof)?;
        let mut at = offset;
        let first = self.tables.partition_point(|table| table.extent.end <= offset);
        for table in &self.tables[first..] {
            let (from, to) = (table.extent.start.clamp(at, end), table.extent.end.min(end));
            self.file.read_exact_at(&mut buf[(at - offset) as usize..(from - offset) as usize], at)?;
            at = from;
            if from >= to {
                break;
            }
            let mut result = Ok(());
            table.runs(from..to, |range, place| {
                if result.is_ok() {
                    let run = &mut buf[(range.start - offset) as usize..(range.end - offset) as usize];
                    result = self.file.read_exact_at(run, place);
                }
            });
            result?;
            at = to;
        }
        self.file.read_exact_at(&mut buf[(at - offset) as usize..], at)
    }
}
