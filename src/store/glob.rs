//! Globs of `stepfs.toml`.

use std::path::Path;

use ::glob::{MatchOptions, Pattern};

/// Patterns of one glob, at most: `{a,b}` twice makes four of them.
const MAX_PATTERNS: usize = 64;

/// Matches paths inside the mount, ignoring case. `*`, `?` and `[a-z]` stay in one name, `**` stands for any
/// directories, `{a,b}` for one of the two.
#[derive(Clone, Debug)]
pub(in crate::store) struct Glob(Vec<Pattern>);

impl Glob {
    /// # Errors
    /// It is no glob; the message is for its author.
    pub(in crate::store) fn parse(text: &str) -> Result<Glob, String> {
        let mut patterns = Vec::new();
        add(text, &mut patterns)?;
        Ok(Glob(patterns))
    }

    /// True if it matches the whole path.
    pub(in crate::store) fn matches(&self, path: &Path) -> bool {
        let options =
            MatchOptions { case_sensitive: false, require_literal_separator: true, require_literal_leading_dot: false };
        let path = path.to_string_lossy();
        self.0.iter().any(|pattern| pattern.matches_with(&path, options))
    }
}

/// Adds the patterns that a glob stands for.
fn add(text: &str, to: &mut Vec<Pattern>) -> Result<(), String> {
    if let Some((begin, end)) = braces(text)? {
        return text[begin + 1..end]
            .split(',')
            .try_for_each(|part| add(&format!("{}{part}{}", &text[..begin], &text[end + 1..]), to));
    }
    if to.len() == MAX_PATTERNS {
        return Err(format!("it stands for more than {MAX_PATTERNS} globs; write several rules"));
    }
    to.push(Pattern::new(text).map_err(|error| format!("{text:?}, byte {}: {}", error.pos, error.msg))?);
    Ok(())
}

/// The places of the first `{` and its `}`.
fn braces(text: &str) -> Result<Option<(usize, usize)>, String> {
    let (mut begin, mut in_class) = (None, false);
    for (at, character) in text.char_indices() {
        match (character, begin) {
            (']', _) => in_class = false,
            _ if in_class => {}
            ('[', _) => in_class = true,
            ('{', None) => begin = Some(at),
            ('{', Some(_)) => return Err("braces in braces; write several rules".into()),
            ('}', Some(begin)) => return Ok(Some((begin, at))),
            ('}', None) => return Err("a `}` without its `{`".into()),
            _ => {}
        }
    }
    begin.map_or(Ok(None), |_| Err("a `{` without its `}`".into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_match() {
        let matches = |glob: &str, path: &str| Glob::parse(glob).unwrap().matches(Path::new(path));
        for (glob, path) in [
            ("**", "a/b.pt"),
            ("*", ".hidden"),
            ("run/**", "Run/a/b.pt"),
            ("**/checkpoint-*", "checkpoint-5"),
            ("**/checkpoint-*", "a/b/CHECKPOINT-5"),
            ("a/**/b", "a/b"),
            ("step_[0-9].p?", "step_5.pt"),
            ("[{]*", "{x}"),
            ("**/*{best,final}*", "a/my_FINAL.pt"),
            ("{a,b/c}/{d,}e", "b/c/e"),
        ] {
            assert!(matches(glob, path), "{glob} {path}");
        }
        for (glob, path) in [("*", "a/b"), ("run/**", "run"), ("a?b", "a/b"), ("[!a]b", "ab"), ("run/*", "run/a/b")] {
            assert!(!matches(glob, path), "{glob} {path}");
        }
    }

    #[test]
    fn nonsense_is_refused() {
        for glob in ["a[", "a**", "***", "{a,b", "a}", "{a,{b,c}}"] {
            assert!(Glob::parse(glob).is_err(), "{glob}");
        }
        assert!(Glob::parse(&"{a,b}".repeat(9)).unwrap_err().contains("several rules"));
    }
}
