//! A pickle that is a list of strings.

use super::super::ReadAt;
use super::super::input::Input;
use super::super::read::{Fail, bad, refuse_if};
use super::MAX_TEXT;

/// Hands out the strings of the list that is pickled from `start` on, as picklers write it. Answers the offset behind
/// the pickle. (The graph of [`super::load`] only counts strings in a list.)
pub(crate) fn strings(
    src: &dyn ReadAt,
    start: u64,
    end: u64,
    mut each: impl FnMut(&[u8]) -> Result<(), Fail>,
) -> Result<u64, Fail> {
    let mut input = Input::new("pickle", src, start, end);
    let mut text = Vec::new();
    let mut begun = false;
    loop {
        let length = match input.byte()? {
            b'.' if begun => return Ok(input.position()),
            b']' if !begun => {
                begun = true;
                continue;
            }
            0x80 | b'q' => {
                input.skip(1)?;
                continue;
            }
            b'r' => {
                input.skip(4)?;
                continue;
            }
            0x95 => {
                input.skip(8)?;
                continue;
            }
            0x94 | b'(' | b'a' | b'e' => continue,
            b'X' if begun => u32::from_le_bytes(input.array()?) as usize,
            0x8c if begun => usize::from(input.byte()?),
            _ => return bad("pickle: not a list of strings"),
        };
        refuse_if(length > MAX_TEXT, "pickle: a string is too long for a key")?;
        text.clear();
        input.take(length, &mut text)?;
        each(&text)?;
    }
}
