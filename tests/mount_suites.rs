//! What other people's POSIX suites found in a mount, each in a few lines: times of mappings.

mod support;

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use support::{Mapping, Mounted, state, wait_until};

/// With passthrough the daemon does not see the store; the kernel must not go by what it knew before the open.
#[test]
fn a_store_through_a_mapping_shows_in_the_times_at_once() {
    let m = Mounted::new(true);
    let path = m.mnt().join("f");
    fs::write(&path, vec![1; 4096]).unwrap();
    wait_until("it is at rest", || state(&path) != "staged");
    let times = || {
        let m = fs::metadata(&path).unwrap();
        ((m.mtime(), m.mtime_nsec()), (m.ctime(), m.ctime_nsec()))
    };
    // Longer than a tick of the clock that stamps files.
    let wait = || std::thread::sleep(Duration::from_millis(30));
    // The kernel learns the attributes, and may believe them for a second.
    let looked_up = times();
    let file = File::options().read(true).write(true).open(&path).unwrap();
    let mut mapping = Mapping::new(&file);
    wait();
    mapping.bytes()[0] = 2;
    let stored = times();
    assert!(stored.0 > looked_up.0 && stored.1 > looked_up.1, "{looked_up:?}, then {stored:?}");
    // The mapping outlives the descriptor. A page that was written out tells of the next store to it.
    drop(file);
    File::open(m.tree().join("f")).unwrap().sync_all().unwrap();
    let closed = times();
    wait();
    mapping.bytes()[0] = 3;
    let after = times();
    assert!(after.0 > closed.0 && after.1 > closed.1, "{closed:?}, then {after:?}");
}
