//! A model of a file system, a plain directory and the mount, compared after every operation; and system calls one by
//! one.
//!
//! - `op`: the operations, and how histories of them are made. `sys`: the calls themselves.
//! - `model`, `expect`: the expected results. `judge`: the allowed effect of a release on bytes.
//! - `world`, `history`, `tree`: doing it in both places, and comparing.
//! - `histories`: generated ones. `pinned`: those that once failed. `threads`: several at once.
//! - `fsx`: one file, exercised between its releases.
//! - `syscalls`: a table of calls that are not worth generating, on the mount and on a plain directory.

mod expect;
mod fsx;
mod histories;
mod history;
mod judge;
mod model;
mod op;
mod pinned;
#[path = "../at_rest/series.rs"]
#[allow(dead_code, unreachable_pub)]
mod series;
#[path = "../support/mod.rs"]
mod support;
mod sys;
mod syscalls;
mod threads;
mod tree;
mod world;
