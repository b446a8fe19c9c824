//! shim
#![allow(missing_docs, unused_variables, clippy::all)]
use super::lattice::{Exception, Unfit};
use super::{Corrupt, Dtype};
#[derive(Clone, Copy, Debug)]
pub struct Rows {
    pub width: u64,
    pub first: u64,
}
pub struct Outputs<'a> {
    pub a: &'a mut [i32],
    pub r: &'a mut [u8],
    pub exceptions: &'a mut Vec<Exception>,
}
pub struct Changes {
    pub share: f64,
    pub rms: Vec<f64>,
}
pub fn changes(dtype: Dtype, now: &[u8], then: &[u8], rows: Rows) -> Changes {
    Changes { share: 1.0, rms: vec![] }
}
pub fn base_step(rms: &[f64]) -> Option<f64> {
    None
}
pub fn quantize(
    dtype: Dtype,
    w: &[u8],
    k: Option<&[u8]>,
    g: f64,
    rows: Rows,
    parent: Option<&[i32]>,
    c: f64,
    out: Outputs,
) -> Result<f64, Unfit> {
    Err(Unfit("rows"))
}
pub fn encode_tile(
    a: &[i32],
    parent: Option<&[i32]>,
    rows: Rows,
    exceptions: &[Exception],
    out: &mut Vec<u8>,
) -> Result<(), Unfit> {
    Err(Unfit("rows"))
}
pub fn decode_tile_add(
    payload: &[u8],
    acc: &mut [i32],
    rows: Rows,
    exceptions: &mut Vec<Exception>,
) -> Result<(), Corrupt> {
    Err(Corrupt("rows"))
}
