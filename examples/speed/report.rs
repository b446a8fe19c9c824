//! The rows: printed as they come, and written as JSON at the end.

use std::collections::BTreeMap;

use serde::Serialize;

/// Speeds in GB/s and their ratios to memcpy.
#[derive(Serialize)]
pub(crate) struct Report {
    profile: String,
    dtype: String,
    cores: usize,
    bytes: u64,
    /// GB/s of a memcpy of the same bytes on one core.
    memcpy: f64,
    /// By name: the ratio of the speed to memcpy.
    ratios: BTreeMap<String, f64>,
    #[serde(skip)]
    heading: String,
}

impl Report {
    pub(crate) fn new((profile, dtype): (&str, &str), cores: usize, bytes: u64, memcpy: f64) -> Report {
        let (profile, dtype) = (profile.to_string(), dtype.to_string());
        println!("{profile}, {dtype}, {} MB, {cores} core(s); GB/s, and its ratio to memcpy", bytes / 1_000_000);
        println!("memcpy {memcpy:.1}");
        Report { profile, dtype, cores, bytes, memcpy, ratios: BTreeMap::new(), heading: String::new() }
    }

    /// The next rows are about this.
    pub(crate) fn heading(&mut self, heading: &str, more: &str) {
        println!("{heading}:{more}");
        self.heading = heading.to_string();
    }

    pub(crate) fn row(&mut self, name: &str, bytes: f64, seconds: f64) {
        let speed = bytes / seconds / 1e9;
        let ratio = speed / self.memcpy;
        println!("  {name:<48} {speed:>6.2} {ratio:>6.3}  ({:.0} ms)", 1e3 * seconds);
        self.ratios.insert(format!("{}: {name}", self.heading), ratio);
    }
}
