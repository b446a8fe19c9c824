//! ElasticDL's names of files, and its rule which server has a variable.

use crate::hash::sha256;

/// The endings of a file's name: the first by its code, the second by its design document.
const ENDINGS: [&str; 2] = ["ckpt", "chkpt"];

/// A file of a version: `variables-{index}-of-{count}.ckpt`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    /// Number of the server that wrote it.
    pub index: u32,
    /// Number of servers.
    pub count: u32,
    /// The part after the dot.
    pub ending: &'static str,
}

impl Shard {
    /// Parses a file's name. `None` if ElasticDL gives no such name.
    pub fn parse(name: &str) -> Option<Shard> {
        let (rest, ending) = name.strip_prefix("variables-")?.rsplit_once('.')?;
        let ending = ENDINGS.into_iter().find(|known| *known == ending)?;
        let (index, count) = rest.split_once("-of-")?;
        let shard = Shard { index: index.parse().ok()?, count: count.parse().ok()?, ending };
        // Only as it is written: no sign, no zeros before it.
        (shard.index < shard.count && shard.name() == name).then_some(shard)
    }

    /// The file's name.
    pub fn name(&self) -> String {
        format!("variables-{}-of-{}.{}", self.index, self.count, self.ending)
    }
}

/// The number of the server, of `count`, that a variable is on. The name's SHA-256 in hexadecimal, read by ElasticDL
/// as digits to the base 32, modulo `count`, which is not 0. (Restore Model Parameters from a Checkpoint.)
pub fn shard_of(name: &str, count: u32) -> u32 {
    let digits = sha256(name.as_bytes()).into_iter().flat_map(|byte| [byte >> 4, byte & 15]);
    let rest = digits.fold(0u64, |rest, digit| (rest * 32 + u64::from(digit)) % u64::from(count));
    rest as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_where_elasticdl_looks_for_them() {
        // Computed with its own code.
        for (name, places) in
            [("dense/kernel", [0, 1, 5]), ("dense/bias", [1, 0, 2]), ("out/kernel", [0, 0, 4]), ("out/bias", [1, 1, 1])]
        {
            assert_eq!([2, 3, 7].map(|count| shard_of(name, count)), places, "{name}");
            assert_eq!(shard_of(name, 1), 0);
        }
    }

    #[test]
    fn names_are_read_as_they_are_written() {
        let shard = Shard { index: 2, count: 13, ending: "ckpt" };
        assert_eq!(Shard::parse("variables-2-of-13.ckpt"), Some(shard));
        assert_eq!(
            Shard::parse("variables-0-of-1.chkpt").map(|shard| shard.name()),
            Some("variables-0-of-1.chkpt".into())
        );
        for other in [
            "variables-2-of-2.ckpt",
            "variables-0-of-0.ckpt",
            "variables-+1-of-2.ckpt",
            "variables-01-of-2.ckpt",
            "variables-0-of-2.ckpt.tmp",
            "variables-0-of-2",
            "variables-0-of-99999999999.ckpt",
            "variables--1-of-2.ckpt",
            "model.ckpt",
        ] {
            assert_eq!(Shard::parse(other), None, "{other}");
        }
    }
}
