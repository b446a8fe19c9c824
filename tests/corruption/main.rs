//! Bytes that changed at rest: always an error that names the object and tensor, never other bytes, and everything else
//! is served. Also the files that `stepfs verify --repair` saves.

mod limit;
mod objects;
mod repair;
// Helpers of the tests at rest; not all of them are needed here.
#[allow(dead_code)]
#[path = "../at_rest/series.rs"]
mod series;
mod small_files;
mod store;
