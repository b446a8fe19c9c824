//! Tables whose rows have ids and stand in a file in any order.
//!
//! stepfs archives such a file with each table's rows in ascending order of their ids, so that a row is compared with
//! the same row of another state. Its length and all bytes outside of tables are the file's. The ids are among those,
//! so they give each row's place.

use std::collections::{HashMap, HashSet};
use std::io;
use std::ops::Range;
use std::sync::Arc;

use super::{Description, ReadAt, Tensor};

/// The rows of a table. Ids are distinct.
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    /// Index in `Description::tensors`.
    pub tensor: usize,
    /// Ids, ascending.
    ids: Vec<u64>,
    rows: Rows,
}

/// Rows in an order of their own: which of those in the file comes where.
#[derive(Clone, Debug, PartialEq)]
struct Rows {
    /// Where they are in the ordered file.
    at: Range<u64>,
    /// Where the table begins in the file.
    from: u64,
    /// Bytes of a row: at least 1.
    row: u64,
    /// Number in the file of each row. Empty: they are in order.
    places: Arc<Vec<u32>>,
}

impl Rows {
    fn place(&self, number: usize) -> u64 {
        let place = self.places.get(number).map_or(number as u64, |place| u64::from(*place));
        self.from + place * self.row
    }

    /// See [`Order::runs`]; `range` lies in the table.
    fn runs<E>(&self, range: Range<u64>, run: &mut impl FnMut(Range<u64>, u64) -> Result<(), E>) -> Result<(), E> {
        let mut at = range.start;
        while at < range.end {
            let number = (at - self.at.start) / self.row;
            let begin = self.at.start + number * self.row;
            let place = self.place(number as usize);
            let mut end = begin + self.row;
            let mut next = number + 1;
            // Rows that stay together are one piece.
            while end < range.end && self.place(next as usize) == place + (end - begin) {
                end += self.row;
                next += 1;
            }
            let end = end.min(range.end);
            run(at..end, place + (at - begin))?;
            at = end;
        }
        Ok(())
    }
}

impl Table {
    /// A table whose rows have these ids, in the file's order. At most 2^32 rows, of `row` bytes each, which `extent`
    /// is.
    pub(super) fn new(tensor: usize, extent: Range<u64>, row: u64, ids: &[u64]) -> Table {
        let mut places: Vec<u32> = Vec::new();
        if !ids.is_sorted() {
            places.extend((0..).zip(ids).map(|(number, _): (u32, _)| number));
            places.sort_unstable_by_key(|place| ids[*place as usize]);
        }
        let ids = match places.is_empty() {
            true => ids.to_vec(),
            false => places.iter().map(|place| ids[*place as usize]).collect(),
        };
        Table { tensor, ids, rows: Rows { from: extent.start, at: extent, row, places: Arc::new(places) } }
    }

    /// Whether two rows have the same id.
    pub(super) fn has_twins(&self) -> bool {
        self.ids.windows(2).any(|w| w[0] == w[1])
    }

    /// The rows with these ids, ascending; `None` if it has not all of them.
    fn select(&self, ids: &[u64]) -> Option<Vec<u32>> {
        let mut own = self.ids.iter().enumerate();
        let place = |id: &u64| {
            let (number, _) = own.find(|(_, own)| *own == id)?;
            Some(self.rows.places.get(number).copied().unwrap_or(number as u32))
        };
        ids.iter().map(place).collect()
    }
}

/// Where the rows of a file's tables belong that are not in the order of their ids.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Order {
    /// By ascending place.
    tables: Vec<Rows>,
}

impl Order {
    /// The order of the described file.
    pub fn of(description: &Description) -> Order {
        let rows = description.tables.iter().map(|table| &table.rows);
        Order { tables: rows.filter(|rows| !rows.places.is_empty()).cloned().collect() }
    }

    /// Whether the ordered file is the file.
    pub fn is_kept(&self) -> bool {
        self.tables.is_empty()
    }

    /// Calls `run` with the pieces of a range of the ordered file, and where in the file each begins.
    ///
    /// # Errors
    /// The first that `run` returns.
    pub fn runs<E>(&self, range: Range<u64>, mut run: impl FnMut(Range<u64>, u64) -> Result<(), E>) -> Result<(), E> {
        let mut at = range.start;
        let first = self.tables.partition_point(|rows| rows.at.end <= at);
        for rows in self.tables[first..].iter().take_while(|rows| rows.at.start < range.end) {
            if at < rows.at.start {
                run(at..rows.at.start, at)?;
                at = rows.at.start;
            }
            let end = rows.at.end.min(range.end);
            rows.runs(at..end, &mut run)?;
            at = end;
        }
        if at < range.end { run(at..range.end, at) } else { Ok(()) }
    }

    /// The bytes of the ordered file in which a range of the file lies: those of whole tables, where it touches one.
    pub fn around(&self, range: Range<u64>) -> Range<u64> {
        let first = self.tables.partition_point(|rows| rows.at.end <= range.start);
        let tables = self.tables[first..].iter().take_while(|rows| rows.at.start < range.end);
        tables.fold(range.clone(), |all, rows| all.start.min(rows.at.start)..all.end.max(rows.at.end))
    }
}

/// A file with the rows of its tables in the order of their ids, as it is archived.
pub struct InOrder<'a> {
    file: &'a (dyn ReadAt + Sync),
    order: Order,
    size: u64,
}

impl<'a> InOrder<'a> {
    /// The described file.
    pub fn new(file: &'a (dyn ReadAt + Sync), description: &Description) -> InOrder<'a> {
        InOrder { file, order: Order::of(description), size: file.size() }
    }

    /// The described file as a later state of another one. A larger table is cut to the rows that the other one has.
    /// A table that lacks some of them is left out. Returns also the description of the readable part.
    pub fn as_later_state(
        file: &'a (dyn ReadAt + Sync),
        description: &Description,
        of: &Description,
    ) -> (InOrder<'a>, Description) {
        let mut view = InOrder::new(file, description);
        let mut tensors = description.tensors.clone();
        let mut gone = HashSet::new();
        let earlier: HashMap<&str, &Table> =
            of.tables.iter().map(|t| (of.tensors[t.tensor].path.as_str(), t)).collect();
        for table in &description.tables {
            let tensor: &mut Tensor = &mut tensors[table.tensor];
            let Some(earlier) = earlier.get(tensor.path.as_str()).filter(|earlier| earlier.ids != table.ids) else {
                continue;
            };
            let other = &of.tensors[earlier.tensor];
            match table.select(&earlier.ids).filter(|_| earlier.rows.row == table.rows.row) {
                Some(places) => {
                    // Behind the file, where nothing else is.
                    let at = view.size..view.size + other.bytes();
                    view.size = at.end;
                    (tensor.extent, tensor.shape) = (at.clone(), other.shape.clone());
                    let Rows { from, row, .. } = table.rows;
                    view.order.tables.push(Rows { at, from, row, places: Arc::new(places) });
                }
                None => {
                    gone.insert(table.tensor);
                }
            }
        }
        let mut index = 0..;
        tensors.retain(|_| index.next().is_none_or(|index| !gone.contains(&index)));
        (view, Description::new(description.kind, tensors, super::proof::Training::default()))
    }
}

impl ReadAt for InOrder<'_> {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let end = offset.checked_add(buf.len() as u64).ok_or(io::ErrorKind::UnexpectedEof)?;
        self.order.runs(offset..end, |range, place| {
            self.file.read_exact_at(&mut buf[(range.start - offset) as usize..(range.end - offset) as usize], place)
        })
    }
}
