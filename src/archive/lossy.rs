//! The errors of lossy files in words.

use std::collections::BTreeMap;

use crate::store::object::Object;

/// `0` if an object decodes to the original. Otherwise `1` and the largest |read - written| of each kind of tensor,
/// as in `1 weight 1.2e-4, second_moment 3.0e-9`.
pub fn words(object: &Object) -> String {
    if !object.header().lossy {
        return "0".into();
    }
    let mut largest: BTreeMap<u8, (&'static str, f64)> = BTreeMap::new();
    for tensor in object.index().tensors.iter().filter(|tensor| tensor.coding.is_lossy()) {
        let (_, error) = largest.entry(tensor.role as u8).or_insert((tensor.role.name(), 0.0));
        *error = error.max(tensor.max_abs_error);
    }
    let words: Vec<String> = largest.values().map(|(role, error)| format!("{role} {}", rounded_up(*error))).collect();
    format!("1 {}", words.join(", ")).trim_end().to_string()
}

/// A bound with two digits, as in `1.2e-4`. Never below the bound: a user may compare errors with what is printed.
pub fn rounded_up(bound: f64) -> String {
    let nearest = format!("{bound:.1e}");
    if nearest.parse::<f64>().is_ok_and(|nearest| nearest >= bound) {
        return nearest;
    }
    // Less than half of the last digit was cut off.
    let exponent = nearest.split_once('e').and_then(|(_, exponent)| exponent.parse::<i32>().ok()).unwrap_or_default();
    format!("{:.1e}", bound + 0.05 * 10f64.powi(exponent))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_is_never_printed_too_small() {
        for (bound, printed) in
            [(0.0, "0.0e0"), (0.03125, "3.2e-2"), (0.03, "3.0e-2"), (9.91, "1.0e1"), (1.01e-300, "1.1e-300")]
        {
            assert_eq!(rounded_up(bound), printed);
        }
        let mut bound = f64::MIN_POSITIVE;
        while bound < 1e300 {
            let printed: f64 = rounded_up(bound).parse().unwrap();
            assert!((bound..=bound * 1.1001).contains(&printed), "{bound} is printed as {printed}");
            bound *= 1.37;
        }
        assert_eq!(rounded_up(f64::INFINITY), "inf");
    }
}
