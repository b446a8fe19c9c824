//! Histories that once failed, in shrunk form: run in both modes, compared after each operation and at the end only.

use super::history::Ground;
use super::op::{At, Data, Mode, Op, Series, index};
use super::sys::Stamp;

const CREATE: i32 = libc::O_RDWR | libc::O_CREAT;

fn run(operations: &[Op]) {
    for passthrough in [true, false] {
        let ground = Ground::new(passthrough);
        for cadence in [1, usize::MAX] {
            ground.history(cadence, operations).unwrap_or_else(|why| panic!("passthrough {passthrough}: {why}"));
        }
    }
}

fn save() -> Op {
    Op::Save(Series::States, false)
}

fn step(number: u8) -> At {
    index("s/step_1.safetensors") + number - 1
}

/// The model had taken the exact bytes for the last ones, as read just before the release.
#[test]
fn released_between_reading_it_and_asking_for_its_state() {
    run(&[
        Op::Open(2, index("c"), CREATE, 0o644),
        Op::Write(2, Data::State(0)),
        Op::Save(Series::States, true),
        Op::Save(Series::Texts, false),
        Op::Write(2, Data::Pattern(4411, 201)),
        save(),
        Op::SetXattr(index("c"), 1, 203, 0),
        Op::Recall(index("a")),
        Op::RemoveXattr(index("s"), 1),
    ]);
}

#[test]
fn the_first_look_at_a_released_file_is_an_open_for_writing() {
    run(&[save(), save(), save(), Op::Sync, Op::Open(0, step(1), libc::O_WRONLY | libc::O_DSYNC, 0o666)]);
}

#[test]
fn a_copy_within_a_file_ends_where_the_file_did() {
    run(&[
        Op::Open(1, index("b"), CREATE, 0o600),
        Op::Write(1, Data::Pattern(66_000, 2)),
        Op::CopyRange(1, 0, 1, 66_000, 90_000),
    ]);
}

/// Without passthrough a page that is stored to is written back later. The time moves then, whatever was set meanwhile.
#[test]
fn stored_written_and_mapped_twice() {
    let file = index("t/step-3.txt");
    run(&[
        Op::Open(2, file, CREATE | libc::O_EXCL, 0o666),
        Op::Pwrite(2, 8041, Data::Pattern(92, 39)),
        Op::MapHold(0, 2),
        Op::Pwrite(2, 69_168, Data::Pattern(34, 117)),
        Op::MapHold(1, 2),
        Op::MapDrop(0),
        Op::MapStore(1, 60, Data::Pattern(155, 174)),
        Op::Utimens(file, Stamp::Omit, Stamp::Now),
        Op::Write(2, Data::Pattern(63, 249)),
        Op::MapStore(1, 55, Data::Pattern(7303, 237)),
        Op::MapDrop(1),
    ]);
}

/// ext4 moves the time although nothing changes, and so does the mount.
#[test]
fn truncated_to_the_length_that_it_had() {
    run(&[Op::Copy(index("a"), step(3)), Op::Open(0, index("a"), CREATE, 0o640), Op::Truncate(index("a"), 0)]);
}

/// All ways of meeting a once released file again, with a reader that stays.
#[test]
fn a_reader_stays_while_its_file_is_written_renamed_and_removed() {
    let mut operations = vec![save(), save(), Op::Sync, Op::Open(0, step(1), libc::O_RDONLY, 0)];
    operations.extend([Op::Pread(0, 70_000, 0), Op::Close(0), Op::Open(0, step(1), libc::O_RDONLY, 0)]);
    for change in [
        Op::Open(1, step(1), libc::O_RDWR, 0),
        Op::Pwrite(1, 300, Data::Pattern(200, 3)),
        Op::Rename(step(1), index("last.safetensors"), Mode::Plain),
        Op::Close(1),
        save(),
        Op::Sync,
        Op::Unlink(index("last.safetensors")),
    ] {
        operations.extend([change, Op::Pread(0, 70_000, 0), Op::Pread(0, 500, 200)]);
    }
    run(&operations);
}

/// The reader has the decoded file, which is longer than the present one.
#[test]
fn a_reader_keeps_what_it_opened_when_the_file_is_emptied() {
    let open = |slot, flags| Op::Open(slot, step(1), flags, 0);
    run(&[save(), save(), Op::Sync, open(0, libc::O_RDONLY), open(1, libc::O_WRONLY | libc::O_TRUNC), Op::Close(1)]);
}

/// Pinned before it could be released, emptied, and saved again in place.
#[test]
fn a_pin_survives_being_emptied_and_exchanged() {
    run(&[
        save(),
        Op::Pin(step(1)),
        save(),
        Op::Sync,
        Op::Truncate(step(1), 0),
        Op::Open(0, step(1), libc::O_WRONLY, 0),
        Op::Write(0, Data::State(7)),
        Op::Close(0),
        save(),
        Op::Rename(step(1), step(2), Mode::Exchange),
        Op::Sync,
        Op::Unpin(step(2)),
        Op::Sync,
        Op::Remount,
    ]);
}

/// Fails if a released file loses its attributes, or the rest of its bytes, when it is emptied or cut.
#[test]
fn a_released_file_is_emptied_and_another_cut() {
    run(&[
        save(),
        save(),
        save(),
        Op::Sync,
        Op::Chmod(step(1), 0o2640),
        Op::Chown(step(1), 2, 1),
        Op::SetXattr(step(1), 1, 50, 0),
        Op::Pin(step(1)),
        Op::Truncate(step(1), 0),
        Op::Lstat(step(1)),
        Op::Truncate(step(2), 70_000 - 5000),
        Op::Unpin(step(1)),
        Op::Open(0, step(2), libc::O_RDWR | libc::O_TRUNC, 0),
        Op::Fstat(0),
    ]);
}

/// Fails if a file is released while somebody has it open to read.
#[test]
fn a_reader_keeps_a_file_from_being_released() {
    run(&[
        save(),
        Op::Open(0, step(1), libc::O_RDONLY, 0),
        save(),
        save(),
        Op::Sync,
        Op::Pread(0, 70_000, 0),
        Op::Release(step(1)),
        Op::Sync,
        Op::Pread(0, 70_000, 0),
        Op::Close(0),
        Op::Sync,
    ]);
}
