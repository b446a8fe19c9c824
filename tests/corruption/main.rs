//! Bytes that changed at rest, and bytes that somebody crafted: always an error that names the object and tensor, never
//! other bytes, and everything else is served. Also the files that `stepfs verify --repair` saves.
//!
//! - `objects`, `small_files`, `repair`: every part of a store is damaged; `store` has the stores.
//! - `corpus`, `seeds`: the fuzzer's kept inputs, with its `targets`.
//! - `limit`: the memory that all of them may ask for.

mod corpus;
mod limit;
mod objects;
mod repair;
mod seeds;
// Helpers of the tests at rest; not all of them are needed here.
#[allow(dead_code)]
#[path = "../at_rest/series.rs"]
mod series;
mod small_files;
mod store;
#[path = "../../fuzz/src/targets/mod.rs"]
mod targets;
