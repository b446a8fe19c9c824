//! The mount's own state in many orders of its threads: programs open, write, rename and remove files while the
//! archive releases them. There is no kernel; the test calls the operations.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, SystemTime};

use fuser::{FileHandle, RenameFlags};

use super::archive_hooks::Served;
use super::errno::Result;
use super::node::Access;
use super::node::{Handle, Source};
use super::numbers::ROOT;
use super::open::Tried;
use super::privileges::Caller;
use super::*;
use crate::store::Store;
use crate::sync::{Condvar, Mutex, in_many_orders, thread};

const READ: Access = Access { read: true, write: false, truncate: false, aside: false, append: false, by: None };
const WRITE: Access = Access { read: true, write: true, truncate: false, aside: false, append: false, by: None };
const ROOT_USER: Caller = Caller { uid: 0, gid: 0, thread: 0 };
/// Numbers in a state: enough that it is released.
const NUMBERS: usize = 20_000;
/// The largest error of a number under `balanced`, with updates of 1e-3.
const BOUND: f32 = 2e-3;

/// The checkpoint of a step: a safetensors file with one tensor.
fn state(step: u32) -> Vec<u8> {
    let header = format!(r#"{{"l.weight":{{"dtype":"F32","shape":[100,200],"data_offsets":[0,{}]}}}}"#, NUMBERS * 4);
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend_from_slice(header.as_bytes());
    let mut noise = 1u32;
    for at in 0..NUMBERS {
        noise = noise.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let update = ((noise >> 8) % 2001) as f32 / 1e6 - 1e-3;
        // Rows of different lengths, as parameters have.
        let value = (at as f32).sin() * (1.0 + at as f32 / NUMBERS as f32);
        out.extend_from_slice(&(value + step as f32 * update).to_le_bytes());
    }
    out
}

fn numbers(bytes: &[u8]) -> impl Iterator<Item = f32> {
    bytes[bytes.len() - NUMBERS * 4..].as_chunks().0.iter().map(|number| f32::from_le_bytes(*number))
}

/// A mount without a kernel, of a store with three checkpoints, and the bytes read from them.
struct Fixture {
    core: Arc<Core>,
    /// Bytes of a released file, once some thread has read it.
    seen: Mutex<HashMap<u32, Vec<u8>>>,
    _dir: tempfile::TempDir,
}

impl Fixture {
    fn new() -> Arc<Fixture> {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let store = Store::open(dir.path()).unwrap();
        for step in 1..=3u32 {
            let path = store.tree().join(format!("step_{step}.safetensors"));
            std::fs::write(&path, state(step)).unwrap();
            let modified = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000 + 60 * u64::from(step));
            File::options().write(true).open(&path).unwrap().set_modified(modified).unwrap();
        }
        // No states in memory: threads that decode would take its lock, and the scheduler does not know of them.
        let archive = Archive::open_with(store, 0).unwrap();
        let core = Arc::new(Core::new(Arc::clone(&archive), false, None).unwrap());
        archive.start(Arc::new(Served(Arc::downgrade(&core.files))));
        Arc::new(Fixture { core, seen: Mutex::default(), _dir: dir })
    }

    /// OPEN, as the kernel asks for it; the answer may come from a worker.
    fn open(&self, ino: u64, access: Access) -> Result<FileHandle> {
        let mut made = None;
        loop {
            let wanted = match self.core.files.try_open(ino, ROOT_USER, access, made.take(), &mut None)? {
                Tried::Done(answer) => return Ok(answer.fh),
                Tried::Recall(wanted) => wanted,
                Tried::Register(_) => unreachable!("passthrough is off"),
            };
            let answer = Arc::new((Mutex::new(None), Condvar::new()));
            let told = Arc::clone(&answer);
            self.core.files.recalls.make(ino, wanted, move |result| {
                *told.0.lock().unwrap() = Some(result);
                told.1.notify_one();
            });
            let mut result = answer.0.lock().unwrap();
            while result.is_none() {
                result = answer.1.wait(result).unwrap();
            }
            made = result.take().unwrap()?;
        }
    }

    /// Looks a name up, does something with an open file, and lets the kernel forget it. `None`: there is no such name.
    fn with<T>(&self, name: &str, access: Access, use_it: impl FnOnce(&Handle) -> T) -> Option<T> {
        let attributes = self.core.tree.lookup(ROOT, OsStr::new(name)).ok()?;
        let ino = attributes.1.ino.0;
        let used = self.open(ino, access).ok().map(|fh| {
            let used = use_it(&self.core.files.handle(fh).unwrap());
            self.core.files.release(ino, fh);
            used
        });
        let mut table = self.core.tree.table();
        table.forget(ino, 1);
        used
    }

    /// All bytes of a file, which must be a step's: as written, or as every reader of the released file sees them.
    fn read(&self, name: &str, step: u32) -> Option<Vec<u8>> {
        let bytes = self.with(name, READ, |handle| match handle.source() {
            Source::File(file) => {
                let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
                file.read_exact_at(&mut bytes, 0).unwrap();
                bytes
            }
            Source::Reader(reader) => {
                let mut bytes = vec![0; reader.len() as usize];
                assert_eq!(reader.read_at(0, &mut bytes).unwrap(), bytes.len());
                bytes
            }
        })?;
        let written = state(step);
        assert_eq!(bytes.len(), written.len(), "{name}");
        if bytes != written && bytes[WHERE..][..PATCH.len()] != *PATCH {
            let off = numbers(&bytes).zip(numbers(&written)).map(|(read, written)| (read - written).abs());
            assert!(off.fold(0.0, f32::max) <= BOUND, "{name} is off by more than it may");
            let mut seen = self.seen.lock().unwrap();
            assert!(*seen.entry(step).or_insert_with(|| bytes.clone()) == bytes, "{name} has changed twice");
        }
        Some(bytes)
    }

    /// Waits until the archive has nothing left to do.
    fn settle(&self) {
        while self.core.tree.archive().queue().queued > 0 {
            thread::yield_now();
        }
        assert_eq!(self.core.tree.archive().queue().failed, [""; 0]);
    }

    /// Ends all threads.
    fn stop(&self) {
        self.core.files.recalls.workers.stop();
        self.core.tree.archive().stop();
    }
}

/// A program writes this into a checkpoint: 64 numbers that are in no state.
const PATCH: &[u8] = &[0x42; 256];
const WHERE: usize = 1000;

#[test]
fn a_file_that_is_read_while_it_is_released_has_one_of_two_contents() {
    in_many_orders(|| {
        let fixture = Fixture::new();
        let readers: Vec<_> = [(1, "step_1.safetensors"), (1, "step_1.safetensors"), (2, "step_2.safetensors")]
            .into_iter()
            .map(|(step, name)| {
                let fixture = Arc::clone(&fixture);
                thread::spawn(move || (0..2).for_each(|_| drop(fixture.read(name, step).unwrap())))
            })
            .collect();
        readers.into_iter().for_each(|reader| reader.join().unwrap());
        fixture.settle();
        assert!(fixture.read("step_1.safetensors", 1).unwrap() != state(1), "it was not released");
        assert!(fixture.read("step_3.safetensors", 3).unwrap() == state(3), "the newest is exact");
        fixture.stop();
    });
}

#[test]
fn what_is_written_renamed_and_removed_while_it_is_released_is_what_the_program_did() {
    in_many_orders(|| {
        let fixture = Fixture::new();
        let run = |work: fn(&Fixture)| {
            let fixture = Arc::clone(&fixture);
            thread::spawn(move || work(&fixture))
        };
        let threads = [
            run(|fixture| {
                let patched = fixture.with("step_1.safetensors", WRITE, |handle| {
                    handle.file().expect("whoever may write has a file").write_all_at(PATCH, WHERE as u64).unwrap();
                });
                assert!(patched.is_some());
            }),
            run(|fixture| {
                fixture.read("step_1.safetensors", 1).unwrap();
                let names = ["step_2.safetensors", "kept.safetensors"].map(OsStr::new);
                fixture.core.tree.rename((ROOT, names[0]), (ROOT, names[1]), RenameFlags::empty()).unwrap();
                fixture.read("kept.safetensors", 2).unwrap();
            }),
            run(|fixture| {
                // Under either name, or under none, since a rename is under way.
                let before = fixture.read("step_2.safetensors", 2);
                let after = fixture.read("kept.safetensors", 2);
                assert!(before.is_some() || after.is_some());
                trash::unlink(&fixture.core.tree, ROOT, OsStr::new("step_3.safetensors"), ROOT_USER).unwrap();
                assert!(fixture.read("step_3.safetensors", 3).is_none());
            }),
        ];
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        fixture.settle();
        let first = fixture.read("step_1.safetensors", 1).unwrap();
        assert_eq!(first[WHERE..][..PATCH.len()], *PATCH, "what was written is lost");
        // Each number is the written one, or one that the program has read before or could have. An edge may cut a
        // number.
        let written = state(1);
        let off = numbers(&first).zip(numbers(&written)).filter(|(now, then)| (now - then).abs() > BOUND);
        assert!(off.count() <= PATCH.len() / 4 + 1);
        fixture.read("kept.safetensors", 2).unwrap();
        assert!(fixture.read("step_2.safetensors", 2).is_none() && fixture.read("step_3.safetensors", 3).is_none());
        // The kernel has forgotten everything: only the root is left.
        assert_eq!(fixture.core.tree.table().len(), 1);
        fixture.stop();
    });
}
