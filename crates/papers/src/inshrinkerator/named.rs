//! The name of a configuration in `stepfs.toml` and in objects: `inshrinkerator-12bins-prune30-sensitivity`.
//!
//! After the bins come the differences from [`Config::new`], in this order: `embedding` and its bins, `prune` and a
//! percentage, `sensitivity`, `protect` and a percentage. A configuration has only one name: those with a number of
//! their own ([`Named::number`]) use that.

use std::fmt;
use std::str::FromStr;

use super::{Config, Inshrinkerator, Metric};

/// A configuration that has a name: its shares are whole hundredths of a percent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Named {
    bins: u16,
    embedding_bins: u16,
    /// Hundredths of a percent.
    prune: u16,
    metric: Metric,
    /// Hundredths of a percent.
    protect: u16,
}

/// Hundredths of a percent in all.
const WHOLE: f64 = 10_000.0;
/// The first word of the name.
const WORD: &str = "inshrinkerator";

impl Named {
    /// The configuration with its shares rounded to what a name can hold. `None` if it is no valid configuration.
    pub fn nearest(config: &Config) -> Option<Named> {
        Inshrinkerator::new(*config).map(|_| Named::of(*config))
    }

    fn of(Config { bins, embedding_bins, prune, metric, protect }: Config) -> Named {
        let hundredths = |share: f64| (share * WHOLE).round() as u16;
        Named { bins, embedding_bins, prune: hundredths(prune), metric, protect: hundredths(protect) }
    }

    /// Its configuration.
    pub fn config(self) -> Config {
        // Correctly rounded, so the share equals the same number in a program.
        let share = |hundredths: u16| f64::from(hundredths) / WHOLE;
        let Named { bins, embedding_bins, prune, metric, protect } = self;
        Config { bins, embedding_bins, prune: share(prune), metric, protect: share(protect) }
    }

    /// n, if it is the usual configuration of 2^n bins, apart from the metric.
    pub fn number(self) -> Option<u8> {
        let is_usual = Named { metric: Metric::Magnitude, ..self } == Named::usual(self.bins);
        (is_usual && self.bins.is_power_of_two()).then(|| self.bins.ilog2() as u8)
    }

    fn usual(bins: u16) -> Named {
        Named::of(Config::new(bins))
    }
}

impl fmt::Display for Named {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let by_sensitivity = if self.metric == Metric::Sensitivity { "-sensitivity" } else { "" };
        if let Some(number) = self.number() {
            return write!(f, "{WORD}{by_sensitivity}-{number}");
        }
        let usual = Named::usual(self.bins);
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

impl FromStr for Named {
    type Err = String;

    /// Parses a name without a number ([`Named::number`]).
    fn from_str(text: &str) -> Result<Named, String> {
        let wrong = || {
            format!(
                "{text:?}: write {WORD}-12bins, then the differences in this order: -embedding32 -prune30 -sensitivity \
                 -protect0.5"
            )
        };
        let parts = text.strip_prefix(WORD).and_then(|rest| rest.strip_prefix('-')).ok_or_else(wrong)?;
        let mut parts = parts.split('-');
        let bins = parts.next().and_then(|part| part.strip_suffix("bins")?.parse().ok()).ok_or_else(wrong)?;
        let mut named = Named::usual(bins);
        for part in parts {
            let percent = |digits: &str| {
                let percent = digits.parse::<f64>().ok().filter(|percent| (0.0..=100.0).contains(percent))?;
                Some((percent * 100.0).round() as u16)
            };
            let of = |word: &str| part.strip_prefix(word);
            if let Some(digits) = of("embedding") {
                named.embedding_bins = digits.parse().ok().ok_or_else(wrong)?;
            } else if let Some(digits) = of("prune") {
                named.prune = percent(digits).ok_or_else(wrong)?;
            } else if let Some(digits) = of("protect") {
                named.protect = percent(digits).ok_or_else(wrong)?;
            } else if part == "sensitivity" {
                named.metric = Metric::Sensitivity;
            } else {
                return Err(wrong());
            }
        }
        if Inshrinkerator::new(named.config()).is_none() {
            return Err(format!("{text:?}: bins are 2 to 239, percentages 0 to 100"));
        }
        match named.to_string() {
            name if name == text => Ok(named),
            name => Err(format!("{text:?} is called {name}")),
        }
    }
}
