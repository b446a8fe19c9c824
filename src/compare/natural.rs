//! The order of paths that people expect: `step_20.pt` comes before `step_100.pt`.

use std::cmp::Ordering;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Compares two paths by their components. Runs of digits compare as numbers, everything else by its bytes.
pub(crate) fn order(a: &Path, b: &Path) -> Ordering {
    // `1` and `01` are equal numbers.
    runs(a).cmp(runs(b)).then_with(|| a.cmp(b))
}

/// A part of a path. A component that ends comes before one that goes on.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Run<'a> {
    Slash,
    /// The digits without zeros before them, and before that how many there are.
    Number(usize, &'a [u8]),
    Text(&'a [u8]),
}

fn runs(path: &Path) -> impl Iterator<Item = Run<'_>> {
    let class = |byte: &u8| (*byte == b'/', byte.is_ascii_digit());
    path.as_os_str().as_bytes().chunk_by(move |a, b| class(a) == class(b)).map(|run| match run[0] {
        b'/' => Run::Slash,
        b'0'..=b'9' => {
            let zeros = run.iter().take_while(|&&digit| digit == b'0').count();
            Run::Number(run.len() - zeros, &run[zeros..])
        }
        _ => Run::Text(run),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_in_names_count_as_numbers() {
        let mut paths =
            ["b/1", "a-b", "step_100.pt", "step_20.pt", "a/10/x", "a/9", "step_020.pt", "1", "step_.pt", "a"];
        paths.sort_by(|a, b| order(Path::new(a), Path::new(b)));
        let expected =
            ["1", "a", "a/9", "a/10/x", "a-b", "b/1", "step_020.pt", "step_20.pt", "step_100.pt", "step_.pt"];
        assert_eq!(paths, expected);
        let mut names = ["step_10.pt", "step_9.pt", "a", "step_100.pt", "step_10.bin", "step.pt", "1", "02"];
        names.sort_by(|a, b| order(Path::new(a), Path::new(b)));
        assert_eq!(names, ["1", "02", "a", "step.pt", "step_9.pt", "step_10.bin", "step_10.pt", "step_100.pt"]);
    }
}
