//! Paths: which files are states of one lineage.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use formats::elasticdl;
use stepfs::store::step_pattern;

/// Any path.
pub(crate) fn names(data: &[u8]) {
    let path = Path::new(OsStr::from_bytes(data));
    let pattern = step_pattern::pattern(path);
    assert!(pattern.len() <= data.len() + 1);
    assert_eq!(pattern, pattern.to_ascii_lowercase());
    let steps = step_pattern::steps(path);
    assert!(pattern.iter().filter(|byte| **byte == b'#').count() >= steps.len());
    if let Some(group) = step_pattern::group(path) {
        assert!(path.starts_with(&group) && group.iter().count() < path.iter().count());
    }
    let _ = step_pattern::counts_training(path);
    if let Some(shard) = step_pattern::shard(data) {
        assert!(shard.of.contains(&b'*'));
    }
    let Ok(text) = std::str::from_utf8(data) else { return };
    if let Some(shard) = elasticdl::Shard::parse(text) {
        assert_eq!(elasticdl::Shard::parse(&shard.name()), Some(shard));
    }
    let _ = text.parse::<stepfs::store::Id>().map(|id| assert_eq!(id.to_string(), text));
    let count = 1 + data.len() as u32 % 7;
    assert!(elasticdl::shard_of(text, count) < count);
}
