use super::*;
use crate::store::durable::Io;
use std::io::Write;

fn stub() -> Stub {
    Stub { store: Id([1; 16]), object: Id([2; 16]), logical_len: 1 << 20 }
}

/// A file that begins with `block` and has this length.
fn file(block: &[u8], len: u64) -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(block).unwrap();
    file.set_len(len).unwrap();
    file
}

#[test]
fn comes_back_with_its_length_and_little_space() {
    use std::os::unix::fs::MetadataExt;
    let dir = tempfile::tempdir().unwrap();
    let file = Io::disk().create(&dir.path().join("stub"), CrashPoint::StubWritten).unwrap();
    stub().write(&file).unwrap();
    assert_eq!(Stub::read_on(&file, Id([1; 16])).unwrap(), Some(stub()));
    let metadata = file.metadata().unwrap();
    assert_eq!(metadata.len(), 1 << 20);
    assert!(metadata.blocks() * 512 <= 16 * 1024, "the rest is a hole");
}

#[test]
fn no_changed_block_is_a_stub() {
    let block = stub().encode();
    assert_eq!(Stub::decode(&block), Ok(Some(stub())));
    for at in 0..STUB_BYTES {
        for mask in [0x01, 0x80, 0xff] {
            let mut changed = block;
            changed[at] ^= mask;
            assert_eq!(Stub::decode(&changed), Err(Damage("it is a damaged stub")), "byte {at}");
        }
    }
}

#[test]
fn another_stores_stub_is_an_ordinary_file() {
    assert_eq!(Stub::read(&file(&stub().encode(), 1 << 20), Id([3; 16])).unwrap(), None);
}

#[test]
fn a_file_of_another_length_is_no_stub() {
    for len in [0, 1, 4096, MIN_RELEASE_BYTES - 1, MIN_RELEASE_BYTES, (1 << 20) - 1, (1 << 20) + 1, 1 << 40] {
        assert!(!matches!(Stub::read(&file(&stub().encode(), len), Id([1; 16])), Ok(Some(_))), "{len}");
    }
    // Not even if the length agrees, if it is too small for a release.
    let small = Stub { logical_len: 5000, ..stub() };
    assert_eq!(Stub::read(&file(&small.encode(), 5000), Id([1; 16])).unwrap(), None);
}

#[test]
fn what_a_program_wrote_is_no_stub_however_much_it_looks_like_one() {
    let dir = tempfile::tempdir().unwrap();
    let own = Id([1; 16]);
    let mut damaged = stub().encode();
    damaged[100] ^= 1;
    for (at, block) in [stub().encode(), Stub { store: Id([9; 16]), ..stub() }.encode(), damaged].iter().enumerate() {
        let file = Io::disk().create(&dir.path().join(at.to_string()), CrashPoint::FileSealed).unwrap();
        file.write_all_at(block, 0, CrashPoint::FileSealed).unwrap();
        file.set_len(1 << 20, CrashPoint::FileSealed).unwrap();
        assert!(!matches!((Stub::read_on(&file, own), Stub::foreign(&file, own)), (Ok(None), Ok(None))), "{at}");
        match Stub::disown(&file, CrashPoint::FileSealed) {
            // The directory is on a file system without xattrs.
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => continue,
            result => result.unwrap(),
        }
        assert_eq!(Stub::read_on(&file, own).unwrap(), None);
        assert_eq!(Stub::foreign(&file, own).unwrap(), None);
    }
}
