//! How the keys on the way to a tensor are written.

use std::fmt::Write;

use super::pickle::{Graph, Item};

/// One step of a path.
#[derive(Clone, Copy)]
pub(super) enum Part {
    Key(Item),
    Index(u64),
    Name(&'static str),
    /// The parent's own path.
    Here,
}

/// Appends a step to a path, with `/` between steps.
pub(super) fn push(path: &mut String, graph: &Graph, part: Part) {
    if matches!(part, Part::Here) {
        return;
    }
    if !path.is_empty() {
        path.push('/');
    }
    let written = match part {
        Part::Here => Ok(()),
        Part::Name(name) => path.write_str(name),
        Part::Index(i) => write!(path, "{i}"),
        Part::Key(Item::Int(i)) => write!(path, "{i}"),
        Part::Key(Item::Bool(b)) => write!(path, "{b}"),
        Part::Key(Item::Float(f)) => write!(path, "{f:?}"),
        Part::Key(Item::None) => path.write_str("None"),
        Part::Key(Item::LongStr(n)) => write!(path, "<str of {n} bytes>"),
        Part::Key(Item::Scalar) => path.write_str("<bytes>"),
        Part::Key(Item::Node(n)) => write_node(path, graph, n),
        Part::Key(Item::Str(text)) => write_text(path, &String::from_utf8_lossy(graph.text(text))),
    };
    // Writing to a String does not fail.
    debug_assert!(written.is_ok());
}

/// Appends text as people and terminals can be shown it.
pub(super) fn push_text(path: &mut String, text: &str) {
    // Writing to a String does not fail.
    let written = write_text(path, text);
    debug_assert!(written.is_ok());
}

/// Text for people and terminals: control characters escaped.
fn write_text(path: &mut String, text: &str) -> std::fmt::Result {
    if text.bytes().all(|b| (0x20..0x7f).contains(&b)) {
        path.push_str(text);
        return Ok(());
    }
    for c in text.chars() {
        if c.is_control() {
            write!(path, "{}", c.escape_unicode())?;
        } else {
            path.push(c);
        }
    }
    Ok(())
}

/// A key that is an object: a tuple of scalars as Python shows it, else just its kind.
fn write_node(path: &mut String, graph: &Graph, node: u32) -> std::fmt::Result {
    let Some(items) = graph.tuple(Item::Node(node)) else {
        return path.write_str("<object>");
    };
    path.push('(');
    for (i, item) in items.iter().take(8).enumerate() {
        if i > 0 {
            path.push(',');
        }
        match *item {
            Item::Int(n) => write!(path, "{n}")?,
            Item::Bool(b) => write!(path, "{b}")?,
            Item::Str(t) => write_text(path, &String::from_utf8_lossy(graph.text(t)))?,
            _ => path.push('?'),
        }
    }
    path.push(')');
    Ok(())
}
