//! Everything that can be compared, by name.

use std::fmt;
use std::str::FromStr;

use anyhow::{Result, bail};

use crate::store::Profile;
use crate::tools::series::Series;
use papers::registry::SystemId;

use super::plain;

/// A way of keeping checkpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Codec {
    /// As a store does under this profile: stepfs's own, or a published system.
    Profile(Profile),
    /// `zstd -N`, each file alone; or `zstd -N --patch-from`, each file as a patch to the one before.
    Zstd { level: u8, patch: bool },
}

const LEVELS: std::ops::RangeInclusive<u8> = 1..=22;
/// zstd's own default. Its highest levels save a few percent of floating-point numbers, at a hundredth of the speed.
/// So they run only by name.
const LEVEL: u8 = 3;
const PATCH: &str = "zstd-patch-";
const ZSTD: &str = "zstd-";

impl Codec {
    /// The codecs that are compared by default.
    pub(super) fn usual() -> Vec<Codec> {
        let own = Profile::ALL.map(Codec::Profile);
        let published = SystemId::usual().map(|system| Codec::Profile(Profile::Published(system)));
        let zstd = [false, true].map(|patch| Codec::Zstd { level: LEVEL, patch });
        own.into_iter().chain(published).chain(zstd).collect()
    }

    /// A line about it.
    pub(super) fn about(self) -> &'static str {
        match self {
            Codec::Profile(Profile::Exact) => "stepfs, every bit",
            Codec::Profile(Profile::Balanced) => "stepfs, a restore is meant to cost half an iteration of training",
            Codec::Profile(Profile::Compact) => "stepfs, a restore is meant to cost up to two iterations",
            Codec::Profile(Profile::Published(system)) => system.about(),
            Codec::Zstd { patch: false, .. } => "zstd at this level (1 to 22), each file alone",
            Codec::Zstd { .. } => "zstd --patch-from at this level (1 to 22), each file as a patch to the one before",
        }
    }

    /// # Errors
    /// A file is too large for it.
    pub(super) fn is_for(self, series: &Series) -> Result<()> {
        match (self, series.largest()) {
            (Codec::Zstd { patch: true, .. }, Some((path, len))) if len > plain::MAX_PATCHED => {
                bail!("{}: more than {self} can have; leave it out (--codecs)", path.display())
            }
            _ => Ok(()),
        }
    }
}

impl fmt::Display for Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Codec::Profile(profile) => f.write_str(&profile.name()),
            Codec::Zstd { level, patch } => write!(f, "{}{level}", if *patch { PATCH } else { ZSTD }),
        }
    }
}

impl FromStr for Codec {
    type Err = String;

    fn from_str(text: &str) -> Result<Codec, String> {
        let patch = text.strip_prefix(PATCH);
        if let Some(number) = patch.or_else(|| text.strip_prefix(ZSTD)) {
            // No sign and no zeros before it: each has one name.
            let level = number.parse().ok().filter(|level| LEVELS.contains(level) && level.to_string() == number);
            let level = level.ok_or_else(|| format!("{number:?} is no level of zstd; write 1 to 22"))?;
            Ok(Codec::Zstd { level, patch: patch.is_some() })
        } else if let Some(own) = Profile::ALL.into_iter().find(|profile| profile.name() == text) {
            Ok(Codec::Profile(own))
        } else {
            // A known system with a bad number gets that system's error.
            let system = |id| Codec::Profile(Profile::Published(id));
            text.parse().map(system)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written_and_no_other_way() {
        for codec in Codec::usual() {
            assert_eq!(codec.to_string().parse(), Ok(codec));
            assert!(!codec.about().is_empty());
        }
        assert_eq!("zstd-patch-19".parse(), Ok(Codec::Zstd { level: 19, patch: true }));
        for wrong in ["", "zstd", "zstd-0", "zstd-03", "zstd-23", "zstd-patch-", "Exact", "lc-9", " exact"] {
            assert!(wrong.parse::<Codec>().is_err(), "{wrong}");
        }
    }
}
