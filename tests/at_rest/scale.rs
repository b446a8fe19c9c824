//! A store of 20,000 files in 2,000 checkpoint directories. Not part of the suite:
//!
//!     STEPFS_SCALE_DIR=/somewhere/on/a/disk cargo test --release --test at_rest scale -- --ignored --nocapture

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use stepfs::archive::Archive;
use stepfs::store::durable::CrashPoint;
use stepfs::store::object::{FOOTER_BYTES, Footer, HEADER_BYTES, Header, path_of};
use stepfs::store::{Id, Store, Stub};

use super::series::Rest;

const DIRECTORIES: usize = 2000;
const FILES: usize = 10;

/// Fills the store with released files. Each has its own object, a copy of one object under another name.
fn fill(root: &Path) -> PathBuf {
    let mut rest = Rest::new();
    for at in 1..=2 {
        rest.write(&format!("x_{at}.bin"), format!("state {at}\n").repeat(10_000).as_bytes());
    }
    rest.settle();
    let object = fs::read(rest.object_path("x_1.bin")).unwrap();
    let stub = rest.stub("x_1.bin").unwrap();
    let target = root.join("store");
    let _ = fs::remove_dir_all(&target);
    let store = Store::open(&target).unwrap();
    let (head, tail) = (object.first_chunk::<HEADER_BYTES>().unwrap(), object.last_chunk::<FOOTER_BYTES>().unwrap());
    let (mut header, mut footer) = (Header::decode(head).unwrap(), Footer::decode(tail).unwrap());
    for directory in 0..DIRECTORIES {
        let directory_path = store.tree().join(format!("checkpoint-{directory}"));
        fs::create_dir(&directory_path).unwrap();
        for file in 0..FILES {
            let id = Id(((directory * FILES + file) as u128 + 1)
                .wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835)
                .to_le_bytes());
            (header.id, footer.id, header.lineage) = (id, id, file as u64);
            header.modified_ns = directory as i64;
            let mut bytes = object.clone();
            bytes[..HEADER_BYTES].copy_from_slice(&header.encode());
            let end = bytes.len() - FOOTER_BYTES;
            bytes[end..].copy_from_slice(&footer.encode());
            let path = path_of(&store.objects(), id);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, bytes).unwrap();
            let file = directory_path.join(format!("shard_rank{file}.bin"));
            let file = store.io().create(&file, CrashPoint::StubWritten).unwrap();
            Stub { store: store.id(), object: id, logical_len: stub.logical_len }.write(&file).unwrap();
            file.as_file()
                .set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000 + directory as u64))
                .unwrap();
        }
    }
    target
}

fn resident_kib() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
#[ignore = "a measurement"]
fn twenty_thousand_files() {
    let dir = tempfile::tempdir().unwrap();
    let root = std::env::var_os("STEPFS_SCALE_DIR").map_or(dir.path().to_path_buf(), PathBuf::from);
    let target = fill(&root);
    for cold in [false, true] {
        if cold {
            // SAFETY: no arguments, cannot fail.
            unsafe { libc::sync() };
            if fs::write("/proc/sys/vm/drop_caches", "3").is_err() {
                println!("not root: no measurement without the page cache");
                continue;
            }
        }
        let before = resident_kib();
        let started = Instant::now();
        let archive = Archive::open(Store::open(&target).unwrap()).unwrap();
        println!("cold: {cold}, opened in {:.2?}, {} KiB more", started.elapsed(), resident_kib() - before);
        let started = Instant::now();
        for directory in 0..DIRECTORIES / 2 {
            for file in 0..FILES {
                archive.removed(&PathBuf::from(format!("checkpoint-{directory}/shard_rank{file}.bin")));
            }
        }
        println!("half of them removed in {:.2?}", started.elapsed());
        assert_eq!(archive.queue().queued, 0);
        archive.stop();
    }
}
