//! The name of a configuration in `stepfs.toml` and in objects: `inshrinkerator-12bins-prune30-sensitivity`.
//!
//! After the bins come the differences from [`Config::new`], in this order: `embedding` and its bins, `prune` and a
//! percentage, `sensitivity`, `protect` and a percentage. A configuration has only one name: those with a number of
//! their own ([`Config::number`]) use that.

use std::fmt;
use std::str::FromStr;

use super::{Config, Metric};

/// The first word of the name.
const WORD: &str = "inshrinkerator";

impl Config {
    /// n, if it is the usual configuration of 2^n bins, apart from the metric.
    pub fn number(self) -> Option<u8> {
        let is_usual = Config { metric: Metric::Magnitude, ..self } == Config::new(self.bins);
        (is_usual && self.bins.is_power_of_two()).then(|| self.bins.ilog2() as u8)
    }
}

impl fmt::Display for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let by_sensitivity = if self.metric == Metric::Sensitivity { "-sensitivity" } else { "" };
        if let Some(number) = self.number() {
            return write!(f, "{WORD}{by_sensitivity}-{number}");
        }
        let usual = Config::new(self.bins);
        write!(f, "{WORD}-{}bins", self.bins)?;
        if self.embedding_bins != usual.embedding_bins {
            write!(f, "-embedding{}", self.embedding_bins)?;
        }
        if self.prune != usual.prune {
            write!(f, "-prune{}", f64::from(self.prune) / 100.0)?;
        }
        f.write_str(by_sensitivity)?;
        if self.protect != usual.protect {
            write!(f, "-protect{}", f64::from(self.protect) / 100.0)?;
        }
        Ok(())
    }
}

impl FromStr for Config {
    type Err = String;

    /// Parses a name without a number ([`Config::number`]).
    fn from_str(text: &str) -> Result<Config, String> {
        let wrong = || {
            format!(
                "{text:?}: write {WORD}-12bins, then the differences in this order: -embedding32 -prune30 -sensitivity \
                 -protect0.5"
            )
        };
        let parts = text.strip_prefix(WORD).and_then(|rest| rest.strip_prefix('-')).ok_or_else(wrong)?;
        let mut parts = parts.split('-');
        let bins = parts.next().and_then(|part| part.strip_suffix("bins")?.parse().ok()).ok_or_else(wrong)?;
        let mut config = Config::new(bins);
        for part in parts {
            let digits = part.trim_start_matches(|c: char| c.is_ascii_lowercase());
            let number = digits.parse::<f64>();
            // Other numbers than those of a name give another name, or an unsound configuration.
            let hundredths = |percent: f64| (percent * 100.0).round() as u16;
            match (part.strip_suffix(digits), number) {
                (Some("embedding"), Ok(bins)) => config.embedding_bins = bins as u16,
                (Some("prune"), Ok(percent)) => config.prune = hundredths(percent),
                (Some("protect"), Ok(percent)) => config.protect = hundredths(percent),
                (Some("sensitivity"), Err(_)) => config.metric = Metric::Sensitivity,
                _ => return Err(wrong()),
            }
        }
        if !config.is_sound() {
            return Err(format!("{text:?}: bins are 2 to 239, percentages 0 to 100"));
        }
        match config.to_string() {
            name if name == text => Ok(config),
            name => Err(format!("{text:?} is called {name}")),
        }
    }
}
