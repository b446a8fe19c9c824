//! Readers in many orders of their threads: bytes are right, each unit is decoded once, and no thread waits for ever.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use super::*;
use crate::store::durable::scratch;
use crate::store::{Store, Stub};
use crate::sync::{in_many_orders, thread};

/// The file whose reader it is.
const OWNER: u64 = 7;
/// Room for all.
const MUCH: u64 = 1 << 30;

/// A released file of a golden store whose object is a difference to another one, and its decoded bytes.
fn released() -> (PathBuf, Id, Arc<Vec<u8>>) {
    static DECODED: OnceLock<Vec<u8>> = OnceLock::new();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/adam");
    let store = Store::look(&root).unwrap();
    let file = File::open(store.tree().join("state/iter_3.safetensors")).unwrap();
    let id = Stub::read(&file, store.id()).unwrap().unwrap().object;
    let objects = store.objects();
    let decode = move || {
        // The decoder alone, without readers and caches.
        let chain = Chain::open(&Objects::load(&objects, |_, _| {}).unwrap(), id).unwrap();
        assert!(chain.objects().len() > 1);
        let to = tempfile::tempfile().unwrap();
        copy(&chain, &|bytes, at| scratch::write_all_at(&to, bytes, at)).unwrap();
        let _ = DECODED.set(content(&to));
    };
    // Its locks belong to the scheduler too.
    shuttle::check_random(decode, 1);
    (store.objects(), id, Arc::new(DECODED.get().unwrap().clone()))
}

fn content(file: &File) -> Vec<u8> {
    std::fs::read(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap()
}

/// Reads all of an object in pieces of this size, from the front or from the back.
fn read_in_pieces(reader: &Reader, piece: usize, backwards: bool) -> Result<Vec<u8>, ReadError> {
    let mut bytes = vec![0; reader.len() as usize];
    let mut pieces: Vec<(usize, &mut [u8])> = bytes.chunks_mut(piece).enumerate().collect();
    if backwards {
        pieces.reverse();
    }
    for (number, buf) in pieces {
        let offset = number * piece;
        // As the file system does: decoded bytes are read from the file.
        match reader.present(offset as u64, buf.len() as u64) {
            Some(file) => std::os::unix::fs::FileExt::read_exact_at(file.file(), buf, offset as u64).unwrap(),
            None => assert_eq!(reader.read_at(offset as u64, buf)?, buf.len()),
        }
    }
    Ok(bytes)
}

/// Three readers. With `forget`, one of them drops the cached data meanwhile.
fn three_read(objects: &Path, cache: u64, id: Id, forget: bool) -> (Arc<Recall>, Vec<Result<Vec<u8>, ReadError>>) {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let objects = Arc::new(Objects::load(objects, |_, _| {}).unwrap());
    let recall = Recall::new(objects, Cache::new(dir.path(), cache).unwrap(), MUCH, 1).unwrap();
    let reader = recall.reader_for(id, OWNER).unwrap();
    let threads: Vec<_> = (0..3usize)
        .map(|number| {
            let (recall, reader) = (Arc::clone(&recall), Arc::clone(&reader));
            thread::spawn(move || {
                let read = read_in_pieces(&reader, 70_000 - 20_000 * number, number == 1);
                if forget && number == 2 {
                    recall.forget(id);
                }
                read
            })
        })
        .collect();
    let read = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
    // A task of the pool may have it for a moment longer.
    let last = Arc::downgrade(&reader);
    drop(reader);
    while last.strong_count() > 0 {
        thread::yield_now();
    }
    (recall, read)
}

#[test]
fn readers_see_the_same_bytes_and_the_caches_keep_their_limits() {
    let (objects, id, expected) = released();
    let len = expected.len() as u64;
    in_many_orders(move || {
        for (cache, forget) in [(MUCH, true), (MUCH, false), (0, true)] {
            let (recall, read) = three_read(&objects, cache, id, forget);
            for bytes in read {
                assert!(*bytes.unwrap() == **expected);
            }
            // A unit that was decoded twice would count twice, and the file would never be complete.
            match forget {
                true => assert!(recall.cached_bytes() == 0 || recall.cached_bytes() == len && len <= cache),
                false => assert_eq!(recall.cached_bytes(), len),
            }
            // Reads keep no states.
            assert_eq!(recall.memory.status().bytes, 0);
            // A file that counts as whole is whole.
            if let Some(whole) = recall.cache.take(&(id, OWNER)) {
                assert!(content(whole.file()) == *expected);
            }
        }
    });
}

#[test]
fn a_unit_that_is_damaged_is_an_error_for_all_who_wait_for_it() {
    let (objects, id, _) = released();
    let damaged = tempfile::tempdir_in("/dev/shm").unwrap();
    for shard in std::fs::read_dir(objects).unwrap() {
        let shard = shard.unwrap();
        std::fs::create_dir(damaged.path().join(shard.file_name())).unwrap();
        for object in std::fs::read_dir(shard.path()).unwrap() {
            let object = object.unwrap();
            let to = damaged.path().join(shard.file_name()).join(object.file_name());
            let mut bytes = std::fs::read(object.path()).unwrap();
            if object.file_name().to_str() == Some(&id.to_string()) {
                // The first bytes after the header: a payload.
                bytes[300] ^= 1;
            }
            std::fs::write(to, bytes).unwrap();
        }
    }
    in_many_orders(move || {
        for cache in [MUCH, 0] {
            let (recall, read) = three_read(damaged.path(), cache, id, false);
            assert!(read.iter().all(|bytes| bytes.as_ref().is_err_and(ReadError::is_damage)));
            assert_eq!(recall.cached_bytes(), 0);
        }
    });
}
