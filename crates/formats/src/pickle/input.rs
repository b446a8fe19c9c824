//! A pickle's bytes, through a window; nothing that is skipped is read.

use super::super::ReadAt;
use super::super::read::{Fail, bad, cut_short};
use super::MAX_TEXT;

/// Bytes read at once: few system calls, and small beside everything else.
const WINDOW: u64 = 64 << 10;

/// Longest line of a text opcode that is kept; the rest of a longer one is passed over.
const MAX_LINE: usize = 4 << 10;

/// Reads a range of the source forwards.
pub(crate) struct Input<'a> {
    src: &'a dyn ReadAt,
    window: Vec<u8>,
    /// Offset of the window's first byte.
    window_at: u64,
    pos: u64,
    end: u64,
}

impl<'a> Input<'a> {
    /// `start..end` must lie in the source.
    pub(crate) fn new(src: &'a dyn ReadAt, start: u64, end: u64) -> Self {
        Input { src, window: Vec::new(), window_at: start, pos: start, end }
    }

    /// Offset of the next byte.
    pub(crate) fn position(&self) -> u64 {
        self.pos
    }

    /// The next byte.
    pub(crate) fn byte(&mut self) -> Result<u8, Fail> {
        let at = self.pos.wrapping_sub(self.window_at);
        if let Some(&b) = usize::try_from(at).ok().and_then(|at| self.window.get(at)) {
            self.pos += 1;
            return Ok(b);
        }
        if self.pos >= self.end {
            return self.ends("pickle: ends in the middle");
        }
        self.window.resize((self.end - self.pos).min(WINDOW) as usize, 0);
        self.src.read_exact_at(&mut self.window, self.pos)?;
        self.window_at = self.pos;
        self.pos += 1;
        Ok(self.window[0])
    }

    /// The refusal of a pickle without its end. A record of a zip ends before its file does.
    fn ends<T>(&self, why: &str) -> Result<T, Fail> {
        if self.end == self.src.size() { cut_short(why) } else { bad(why) }
    }

    /// The next `N` bytes.
    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N], Fail> {
        let mut out = [0; N];
        for b in &mut out {
            *b = self.byte()?;
        }
        Ok(out)
    }

    /// Passes over `n` bytes.
    pub(crate) fn skip(&mut self, n: u64) -> Result<(), Fail> {
        match self.pos.checked_add(n) {
            Some(p) if p <= self.end => {
                self.pos = p;
                Ok(())
            }
            _ => self.ends("pickle: a length goes beyond its end"),
        }
    }

    /// Appends the next `n` bytes to `out`; callers bound `n`.
    pub(crate) fn take(&mut self, n: usize, out: &mut Vec<u8>) -> Result<(), Fail> {
        if n as u64 > self.end - self.pos {
            return self.ends("pickle: a length goes beyond its end");
        }
        for _ in 0..n {
            out.push(self.byte()?);
        }
        Ok(())
    }

    /// The next line without its newline; `false` if it was too long to keep.
    pub(crate) fn line(&mut self, out: &mut Vec<u8>) -> Result<bool, Fail> {
        out.clear();
        let mut whole = true;
        loop {
            match self.byte()? {
                b'\n' => break,
                b if out.len() < MAX_LINE => out.push(b),
                _ => whole = false,
            }
        }
        if out.last() == Some(&b'\r') {
            out.pop();
        }
        Ok(whole)
    }
}

/// Reads a pickle that is a list of strings, as picklers write it. Hands out the strings of the list between `start` and `end` in order. Returns the offset behind the pickle. The
/// graph of [`super::load`] only counts a list's elements that are no nodes.
pub(crate) fn strings(
    src: &dyn ReadAt,
    start: u64,
    end: u64,
    mut each: impl FnMut(&[u8]) -> Result<(), Fail>,
) -> Result<u64, Fail> {
    let mut input = Input::new(src, start, end);
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
        if length > MAX_TEXT {
            return bad("pickle: a string is too long for a key");
        }
        text.clear();
        input.take(length, &mut text)?;
        each(&text)?;
    }
}
