//! Tells a JSON file that its writer left unfinished: `trainer_state.json`, `config.json` and the like.

use std::io;
use std::path::Path;

use super::ReadAt;

/// Read at once.
const BLOCK: u64 = 1 << 16;
/// Larger files are not judged: nothing that a run needs besides its tensors is so large.
const MOST: u64 = 64 << 20;

/// Whether the file's name says that it is JSON.
pub(super) fn is_json(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("json"))
}

/// Whether an object, a list or a text in it has no end. Other text than one JSON object or list is not judged.
///
/// Time: one pass, at 1 to 2 ns a byte. No parser does it, because Python writes `NaN` and `Infinity`, which JSON does
/// not have.
pub(super) fn is_cut_short(src: &dyn ReadAt) -> io::Result<bool> {
    // A program may write to it meanwhile.
    let size = src.size();
    if size > MOST {
        return Ok(false);
    }
    let mut block = vec![0; BLOCK.min(size) as usize];
    let (mut at, mut state) = (0, State::default());
    while at < size {
        let take = (size - at).min(BLOCK) as usize;
        src.read_exact_at(&mut block[..take], at)?;
        // UTF-16, whose brackets may be parts of other characters.
        if at == 0 && block[..take].get(1) == Some(&0) {
            return Ok(false);
        }
        if block[..take].iter().any(|byte| !state.takes(*byte)) {
            return Ok(false);
        }
        at += take as u64;
    }
    Ok(state.depth > 0)
}

/// Where in a JSON file the last byte lies.
#[derive(Default)]
struct State {
    /// Objects and lists around it.
    depth: u64,
    /// The outermost one has its end.
    over: bool,
    in_text: bool,
    /// It is the backslash before another character of a text.
    escapes: bool,
}

impl State {
    /// Takes the next byte. False if it shows that the file is no JSON, or not one object or list.
    fn takes(&mut self, byte: u8) -> bool {
        match (self.in_text, byte) {
            (true, _) if self.escapes => self.escapes = false,
            (true, b'\\') => self.escapes = true,
            (true, b'"') => self.in_text = false,
            (true, _) => {}
            (false, b' ' | b'\t' | b'\r' | b'\n') => {}
            // Texts of Python, comments.
            (false, b'\'' | b'/' | b'#') => return false,
            (false, b'{' | b'[') if !self.over => self.depth += 1,
            (false, _) if self.depth == 0 => return false,
            (false, b'}' | b']') => (self.depth, self.over) = (self.depth - 1, self.depth == 1),
            (false, b'"') => self.in_text = true,
            (false, _) => {}
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_beginning_of_an_object_is_cut_short() {
        let whole = br#" {"best": "a \" [ \\", "log": [{"loss": NaN}, [-1.5e3]], "empty": {}}"#;
        assert!(!is_cut_short(&&whole[..]).unwrap());
        for end in 2..whole.len() {
            assert!(is_cut_short(&&whole[..end]).unwrap(), "{}", String::from_utf8_lossy(&whole[..end]));
        }
    }

    #[test]
    fn a_cut_is_found_beyond_the_first_block() {
        let whole = format!("[{}1]\n", "[\"x\", {}], ".repeat(BLOCK as usize));
        assert!(!is_cut_short(&whole.as_bytes()).unwrap());
        assert!(is_cut_short(&&whole.as_bytes()[..2 * BLOCK as usize]).unwrap());
    }

    #[test]
    fn what_is_no_object_and_no_list_is_not_judged() {
        let python = "{'\"': [1,";
        let lines = "{\"step\": 1}\n{\"step\":";
        let comment = "{ // 5\" disk\n";
        let wide = "{\0\"\0a\0";
        for other in ["", "  ", "12", "\"text", "null", "loss: {", "}", "PK\x03\x04{", python, lines, comment, wide] {
            assert!(!is_cut_short(&other.as_bytes()).unwrap(), "{other}");
        }
    }
}
