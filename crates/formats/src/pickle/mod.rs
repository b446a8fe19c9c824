//! The graph that a pickle would build, without executing anything.
//!
//! The machine in `vm` runs the opcodes of protocols 2 to 5 on symbols instead of objects. torch and joblib write older
//! protocols only if they are told. A class stays its name. A call stays the function, its arguments and all later
//! additions to the result. Nodes lie in an arena and refer to each other by index. Memo entries share nodes and can make
//! cycles, so walkers must expect both.
//!
//! A pickle of N bytes costs O(N) time. Memory: [`MAX_CELLS`] bounds the graph, at about 16 bytes a cell. Long
//! strings, bytes and big integers are passed over, so a pickled replay buffer costs nothing.

mod arrays;
mod strings;
mod values;
mod vm;

pub(super) use arrays::{element, is_wrapper};
pub(super) use strings::strings;
pub(super) use vm::{load, load_arrays};

use std::ops::Range;

/// Budget for the graph: 256 MiB (twice that for a moment, when an array grows). A tensor takes about 60 cells, so
/// this is enough for 250,000 tensors; the largest checkpoints known have a tenth.
pub(super) const MAX_CELLS: usize = 16 << 20;

/// Longest string whose text is kept. Keys and names are far shorter; longer ones are only counted.
pub(super) const MAX_TEXT: usize = 1 << 10;

/// Entries of a mapping among which a name is looked for: real ones have some dozens.
const MAX_ATTRIBUTES: usize = 256;

/// A value: a scalar, or a reference to a node.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Item {
    /// `None`.
    None,
    /// `True`, `False`.
    Bool(bool),
    /// An integer of at most 64 bits.
    Int(i64),
    /// A float.
    Float(f64),
    /// A string, in the graph's text.
    Str(Text),
    /// A string too long to keep, with its length in bytes.
    LongStr(u64),
    /// A value with nothing below it that matters: bytes, buffers, big integers, extension codes.
    Scalar,
    /// A node.
    Node(u32),
}

/// Place of a string in the graph's text.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Text {
    start: u32,
    len: u32,
}

/// A node of the graph.
#[derive(Debug)]
pub(super) enum Node {
    /// A tuple: `len` items from `start` in the graph's items.
    Tuple { start: u32, len: u32 },
    /// A list, set or frozenset.
    List(Elements),
    /// A dict's pairs in order.
    Dict(Vec<(Item, Item)>),
    /// A class or function: module and name, both strings.
    Global(Item, Item),
    /// A reference to something outside of the pickle: in torch's files, a storage.
    Persid(Item),
    /// The result of a call.
    Object(Box<Object>),
    /// Bytes, at this place of the source. Only [`load_arrays`] makes such nodes.
    Bytes(Range<u64>),
}

/// A list's elements. Scalars are only counted: nothing can be below them, and lists of numbers are long.
#[derive(Debug, Default)]
pub(super) struct Elements {
    pub(super) len: u64,
    /// The elements that are nodes, each with its index in the list.
    pub(super) nodes: Vec<(u64, u32)>,
}

/// The result of a REDUCE, NEWOBJ, INST or OBJ.
#[derive(Debug)]
pub(super) struct Object {
    /// The called function: usually a `Global`.
    pub(super) func: Item,
    /// Its arguments: usually a `Tuple`.
    pub(super) args: Item,
    /// Keyword arguments (NEWOBJ_EX), else `None`.
    pub(super) kwargs: Item,
    /// Pairs set on it, as an `OrderedDict` has them.
    pub(super) pairs: Vec<(Item, Item)>,
    /// Elements appended to it.
    pub(super) list: Elements,
    /// States given to it (BUILD).
    pub(super) states: Vec<Item>,
}

impl Object {
    /// A call whose result has got nothing yet.
    pub(super) fn call(func: Item, args: Item, kwargs: Item) -> Object {
        Object { func, args, kwargs, pairs: Vec::new(), list: Elements::default(), states: Vec::new() }
    }
}

/// A loaded pickle.
#[derive(Debug)]
pub(super) struct Graph {
    nodes: Vec<Node>,
    items: Vec<Item>,
    text: Vec<u8>,
    /// The pickled object.
    pub(super) root: Item,
    /// Offset of the first byte behind it.
    pub(super) end: u64,
}

impl Graph {
    pub(super) fn node(&self, index: u32) -> &Node {
        &self.nodes[index as usize]
    }

    /// The node with this index, to be changed.
    pub(super) fn node_mut(&mut self, index: u32) -> &mut Node {
        &mut self.nodes[index as usize]
    }

    pub(super) fn len(&self) -> usize {
        self.nodes.len()
    }

    /// A string's bytes (mostly UTF-8, but nothing ensures it).
    pub(super) fn text(&self, text: Text) -> &[u8] {
        &self.text[text.start as usize..][..text.len as usize]
    }

    /// The item's text if it is a string of valid UTF-8.
    pub(super) fn str(&self, item: Item) -> Option<&str> {
        match item {
            Item::Str(t) => std::str::from_utf8(self.text(t)).ok(),
            _ => None,
        }
    }

    fn node_of(&self, item: Item) -> Option<&Node> {
        match item {
            Item::Node(n) => Some(self.node(n)),
            _ => None,
        }
    }

    /// The items of a tuple; `None` for anything else.
    pub(super) fn tuple(&self, item: Item) -> Option<&[Item]> {
        match *self.node_of(item)? {
            Node::Tuple { start, len } => Some(&self.items[start as usize..][..len as usize]),
            _ => None,
        }
    }

    /// The place of the bytes that the item is; `None` for anything else.
    pub(super) fn bytes(&self, item: Item) -> Option<Range<u64>> {
        match self.node_of(item)? {
            Node::Bytes(range) => Some(range.clone()),
            _ => None,
        }
    }

    /// The result of a call that the item is; `None` for anything else.
    pub(super) fn object(&self, item: Item) -> Option<&Object> {
        match self.node_of(item)? {
            Node::Object(object) => Some(object),
            _ => None,
        }
    }

    /// The elements of a list; `None` for anything else.
    pub(super) fn list(&self, item: Item) -> Option<&Elements> {
        match self.node_of(item)? {
            Node::List(list) => Some(list),
            _ => None,
        }
    }

    /// The pairs of a dict, or of an object that was filled like one; none of anything else.
    pub(super) fn pairs(&self, item: Item) -> &[(Item, Item)] {
        match self.node_of(item) {
            Some(Node::Dict(pairs)) => pairs,
            Some(Node::Object(object)) => &object.pairs,
            _ => &[],
        }
    }

    /// The value under a key that is text, among the first pairs: many objects may share one dict. Of several with this
    /// key Python keeps the last.
    pub(super) fn get(&self, dict: Item, key: &str) -> Option<Item> {
        let pairs = self.pairs(dict);
        self.named(&pairs[..pairs.len().min(MAX_ATTRIBUTES)], key)
    }

    /// The same among all of these pairs.
    pub(super) fn named(&self, pairs: &[(Item, Item)], key: &str) -> Option<Item> {
        let is_named = |item: Item| matches!(item, Item::Str(text) if self.text(text) == key.as_bytes());
        pairs.iter().rev().find(|&&(k, _)| is_named(k)).map(|&(_, value)| value)
    }

    /// Module and name of a class or function; `None` for anything else.
    pub(super) fn global(&self, item: Item) -> Option<(&str, &str)> {
        match *self.node_of(item)? {
            Node::Global(module, name) => Some((self.str(module)?, self.str(name)?)),
            _ => None,
        }
    }
}

impl Item {
    /// The integer, if it is one and not negative.
    pub(super) fn natural(self) -> Option<u64> {
        match self {
            Item::Int(n) => u64::try_from(n).ok(),
            _ => None,
        }
    }
}

/// A graph that is made, not loaded.
impl Graph {
    /// Without nodes but the empty tuple.
    pub(super) fn new() -> Graph {
        Graph {
            nodes: vec![Node::Tuple { start: 0, len: 0 }],
            items: Vec::new(),
            text: Vec::new(),
            root: Item::None,
            end: 0,
        }
    }

    pub(super) fn add(&mut self, node: Node) -> Item {
        // The graph's maker bounds it.
        self.nodes.push(node);
        Item::Node((self.nodes.len() - 1) as u32)
    }

    /// Adds a string. One that is too long to keep is only counted, as when a pickle is loaded.
    pub(super) fn add_text(&mut self, text: &str) -> Item {
        if text.len() > MAX_TEXT {
            return Item::LongStr(text.len() as u64);
        }
        let start = self.text.len() as u32;
        self.text.extend_from_slice(text.as_bytes());
        Item::Str(Text { start, len: text.len() as u32 })
    }

    pub(super) fn add_tuple(&mut self, items: &[Item]) -> Item {
        let start = self.items.len() as u32;
        self.items.extend_from_slice(items);
        self.add(Node::Tuple { start, len: items.len() as u32 })
    }
}
