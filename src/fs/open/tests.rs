use std::path::Path;

use super::*;
use crate::archive::{Archive, FileId, Namespace, Outcome};
use crate::fs::Core;
use crate::fs::archive_hooks::Served;
use crate::fs::numbers::ROOT;
use crate::store::Store;

const USER: Caller = Caller { uid: 1, gid: 1, thread: 0 };

/// A mount without a kernel, of a store with one file, and the file's node.
fn fixture() -> (tempfile::TempDir, Arc<Core>, u64) {
    mounted(true)
}

fn mounted(passthrough: bool) -> (tempfile::TempDir, Arc<Core>, u64) {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    std::fs::write(store.tree().join("file"), "bytes").unwrap();
    let core = Arc::new(Core::new(Archive::open(store).unwrap(), passthrough, None).unwrap());
    let ino = core.tree.lookup(ROOT, OsStr::new("file")).unwrap().1.ino.0;
    (dir, core, ino)
}

/// The first part of an open, up to the question whether the kernel serves the file. It answers that it does not.
fn registered(core: &Core, ino: u64, access: Access) -> Option<Opening> {
    match core.files.try_open(ino, USER, access, None, &mut None).unwrap() {
        Tried::Register(opening) => Some(Opening { mode: Some(Mode::Daemon), ..opening }),
        _ => panic!("the kernel was not asked"),
    }
}

fn is_idle(core: &Core) -> bool {
    let file = FileId::of(&core.tree.archive().store().tree().join("file").metadata().unwrap());
    Served(Arc::downgrade(&core.files)).idle(Path::new("file"), file) == Outcome::Done
}

/// The daemon has the file open for writing then. The archive must not take it for a program that does, and wait for the
/// end of that to examine the file once more.
#[test]
fn an_open_that_asks_the_kernel_keeps_the_archive_away() {
    let (_dir, core, ino) = fixture();
    let access = Access::of(libc::O_RDONLY);
    let mut opening = registered(&core, ino, access);
    assert!(!is_idle(&core));
    assert!(core.files.mappings.is_empty(), "it is taken for a writer's");
    let Tried::Done(answer) = core.files.try_open(ino, USER, access, None, &mut opening).unwrap() else {
        panic!("it is not open");
    };
    assert!(!is_idle(&core));
    core.files.release(ino, answer.fh);
    assert!(is_idle(&core));
}

/// The last reference to a backing file asks a helper to give it up, which must not happen under the table's lock.
#[test]
fn what_an_open_does_not_need_is_left_to_the_caller() {
    let (_dir, core, ino) = fixture();
    let access = Access::of(libc::O_RDWR);
    let (mut first, mut second) = (registered(&core, ino, access), registered(&core, ino, access));
    assert!(core.files.try_open(ino, USER, access, None, &mut first).is_ok() && first.is_none());
    // Another open was faster.
    assert!(core.files.try_open(ino, USER, access, None, &mut second).is_ok() && second.is_some());
    assert_eq!(core.tree.table().node(ino).unwrap().opening, 0);
    // A created file, that another program has opened before its creator.
    let mut table = core.tree.table();
    assert!(core.files.install(&mut table, ino, access, &mut second).is_ok() && second.is_some());
}

#[test]
fn what_a_failed_open_has_registered_is_left_to_the_caller() {
    let (_dir, core, ino) = fixture();
    let access = Access::of(libc::O_RDWR);
    let mut opening = registered(&core, ino, access);
    // Its bits cannot be taken away.
    std::fs::remove_file(core.tree.archive().store().tree().join("file")).unwrap();
    assert!(core.files.try_open(ino, USER, access, None, &mut opening).is_err() && opening.is_some());
    assert_eq!(core.tree.table().node(ino).unwrap().opening, 0);
}

/// Else a reader on CephFS keeps all others from a cache, and a writer's file is never made durable at its end.
#[test]
fn a_file_is_open_to_write_once_a_program_writes_it() {
    let (_dir, core, ino) = mounted(false);
    let open = |flags| match core.files.try_open(ino, USER, Access::of(flags), None, &mut None).unwrap() {
        Tried::Done(answer) => core.files.handle(answer.fh).unwrap().file().unwrap(),
        _ => panic!("it is not open"),
    };
    let may_write = |file: &std::fs::File| rustix::fs::fcntl_getfl(file).unwrap().contains(rustix::fs::OFlags::RDWR);
    assert!(!may_write(&open(libc::O_RDONLY)));
    assert!(may_write(&open(libc::O_RDONLY | libc::O_TRUNC)), "it changes the file, too");
    let written = open(libc::O_WRONLY);
    assert!(may_write(&written));
    assert!(Arc::ptr_eq(&written, &open(libc::O_RDONLY)), "later readers share it");
    let table = core.tree.table();
    let opened = table.node(ino).unwrap().opened.as_ref().unwrap();
    assert!(
        matches!(&opened.source, Source::File(file) if Arc::ptr_eq(file, &written)),
        "it is the one of the last release"
    );
}
