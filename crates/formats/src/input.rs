//! A format's bytes from front to back, through a window; nothing that is skipped is read.

use super::ReadAt;
use super::read::{Fail, bad, cut_short};

/// Bytes read at once: few system calls, and small beside everything else.
const WINDOW: u64 = 64 << 10;

/// Longest line that is kept; the rest of a longer one is passed over.
const MAX_LINE: usize = 4 << 10;

/// Reads a range of the source forwards.
pub(super) struct Input<'a> {
    /// The format's name, for refusals.
    format: &'static str,
    src: &'a dyn ReadAt,
    window: Vec<u8>,
    /// Offset of the window's first byte.
    window_at: u64,
    pos: u64,
    end: u64,
}

impl<'a> Input<'a> {
    /// `start..end` must lie in the source.
    pub(super) fn new(format: &'static str, src: &'a dyn ReadAt, start: u64, end: u64) -> Self {
        Input { format, src, window: Vec::new(), window_at: start, pos: start, end }
    }

    /// Offset of the next byte.
    pub(super) fn position(&self) -> u64 {
        self.pos
    }

    /// The next byte.
    pub(super) fn byte(&mut self) -> Result<u8, Fail> {
        let at = self.pos.wrapping_sub(self.window_at);
        if let Some(&b) = usize::try_from(at).ok().and_then(|at| self.window.get(at)) {
            self.pos += 1;
            return Ok(b);
        }
        if self.pos >= self.end {
            return self.ends("it ends in the middle");
        }
        self.window.resize((self.end - self.pos).min(WINDOW) as usize, 0);
        self.src.read_exact_at(&mut self.window, self.pos)?;
        self.window_at = self.pos;
        self.pos += 1;
        Ok(self.window[0])
    }

    /// The byte at this place, before or behind those that were read.
    pub(super) fn byte_at(&mut self, place: u64) -> Result<u8, Fail> {
        self.pos = place;
        self.byte()
    }

    /// The refusal of bytes without their end. A record of a zip ends before its file does.
    fn ends<T>(&self, why: &str) -> Result<T, Fail> {
        let why = format!("{}: {why}", self.format);
        if self.end == self.src.size() { cut_short(why) } else { bad(why) }
    }

    /// The next `N` bytes.
    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], Fail> {
        let mut out = [0; N];
        for b in &mut out {
            *b = self.byte()?;
        }
        Ok(out)
    }

    /// Passes over `n` bytes.
    pub(super) fn skip(&mut self, n: u64) -> Result<(), Fail> {
        match self.pos.checked_add(n) {
            Some(p) if p <= self.end => {
                self.pos = p;
                Ok(())
            }
            _ => self.ends("a length goes beyond its end"),
        }
    }

    /// Appends the next `n` bytes to `out`; callers bound `n`.
    pub(super) fn take(&mut self, n: usize, out: &mut Vec<u8>) -> Result<(), Fail> {
        if n as u64 > self.end - self.pos {
            return self.ends("a length goes beyond its end");
        }
        for _ in 0..n {
            out.push(self.byte()?);
        }
        Ok(())
    }

    /// The next line without its newline; `false` if it was too long to keep.
    pub(super) fn line(&mut self, out: &mut Vec<u8>) -> Result<bool, Fail> {
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
