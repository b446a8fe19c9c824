//! Mounting and unmounting itself.

use std::fs;
use std::path::Path;
use std::process::Command;

use super::support::Mounted;
use stepfs::archive::Archive;
use stepfs::fs::{MountError, MountOptions, clear_dead_mount, serve, unmount};
use stepfs::store::Store;

fn mounted_at(dir: &Path) -> usize {
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    table.lines().filter(|line| line.split(' ').nth(4) == dir.to_str()).count()
}

/// Takes the tmpfs down even if the test fails.
struct Tmpfs<'a>(&'a Path);

impl Drop for Tmpfs<'_> {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0).status();
    }
}

#[test]
fn what_it_is_mounted_over_stays() {
    let dir = tempfile::tempdir().unwrap();
    let point = dir.path().join("mnt");
    fs::create_dir(&point).unwrap();
    let done = Command::new("mount").args(["-t", "tmpfs", "tmpfs"]).arg(&point).status().unwrap();
    assert!(done.success(), "this test needs root");
    let below = point.clone();
    let _tmpfs = Tmpfs(&below);
    fs::write(point.join("below"), "x").unwrap();
    let m = Mounted::on(dir, true);
    assert_eq!(mounted_at(&point), 2);
    assert!(!point.join("below").exists());
    let _dir = m.unmount_keeping();
    assert_eq!(mounted_at(&point), 1);
    assert!(point.join("below").exists());
}

#[test]
fn a_mount_in_use_says_by_whom() {
    let m = Mounted::new(true);
    fs::write(m.mnt().join("f"), "x").unwrap();
    let mut reader = Command::new("sleep").arg("60").current_dir(m.mnt()).spawn().unwrap();
    match unmount(&m.mnt()) {
        Err(MountError::Busy(_, who)) => assert!(who.contains(&format!("sleep ({})", reader.id())), "{who}"),
        other => panic!("{other:?}"),
    }
    reader.kill().unwrap();
    reader.wait().unwrap();
    assert!(!clear_dead_mount(&m.mnt()).unwrap(), "it lives");
    m.unmount();
}

#[test]
fn places_that_cannot_be_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("store");
    let archive = Archive::open(Store::open(&root).unwrap()).unwrap();
    let mount = |point: &Path| serve(archive.clone(), point, &MountOptions::default(), || panic!("it is served"));
    assert!(matches!(mount(&dir.path().join("none")), Err(MountError::Directory(..))));
    assert!(matches!(mount(&root.join("stepfs.toml")), Err(MountError::Directory(..))));
    assert!(matches!(mount(&root.join("tree")), Err(MountError::Overlap { .. })));
    assert!(matches!(mount(dir.path()), Err(MountError::Overlap { .. })));
}

#[test]
fn a_second_mount_on_top_is_refused() {
    let m = Mounted::new(true);
    let other = tempfile::tempdir().unwrap();
    let archive = Archive::open(Store::open(other.path()).unwrap()).unwrap();
    let refused = serve(archive, &m.mnt(), &MountOptions::default(), || panic!("it is served"));
    assert!(matches!(refused, Err(MountError::Mounted(..))), "{refused:?}");
}

#[test]
fn what_is_stored_is_there_after_the_next_mount() {
    let m = Mounted::new(true);
    fs::create_dir(m.mnt().join("d")).unwrap();
    fs::write(m.mnt().join("d/f"), "kept").unwrap();
    let before = fs::metadata(m.mnt().join("d")).unwrap().modified().unwrap();
    let dir = m.unmount_keeping();
    let again = Mounted::on(dir, false);
    assert_eq!(fs::read(again.mnt().join("d/f")).unwrap(), b"kept");
    assert_eq!(fs::metadata(again.mnt().join("d")).unwrap().modified().unwrap(), before);
}
