//! The pickle machine, on symbols.

use std::collections::HashMap;

use super::super::ReadAt;
use super::super::input::Input;
use super::super::read::{Fail, bad, refuse_if};
use super::{Elements, Graph, Item, MAX_CELLS, Node, Object};

/// Values on the stack at a time (64 MiB). Picklers put at most 1,000 per open container there, except for tuples.
const MAX_STACK: usize = 4 << 20;

/// Opcodes run, about two seconds. A pickle that needs more is not a checkpoint's index but its data.
const MAX_OPS: u64 = 256 << 20;

/// Loads the pickle that starts at `start` and ends before `end`. Bytes are passed over.
pub(crate) fn load(src: &dyn ReadAt, start: u64, end: u64) -> Result<Graph, Fail> {
    run(src, start, end, false)
}

/// Loads a pickle, and keeps the places of bytes, and of arrays that joblib writes behind their wrappers.
pub(crate) fn load_arrays(src: &dyn ReadAt, start: u64, end: u64) -> Result<Graph, Fail> {
    run(src, start, end, true)
}

fn run(src: &dyn ReadAt, start: u64, end: u64, arrays: bool) -> Result<Graph, Fail> {
    let mut vm = Vm {
        src,
        end,
        arrays,
        input: Input::new("pickle", src, start, end),
        graph: Graph { end, ..Graph::new() },
        stack: Vec::new(),
        marks: Vec::new(),
        memo: Memo::default(),
        cells: 0,
        line: Vec::new(),
    };
    for _ in 0..MAX_OPS {
        let op = vm.input.byte()?;
        if op == b'.' {
            vm.graph.root = vm.pop()?;
            vm.graph.end = vm.input.position();
            return Ok(vm.graph);
        }
        vm.step(op)?;
    }
    bad("pickle: too many opcodes")
}

/// The empty tuple, which is everywhere in torch's pickles, is the graph's first node.
const EMPTY: Item = Item::Node(0);

pub(super) struct Vm<'a> {
    pub(super) src: &'a dyn ReadAt,
    /// Where the pickle must end at the latest.
    pub(super) end: u64,
    /// Whether places of bytes are kept.
    pub(super) arrays: bool,
    pub(super) input: Input<'a>,
    pub(super) graph: Graph,
    stack: Vec<Item>,
    /// Stack heights at each open MARK.
    marks: Vec<u32>,
    memo: Memo,
    cells: usize,
    /// The last line read.
    pub(super) line: Vec<u8>,
}

impl Vm<'_> {
    /// Runs an opcode. Most put a value on the stack.
    fn step(&mut self, op: u8) -> Result<(), Fail> {
        let item = match op {
            // Frames and the protocol's number change nothing for a reader that looks at every byte.
            0x80 if self.input.byte()? > 5 => return bad("pickle: protocol newer than 5"),
            0x80 => return Ok(()),
            0x95 => return self.input.skip(8),

            b'N' => Item::None,
            0x88 => Item::Bool(true),
            0x89 => Item::Bool(false),
            b'K' => Item::Int(self.input.byte()?.into()),
            b'M' => Item::Int(u16::from_le_bytes(self.input.array()?).into()),
            b'J' => Item::Int(i32::from_le_bytes(self.input.array()?).into()),
            0x8a | 0x8b => {
                let n = self.length(op)?;
                self.long(n)?
            }
            b'G' => Item::Float(f64::from_be_bytes(self.input.array()?)),

            b'T' | b'U' | b'X' | 0x8c | 0x8d => {
                let n = self.length(op)?;
                self.string(n)?
            }
            b'B' | b'C' | 0x8e | 0x96 => {
                let n = self.length(op)?;
                self.bytes(n)?
            }
            0x97 => Item::Scalar,
            0x98 => return self.top().map(drop),

            b'(' if self.marks.len() >= MAX_STACK => return bad("pickle: nested too deeply"),
            b'(' => {
                self.marks.push(self.stack.len() as u32);
                return Ok(());
            }
            // A POP on an empty level takes its MARK, as Python's own unpickler does.
            b'0' if self.marks.last() == Some(&(self.stack.len() as u32)) => return self.mark().map(drop),
            b'0' => return self.pop().map(drop),
            b'1' => {
                let at = self.mark()?;
                self.stack.truncate(at);
                return Ok(());
            }
            b'2' => self.top()?,

            b')' => EMPTY,
            b't' => {
                let at = self.mark()?;
                self.tuple(at)?
            }
            0x85..=0x87 => {
                let at = self.below(usize::from(op - 0x84))?;
                self.tuple(at)?
            }
            b']' | 0x8f => self.add(Node::List(Elements::default()), 4)?,
            0x91 => {
                let at = self.mark()?;
                let list = self.add(Node::List(Elements::default()), 4)?;
                self.append(list, at)?;
                list
            }
            b'}' => self.add(Node::Dict(Vec::new()), 4)?,
            b'a' | b'e' | 0x90 => {
                let at = if op == b'a' { self.below(1)? } else { self.mark()? };
                let target = self.under(at)?;
                return self.append(target, at);
            }
            b's' | b'u' => {
                let at = if op == b's' { self.below(2)? } else { self.mark()? };
                let target = self.under(at)?;
                return self.set(target, at);
            }

            b'c' => self.global()?,
            0x93 => {
                let name = self.pop()?;
                let module = self.pop()?;
                self.add(Node::Global(module, name), 4)?
            }
            0x82..=0x84 => {
                self.input.skip(1 << (op - 0x82))?;
                Item::Scalar
            }
            b'R' | 0x81 => {
                let args = self.pop()?;
                let func = self.pop()?;
                self.object(func, args, Item::None)?
            }
            0x92 => {
                let kwargs = self.pop()?;
                let args = self.pop()?;
                let func = self.pop()?;
                self.object(func, args, kwargs)?
            }
            b'b' => {
                let state = self.pop()?;
                // State given to anything but an object would fail in Python; it is dropped, not followed.
                let Item::Node(target) = self.top()? else { return Ok(()) };
                self.charge(2)?;
                if let Node::Object(o) = &mut self.graph.nodes[target as usize] {
                    o.states.push(state);
                }
                return if self.arrays { self.raw_array(target) } else { Ok(()) };
            }
            b'Q' => {
                let id = self.pop()?;
                self.add(Node::Persid(id), 2)?
            }

            b'h' | b'j' => {
                let key = self.memo_key(op)?;
                self.memo.get(key).ok_or("pickle: a memo entry that was never made")?
            }
            b'q' | b'r' => {
                let key = self.memo_key(op)?;
                return self.memoize(key);
            }
            0x94 => return self.memoize(self.memo.len()),
            _ => return bad(format!("pickle: unknown opcode 0x{op:02x}")),
        };
        self.push(item)
    }

    pub(super) fn charge(&mut self, cells: usize) -> Result<(), Fail> {
        self.cells += cells;
        refuse_if(self.cells > MAX_CELLS, "pickle: too many values to keep track of")?;
        Ok(())
    }

    fn push(&mut self, item: Item) -> Result<(), Fail> {
        refuse_if(self.stack.len() >= MAX_STACK, "pickle: too many values on the stack")?;
        self.stack.push(item);
        Ok(())
    }

    pub(super) fn add(&mut self, node: Node, cells: usize) -> Result<Item, Fail> {
        // `MAX_CELLS` is far below 2^32.
        self.charge(cells)?;
        Ok(self.graph.add(node))
    }

    /// Height of the stack without its `n` top values, which must lie above the last MARK.
    fn below(&self, n: usize) -> Result<usize, Fail> {
        let floor = self.marks.last().map_or(0, |&m| m as usize);
        match self.stack.len().checked_sub(n) {
            Some(at) if at >= floor => Ok(at),
            _ => bad("pickle: a value is missing on the stack"),
        }
    }

    pub(super) fn pop(&mut self) -> Result<Item, Fail> {
        let at = self.below(1)?;
        let item = self.stack[at];
        self.stack.truncate(at);
        Ok(item)
    }

    fn top(&self) -> Result<Item, Fail> {
        Ok(self.stack[self.below(1)?])
    }

    /// The value just below height `at`.
    fn under(&self, at: usize) -> Result<Item, Fail> {
        let floor = self.marks.last().map_or(0, |&m| m as usize);
        match at.checked_sub(1) {
            Some(i) if i >= floor => Ok(self.stack[i]),
            _ => bad("pickle: a value is missing on the stack"),
        }
    }

    /// Closes the last MARK; returns the stack's height at it.
    fn mark(&mut self) -> Result<usize, Fail> {
        match self.marks.pop() {
            Some(at) => Ok(at as usize),
            None => bad("pickle: a MARK is missing"),
        }
    }

    /// Makes a tuple of everything from height `at`.
    fn tuple(&mut self, at: usize) -> Result<Item, Fail> {
        let values = &self.stack[at..];
        if values.is_empty() {
            return Ok(EMPTY);
        }
        self.cells += values.len();
        let tuple = self.graph.add_tuple(values);
        self.stack.truncate(at);
        self.charge(2)?;
        Ok(tuple)
    }

    /// Moves everything from height `at` to the end of the list `target`.
    fn append(&mut self, target: Item, at: usize) -> Result<(), Fail> {
        let added = &self.stack[at..];
        self.cells += 2 * added.iter().filter(|i| matches!(i, Item::Node(_))).count();
        let list = match node(&mut self.graph, target)? {
            Node::List(list) => list,
            Node::Object(o) => &mut o.list,
            _ => return bad("pickle: an element is appended to something other than a list"),
        };
        for (index, item) in (list.len..).zip(added) {
            if let Item::Node(n) = item {
                list.nodes.push((index, *n));
            }
        }
        list.len += added.len() as u64;
        self.stack.truncate(at);
        self.charge(0)
    }

    /// Sets the pairs from height `at` in the mapping `target`.
    fn set(&mut self, target: Item, at: usize) -> Result<(), Fail> {
        let values = &self.stack[at..];
        refuse_if(!values.len().is_multiple_of(2), "pickle: a key without a value")?;
        self.cells += 2 * values.len();
        let pairs = match node(&mut self.graph, target)? {
            Node::Dict(pairs) => pairs,
            Node::Object(o) => &mut o.pairs,
            _ => return bad("pickle: a key is set in something other than a mapping"),
        };
        pairs.extend(values.chunks_exact(2).map(|p| (p[0], p[1])));
        self.stack.truncate(at);
        self.charge(0)
    }

    fn object(&mut self, func: Item, args: Item, kwargs: Item) -> Result<Item, Fail> {
        self.add(Node::Object(Box::new(Object::call(func, args, kwargs))), 12)
    }

    /// A class or function, by the two lines that name it.
    fn global(&mut self) -> Result<Item, Fail> {
        let module = self.text_line()?;
        let name = self.text_line()?;
        self.add(Node::Global(module, name), 4)
    }

    fn memo_key(&mut self, op: u8) -> Result<u64, Fail> {
        Ok(match op {
            b'h' | b'q' => self.input.byte()?.into(),
            _ => u32::from_le_bytes(self.input.array()?).into(),
        })
    }

    fn memoize(&mut self, key: u64) -> Result<(), Fail> {
        let item = self.top()?;
        match self.memo.insert(key, item) {
            true => self.charge(3),
            false => Ok(()),
        }
    }
}

/// The node that something is put into.
fn node(graph: &mut Graph, item: Item) -> Result<&mut Node, Fail> {
    match item {
        Item::Node(n) => Ok(&mut graph.nodes[n as usize]),
        _ => bad("pickle: something is put into a plain value"),
    }
}

/// The machine's memo. Picklers count memo entries up from 0, but nothing makes them.
#[derive(Default)]
struct Memo {
    /// Entries 0, 1, ...
    dense: Vec<Item>,
    /// Those beyond a gap.
    sparse: HashMap<u64, Item>,
}

impl Memo {
    /// The entry, if it was made.
    fn get(&self, key: u64) -> Option<Item> {
        let dense = usize::try_from(key).ok().and_then(|k| self.dense.get(k));
        dense.or_else(|| self.sparse.get(&key)).copied()
    }

    /// Sets an entry; whether it is new.
    fn insert(&mut self, key: u64, item: Item) -> bool {
        let len = self.dense.len() as u64;
        if key < len {
            self.dense[key as usize] = item;
            false
        } else if key == len {
            self.dense.push(item);
            // The gap before it has closed.
            self.sparse.is_empty() || self.sparse.remove(&key).is_none()
        } else {
            self.sparse.insert(key, item).is_none()
        }
    }

    /// Number of entries.
    fn len(&self) -> u64 {
        (self.dense.len() + self.sparse.len()) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memo_is_a_map_whatever_the_order() {
        let mut memo = Memo::default();
        let keys = [2, 0, 1, 3, u64::MAX, 2, 4, 0];
        let new: Vec<bool> = (0..8).map(|i| memo.insert(keys[i], Item::Int(i as i64))).collect();
        assert_eq!(new, [true, true, true, true, true, false, true, false]);
        assert_eq!(memo.len(), 6);
        let got = [0, 1, 2, 3, 4, 5, u64::MAX].map(|k| memo.get(k));
        let want = [Some(7), Some(2), Some(5), Some(3), Some(6), None, Some(4)];
        assert_eq!(got, want.map(|w| w.map(Item::Int)));
    }
}
