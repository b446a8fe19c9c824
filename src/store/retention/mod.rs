//! Retention: the rules of `stepfs.toml` decide which checkpoints stay. Pure: `rules` parses and checks the user's
//! text, and `plan` decides from facts that the caller gathers. The archive removes the rest.
//!
//! Whatever the rules say, the newest complete checkpoint of a series and everything pinned stay.

mod plan;
mod rules;

pub use plan::{Kind, Own, SETTLED_NS, Unit, Verdict, complete, plan};
pub use rules::{Rule, duration};
pub(super) use rules::{RuleText, parse};
