//! The published systems by name: the names for `stepfs.toml` and the command line, and the decoder of each payload.
//!
//! A system is one row of [`FAMILIES`].

use std::fmt;
use std::str::FromStr;

use super::check_n_run::{self, CheckNRun, Method, Method::*};
use super::delta_dnn::DeltaDnn;
use super::gobo::Gobo;
use super::inshrinkerator::{Config, Inshrinkerator, Metric};
use super::lc::Lc;
use super::partial::{By, Partial};
use super::qd_compressor::QdCompressor;
use super::{Policy, Policy::*, System};
use codec::Corrupt;

/// Systems that differ in one number.
pub struct Family {
    /// The first byte of its payloads: never reuse one. 0 belongs to none.
    pub id: u8,
    /// Its name; its number, if it has one, follows after a hyphen.
    pub word: &'static str,
    /// The numbers that it may have, from and to. 0: the name has no number.
    pub numbers: &'static [(u8, u8)],
    /// The numbers to try or list in place of all.
    pub usual: &'static [u8],
    /// A description in one line.
    pub about: &'static str,
    /// The system with one of its numbers.
    pub make: fn(u8) -> Box<dyn System>,
}

const fn family(
    id: u8,
    word: &'static str,
    numbers: &'static [(u8, u8)],
    usual: &'static [u8],
    make: fn(u8) -> Box<dyn System>,
) -> Family {
    Family { id, word, numbers, usual, about: "", make }
}

impl Family {
    const fn about(self, about: &'static str) -> Family {
        Family { about, ..self }
    }

    fn has(&self, number: u8) -> bool {
        self.numbers.iter().any(|&(least, most)| (least..=most).contains(&number))
    }

    /// Its numbers in words, without 0.
    fn words(&self) -> String {
        let range = |&(least, most): &(u8, u8)| match least.max(1) {
            least if least < most => format!("{least} to {most}"),
            _ => most.to_string(),
        };
        self.numbers.iter().filter(|(_, most)| *most > 0).map(range).collect::<Vec<_>>().join(", ")
    }
}

/// Every system.
pub static FAMILIES: &[Family] = &[
    family(1, "lc", &[(0, 8)], &[2, 3, 4, 0], |bits| lc(bits, false))
        .about("LC-Checkpoint (ICML 2020): exponent buckets, promotion of number bits (no number: none), Huffman"),
    family(2, "lc-layer", &[(0, 8)], &[3], |bits| lc(bits, true))
        .about("LC-Checkpoint with separate buckets and promotion for each tensor"),
    family(3, "scar", &[(1, 100)], &[5, 10], |percent| Box::new(Partial { percent, by: By::Turn }))
        .about("SCAR (2018) as LC-Checkpoint compares it: each checkpoint saves the next number percent, by turns"),
    family(4, "scar-priority", &[(1, 100)], &[5], |percent| Box::new(Partial { percent, by: By::Row }))
        .about("SCAR (2018): the number percent of the rows that changed most since their last save"),
    family(5, "topn", &[(1, 100)], &[5, 10], |percent| Box::new(Partial { percent, by: By::Element }))
        .about("TOPN as LC-Checkpoint compares it: the number percent of the parameters that changed most"),
    family(10, "check-n-run", CHECK_N_RUN_BITS, &[2, 3, 4, 8], |bits| check_n_run(bits, None, Intermittent))
        .about("Check-N-Run (NSDI 2022): modified rows, each quantized in a range from a search; intermittent"),
    family(11, "check-n-run-symmetric", CHECK_N_RUN_BITS, &[4], |bits| {
        check_n_run(bits, Some(Symmetric), Intermittent)
    })
    .about("Check-N-Run with rows quantized symmetrically about 0"),
    family(12, "check-n-run-asymmetric", &[(2, 4)], &[4], |bits| check_n_run(bits, Some(Asymmetric), Intermittent))
        .about("Check-N-Run with rows quantized from their smallest to their largest value"),
    family(13, "check-n-run-one-shot", CHECK_N_RUN_BITS, &[4], |bits| check_n_run(bits, None, OneShot))
        .about("Check-N-Run with differences to the first checkpoint of a chain only"),
    family(14, "check-n-run-consecutive", CHECK_N_RUN_BITS, &[4], |bits| check_n_run(bits, None, Consecutive))
        .about("Check-N-Run with differences to the previous checkpoint"),
    family(20, "inshrinkerator", &[(1, 7)], &[3, 4, 5], |bits| {
        Box::new(Inshrinkerator::new(usual(bits, Metric::Magnitude)))
    })
    .about("Inshrinkerator (2023): protected, pruned or clustered by k-means; differences of bins; 2^number bins"),
    family(21, "inshrinkerator-sensitivity", &[(1, 7)], &[4], |bits| {
        Box::new(Inshrinkerator::new(usual(bits, Metric::Sensitivity)))
    })
    .about("Inshrinkerator that prunes by |w g|, g the gradient's running mean"),
    family(30, "qd-compressor", &[(0, 0)], &[0], |_| Box::new(QdCompressor))
        .about("QD-Compressor (2023): bins by each layer's entropy, cyclic differences"),
    family(31, "delta-dnn", &[(1, 8)], &[2, 3], |digits| {
        Box::new(DeltaDnn { bound: 10f64.powi(digits.into()).recip() })
    })
    .about("Delta-DNN (2020): differences within an error bound of 10^-number"),
    family(32, "gobo", &[(1, 8)], &[3, 4], |bits| Box::new(Gobo { bits: bits.into() }))
        .about("GOBO (2020): outliers exact, all others clustered by k-medians with number bits"),
];

/// Only Check-N-Run with bits by the expected restores has these.
const CHECK_N_RUN_BITS: &[(u8, u8)] = &[(2, 4), (8, 8)];

/// LC-Checkpoint; 0 bits: without promotion.
fn lc(bits: u8, by_tensor: bool) -> Box<dyn System> {
    Box::new(Lc { bits: Some(bits).filter(|bits| *bits > 0), by_tensor })
}

/// Check-N-Run; without a method, the usual one of these bits.
fn check_n_run(bits: u8, method: Option<Method>, policy: Policy) -> Box<dyn System> {
    Box::new(CheckNRun { bits: bits.into(), method, policy })
}

/// Inshrinkerator's configuration of 2^`bits` bins.
fn usual(bits: u8, metric: Metric) -> Config {
    Config { metric, ..Config::new(1 << bits) }
}

/// One published system: its family and number; or a configuration of Inshrinkerator without a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SystemId {
    family: u8,
    number: u8,
    config: Option<Config>,
}

impl SystemId {
    /// The usual ones of all families, in the order of the table.
    pub fn usual() -> impl Iterator<Item = SystemId> {
        FAMILIES.iter().flat_map(|family| family.usual.iter().map(|&number| SystemId::new(family, number)))
    }

    fn new(family: &Family, number: u8) -> SystemId {
        SystemId { family: family.id, number, config: None }
    }

    /// Inshrinkerator in this configuration, which must be sound. Its payloads are those of its metric's family.
    pub fn inshrinkerator(config: Config) -> SystemId {
        let family = if config.metric == Metric::Magnitude { 20 } else { 21 };
        match config.number() {
            Some(number) => SystemId { family, number, config: None },
            None => SystemId { family, number: 0, config: Some(config) },
        }
    }

    /// The configuration, if it is Inshrinkerator.
    pub fn configuration(self) -> Option<Config> {
        let metric = match self.family {
            20 => Metric::Magnitude,
            21 => Metric::Sensitivity,
            _ => return None,
        };
        Some(self.config.unwrap_or_else(|| usual(self.number, metric)))
    }

    /// The first byte of its payloads.
    pub fn family(self) -> u8 {
        self.family
    }

    fn row(self) -> &'static Family {
        // Only created from the table.
        FAMILIES.iter().find(|family| family.id == self.family).unwrap_or(&FAMILIES[0])
    }

    /// A description in one line.
    pub fn about(self) -> &'static str {
        self.row().about
    }

    /// The system.
    pub fn system(self) -> Box<dyn System> {
        match self.config {
            Some(config) => Box::new(Inshrinkerator::new(config)),
            None => (self.row().make)(self.number),
        }
    }

    /// The system to use for this many expected restores of a run and this many observed ones. Check-N-Run's section
    /// 6.2.1: the bits for the expected restores, or the requested bits if those are more; 8 after more restores than
    /// expected. No other system depends on restores.
    #[must_use]
    pub fn in_force(self, expected: u32, seen: u32) -> SystemId {
        let has_bits_by_restores = self.row().numbers == CHECK_N_RUN_BITS;
        let least = if has_bits_by_restores { check_n_run::bits_after(expected, seen) as u8 } else { 0 };
        SystemId { number: self.number.max(least), ..self }
    }
}

impl fmt::Display for SystemId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(config) = self.config {
            return config.fmt(f);
        }
        match self.number {
            0 => f.write_str(self.row().word),
            number => write!(f, "{}-{number}", self.row().word),
        }
    }
}

impl SystemId {
    /// Whether a text begins with the name of a system: it means one, or is a misspelled one.
    pub fn begins(text: &str) -> bool {
        FAMILIES.iter().any(|family| text.starts_with(family.word))
    }
}

impl FromStr for SystemId {
    type Err = String;

    fn from_str(text: &str) -> Result<SystemId, String> {
        if text.split('-').nth(1).is_some_and(|part| part.ends_with("bins")) {
            return text.parse().map(SystemId::inshrinkerator);
        }
        let of = |word: &str| FAMILIES.iter().find(|family| family.word == word);
        let unknown = || format!("{text:?} is not a published system");
        let (family, number) = match of(text) {
            Some(family) => (family, Some(0)),
            None => {
                let (word, number) = text.rsplit_once('-').ok_or_else(unknown)?;
                // No sign and no leading zeros: a system has only one name.
                let sound = number.parse().ok().filter(|n: &u8| n.to_string() == number && *n > 0);
                (of(word).ok_or_else(unknown)?, sound)
            }
        };
        match number.filter(|number| family.has(*number)) {
            Some(number) => Ok(SystemId::new(family, number)),
            None => Err(match family.words().as_str() {
                "" => format!("{text:?}: {} has no number", family.word),
                words => format!("{text:?}: {} has a number, {words}", family.word),
            }),
        }
    }
}

/// The decoder of payloads that begin with this byte.
///
/// # Errors
/// No system has this number.
pub fn decoder(id: u8) -> Result<Box<dyn System>, Corrupt> {
    let family = FAMILIES.iter().find(|family| family.id == id).ok_or(Corrupt("number of a published system"))?;
    // Numbers only affect encoding; a payload has everything for decoding.
    let any = family.numbers.last().map_or(0, |(_, most)| *most);
    Ok((family.make)(any))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configurations_are_read_as_they_are_written_and_no_other_way() {
        let shares = [0, 5, 100, 700, 1000, 1230, 3000, 2999, 10_000];
        let mut seen = std::collections::HashSet::new();
        for bins in [2u16, 3, 12, 16, 128, 239] {
            for embedding_bins in [2, 16, 32, 239] {
                for (prune, protect) in shares.iter().flat_map(|a| shares.iter().map(move |b| (*a, *b))) {
                    for metric in [Metric::Magnitude, Metric::Sensitivity] {
                        let config = Config { bins, embedding_bins, prune, metric, protect };
                        let id = SystemId::inshrinkerator(config);
                        let name = id.to_string();
                        assert_eq!(name.parse(), Ok(id));
                        assert_eq!(id.configuration(), Some(config));
                        assert!(decoder(id.family()).is_ok() && seen.insert(format!("{:?}", id.system())));
                    }
                }
            }
        }
        let named = "inshrinkerator-12bins-embedding32-prune30-sensitivity-protect0.5".parse::<SystemId>().unwrap();
        let config = Config { bins: 12, embedding_bins: 32, prune: 3000, metric: Metric::Sensitivity, protect: 50 };
        assert_eq!(named.configuration(), Some(config));
        assert_eq!(named.in_force(1, 100), named);
        assert!("inshrinkerator-16bins".parse::<SystemId>().unwrap_err().contains("is called inshrinkerator-4"));
        assert_eq!("lc-3".parse::<SystemId>().unwrap().configuration(), None);
        for wrong in
            ["12bins", "1bins", "240bins", "12bins-prune101", "12bins-prunenan", "12bins-prune-1", "12bins-prune30.0"]
        {
            assert_eq!(format!("inshrinkerator-{wrong}").parse::<SystemId>().is_ok(), wrong == "12bins", "{wrong}");
        }
        for wrong in [
            "inshrinkerator-12bins-prune10",
            "inshrinkerator-12bins-sensitivity-prune30",
            "inshrinkerator-12bins-prune30-prune30",
            "inshrinkerator-012bins",
            "inshrinkerator-12bins-",
            "lc-12bins",
        ] {
            assert!(wrong.parse::<SystemId>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn check_n_run_takes_the_bits_that_expected_restores_ask_for() {
        let bits = |name: &str, expected, seen| name.parse::<SystemId>().unwrap().in_force(expected, seen).to_string();
        assert_eq!(bits("check-n-run-2", 1, 0), "check-n-run-2");
        assert_eq!(bits("check-n-run-2", 20, 0), "check-n-run-4");
        // Never fewer than requested.
        assert_eq!(bits("check-n-run-8", 1, 0), "check-n-run-8");
        assert_eq!(bits("check-n-run-one-shot-3", 3, 4), "check-n-run-one-shot-8");
        assert_eq!(bits("lc-2", 20, 100), "lc-2");
    }

    /// Names are in users' settings: each means its parameters.
    #[test]
    fn a_name_means_its_parameters() {
        let systems: [(&str, Box<dyn System>); 9] = [
            ("lc-3", Box::new(Lc { bits: Some(3), by_tensor: false })),
            ("lc-layer-3", Box::new(Lc { bits: Some(3), by_tensor: true })),
            ("scar-priority-10", Box::new(Partial { percent: 10, by: By::Row })),
            ("topn-1", Box::new(Partial { percent: 1, by: By::Element })),
            ("check-n-run-4", Box::new(CheckNRun { bits: 4, method: None, policy: Intermittent })),
            ("check-n-run-one-shot-4", Box::new(CheckNRun { bits: 4, method: None, policy: OneShot })),
            ("inshrinkerator-5", Box::new(Inshrinkerator::new(Config::new(32)))),
            ("delta-dnn-3", Box::new(DeltaDnn { bound: 1e-3 })),
            ("gobo-4", Box::new(Gobo { bits: 4 })),
        ];
        for (name, system) in systems {
            let named = name.parse::<SystemId>().unwrap().system();
            assert_eq!(format!("{named:?}"), format!("{system:?}"), "{name}");
        }
    }

    #[test]
    fn names_are_read_as_they_are_written_and_no_other_way() {
        let mut seen = std::collections::HashSet::new();
        for family in FAMILIES {
            assert!(family.id > 0 && FAMILIES.iter().filter(|other| other.id == family.id).count() == 1);
            assert!(family.usual.iter().all(|number| family.has(*number)), "{}", family.word);
            for number in family.numbers.iter().flat_map(|&(least, most)| least..=most) {
                let id = SystemId::new(family, number);
                assert_eq!(id.to_string().parse(), Ok(id));
                assert!(seen.insert(format!("{:?}", id.system())), "{id} is another system by another name");
            }
        }
        for wrong in
            ["", "lc-", "lc-0", "lc-03", "lc-+3", "lc-9", "lc-256", "scar", "scar-0", "scar-101", "LC-3", "lc-3-", "-"]
        {
            assert!(wrong.parse::<SystemId>().is_err(), "{wrong}");
        }
        assert!(decoder(0).is_err() && decoder(255).is_err());
    }
}
