//! Retention: which checkpoints stay, by the rules of `stepfs.toml`. Pure: `rules` reads and checks what users wrote,
//! `plan` decides from facts that somebody else gathered. What goes is removed by the archive.
//!
//! Whatever the rules say, the newest complete checkpoint of a series and everything pinned stay.

mod plan;
mod rules;

pub use plan::{Keep, Kind, SETTLED_NS, Unit, Verdict, plan};
pub use rules::Rule;
pub(super) use rules::{RuleText, parse};
