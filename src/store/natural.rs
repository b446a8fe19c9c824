//! The order of paths that people expect: `step_20.pt` comes before `step_100.pt`.

use std::cmp::Ordering;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Compares two paths by their bytes. Runs of digits compare as numbers, and a component that ends comes before one that
/// goes on.
pub fn order(a: &Path, b: &Path) -> Ordering {
    let (mut left, mut right) = (a.as_os_str().as_bytes(), b.as_os_str().as_bytes());
    while let ([x, ..], [y, ..]) = (left, right) {
        let (next, used) = match x.is_ascii_digit() && y.is_ascii_digit() {
            true => (number(left).cmp(&number(right)), (digits(left), digits(right))),
            false => ((*x != b'/', x).cmp(&(*y != b'/', y)), (1, 1)),
        };
        if next.is_ne() {
            return next;
        }
        (left, right) = (&left[used.0..], &right[used.1..]);
    }
    // `1` and `01` are equal numbers.
    left.cmp(right).then_with(|| a.cmp(b))
}

/// Length of the run of digits that the bytes begin with.
fn digits(bytes: &[u8]) -> usize {
    bytes.iter().take_while(|byte| byte.is_ascii_digit()).count()
}

/// The number that the bytes begin with: how many digits it has without zeros before them, and these digits.
fn number(bytes: &[u8]) -> (usize, &[u8]) {
    let run = &bytes[..digits(bytes)];
    let zeros = run.iter().take_while(|&&digit| digit == b'0').count();
    (run.len() - zeros, &run[zeros..])
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
            ["1", "a", "a/9", "a/10/x", "a-b", "b/1", "step_.pt", "step_020.pt", "step_20.pt", "step_100.pt"];
        assert_eq!(paths, expected);
        let mut models = ["model2.pt", "model10.pt", "model.pt"];
        models.sort_by(|a, b| order(Path::new(a), Path::new(b)));
        assert_eq!(models, ["model.pt", "model2.pt", "model10.pt"]);
        let mut names = ["step_10.pt", "step_9.pt", "a", "step_100.pt", "step_10.bin", "step.pt", "1", "02"];
        names.sort_by(|a, b| order(Path::new(a), Path::new(b)));
        assert_eq!(names, ["1", "02", "a", "step.pt", "step_9.pt", "step_10.bin", "step_10.pt", "step_100.pt"]);
    }
}
