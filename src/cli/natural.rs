//! The order of paths that people expect: `step_20.pt` comes before `step_100.pt`.

use std::cmp::Ordering;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Compares two paths. Runs of digits compare as numbers, everything else by its bytes.
pub(super) fn order(a: &Path, b: &Path) -> Ordering {
    let by_component = a.components().map(Runs::of).cmp(b.components().map(Runs::of));
    // `1` and `01` are equal numbers.
    by_component.then_with(|| a.cmp(b))
}

/// A component of a path, by runs of digits and of other bytes.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Runs<'a>(Vec<Run<'a>>);

#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Run<'a> {
    /// How many digits there are, without zeros before them, and these digits.
    Number(usize, &'a [u8]),
    Text(&'a [u8]),
}

impl<'a> Runs<'a> {
    fn of(component: std::path::Component<'a>) -> Runs<'a> {
        let runs = component.as_os_str().as_bytes().chunk_by(|a, b| a.is_ascii_digit() == b.is_ascii_digit());
        Runs(runs.map(Run::of).collect())
    }
}

impl<'a> Run<'a> {
    fn of(bytes: &'a [u8]) -> Run<'a> {
        if !bytes[0].is_ascii_digit() {
            return Run::Text(bytes);
        }
        let zeros = bytes.iter().take_while(|&&digit| digit == b'0').count();
        Run::Number(bytes.len() - zeros, &bytes[zeros..])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_in_names_count_as_numbers() {
        let mut paths = ["b/1", "step_100.pt", "step_20.pt", "a/10/x", "a/9", "step_020.pt", "1", "step_.pt", "a"];
        paths.sort_by(|a, b| order(Path::new(a), Path::new(b)));
        let expected = ["1", "a", "a/9", "a/10/x", "b/1", "step_020.pt", "step_20.pt", "step_100.pt", "step_.pt"];
        assert_eq!(paths, expected);
    }
}
