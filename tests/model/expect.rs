//! The model's expected answer to an operation.

use super::model::{Held, Model, Node, Span};
use super::op::{Op, TARGETS, XATTRS};
use super::sys::Sys;
use super::world::{Answer, Said};

#[derive(Debug)]
pub(crate) enum Expected {
    Is(Said),
    /// The first is POSIX's answer. On the mount, readers of a released file that somebody writes to may get another.
    OneOf(Vec<Said>),
    /// Attributes of this file.
    Stat(Node),
    /// The next data or hole: file systems may keep different holes.
    Edge {
        node: Node,
        from: u64,
        data: bool,
    },
}

fn plain(result: Sys<()>) -> Expected {
    Expected::Is(result.map(|()| Answer::Done))
}

fn number(result: Sys<u64>) -> Expected {
    Expected::Is(result.map(Answer::Number))
}

fn bytes(result: Sys<Vec<u8>>) -> Expected {
    Expected::Is(result.map(Answer::Bytes))
}

fn failed(code: i32) -> Expected {
    Expected::Is(Err(code))
}

/// Does it in the model. `data` are the bytes that are written.
pub(crate) fn expected(model: &mut Model, op: &Op, data: &[u8], span: Span) -> Expected {
    match *op {
        Op::Open(slot, at, flags, mode) => {
            model.handles[usize::from(slot)] = None;
            plain(model.open(slot, at, flags, mode, span))
        }
        Op::Close(slot) => plain(model.handles[usize::from(slot)].take().map(drop).ok_or(libc::EBADF)),
        Op::Read(slot, len) => {
            let position = model.handle(slot).map_or(0, |handle| handle.position);
            let read = model.pread(slot, len, position);
            if let (Ok(read), Some(handle)) = (&read, &mut model.handles[usize::from(slot)]) {
                handle.position += read.len() as u64;
            }
            bytes(read)
        }
        Op::Pread(slot, len, at) => {
            let now = model.pread(slot, len, at.into()).map(Answer::Bytes);
            match model.handle(slot).ok().and_then(|handle| handle.kept.as_ref()) {
                Some(kept) if model.uncertain(slot) => {
                    Expected::OneOf(vec![now, Ok(Answer::Bytes(Model::part(kept, at.into(), len)))])
                }
                _ => Expected::Is(now),
            }
        }
        Op::Write(slot, _) => number(model.write(slot, None, data, span)),
        Op::Pwrite(slot, at, _) => number(model.write(slot, Some(at.into()), data, span)),
        Op::Seek(slot, at, whence) if whence == libc::SEEK_DATA || whence == libc::SEEK_HOLE => {
            let node = match model.handle(slot) {
                Ok(handle) => handle.node,
                Err(code) => return failed(code),
            };
            // Where only zeros follow, a file system may find data or none: the position is the same after both (`World`).
            let _ = model.seek(slot, 0, libc::SEEK_SET);
            match u64::try_from(at) {
                Ok(from) => Expected::Edge { node, from, data: whence == libc::SEEK_DATA },
                Err(_) => failed(libc::ENXIO),
            }
        }
        Op::Seek(slot, at, whence) => number(model.seek(slot, at, whence)),
        Op::Ftruncate(slot, len) => plain(model.ftruncate(slot, len as usize, span)),
        Op::Truncate(at, len) => plain(model.truncate(at, len as usize, span)),
        Op::Fallocate(slot, mode, at, len) => plain(model.fallocate(slot, mode, at as usize, len as usize, span)),
        Op::Fsync(slot, _) => plain(model.handle(slot).map(drop)),
        Op::Fstat(slot) => match model.handle(slot) {
            Ok(handle) => Expected::Stat(handle.node),
            Err(code) => failed(code),
        },
        Op::Flock(slot, how) => plain(model.flock(slot, how)),
        Op::CopyRange(from, at, to, to_at, len) => {
            number(model.copy_range((from, at.into()), (to, to_at.into()), len.into(), span))
        }
        Op::MapRead(slot, at, len) => match model.may_map(slot, false) {
            Ok(()) => bytes(model.pread(slot, len, at.into())),
            Err(code) => failed(code),
        },
        Op::MapWrite(slot, at, _) => {
            let result = model.may_map(slot, true);
            if let (Ok(()), Ok(handle)) = (result, model.handle(slot)) {
                model.store(handle.node, at as usize, data, span);
            }
            plain(result)
        }
        Op::MapHold(map, slot) => {
            model.maps[usize::from(map)] = None;
            let result = model.may_map(slot, false);
            if let (Ok(()), Ok(handle)) = (result, model.handle(slot)) {
                let len = model.nodes[handle.node].data.len();
                let (node, write) = (handle.node, handle.write);
                model.maps[usize::from(map)] = Some(Held { node, write, len, stored: None, kept: Vec::new() });
            }
            plain(result)
        }
        Op::MapStore(map, at, _) => {
            if let Some(node) = model.maps[usize::from(map)].as_ref().map(|held| held.node) {
                let before = model.nodes[node].mtime.clone();
                model.store(node, at as usize, data, span);
                // Marked for update no later than by msync or munmap.
                model.nodes[node].mtime.iter_mut().zip(before).for_each(|(spans, before)| spans.extend(before));
            }
            plain(Ok(()))
        }
        Op::MapLoad(map, at, len) => match &model.maps[usize::from(map)] {
            Some(held) => {
                let now = &model.nodes[held.node].data;
                let part = |bytes: &Vec<u8>| Ok(Answer::Bytes(Model::part(bytes, at.into(), len)));
                Expected::OneOf(std::iter::once(now).chain(&held.kept).map(part).collect())
            }
            None => failed(libc::EBADF),
        },
        // The history takes it away, because it knows the time.
        Op::MapDrop(map) => plain(model.maps[usize::from(map)].as_ref().map(drop).ok_or(libc::EBADF)),
        Op::Rename(from, to, how) => plain(model.rename(from, to, how, span)),
        Op::Link(from, to) => plain(model.link(from, to, span)),
        Op::Symlink(target, at) => plain(model.symlink(TARGETS[usize::from(target)], at, span)),
        Op::Readlink(at) => Expected::Is(model.existing(at, false).and_then(|node| match &*model.nodes[node].target {
            "" => Err(libc::EINVAL),
            target => Ok(Answer::Names(vec![target.into()])),
        })),
        Op::Unlink(at) => plain(model.remove(at, false, span)),
        Op::Mkdir(at, mode) => plain(model.mkdir(at, mode, span)),
        Op::Rmdir(at) => plain(model.remove(at, true, span)),
        Op::Mknod(at, mode) => plain(model.mknod(at, mode, span)),
        Op::List(at) => Expected::Is(model.list(at).map(Answer::Names)),
        Op::Lstat(at) => match model.existing(at, false) {
            Ok(node) => Expected::Stat(node),
            Err(code) => failed(code),
        },
        Op::Chmod(at, mode) => plain(model.chmod(at, mode)),
        Op::Chown(at, uid, gid) => plain(model.chown(at, uid, gid)),
        Op::Utimens(at, atime, mtime) => plain(model.utimens(at, atime, mtime, span)),
        Op::SetXattr(at, name, _, flags) => plain(model.setxattr(at, XATTRS[usize::from(name)], data.to_vec(), flags)),
        Op::GetXattr(at, name) => bytes(model.getxattr(at, XATTRS[usize::from(name)])),
        Op::ListXattr(at) => Expected::Is(
            model.existing(at, false).map(|node| Answer::Names(model.nodes[node].xattrs.keys().cloned().collect())),
        ),
        Op::RemoveXattr(at, name) => plain(model.removexattr(at, XATTRS[usize::from(name)])),
        Op::Save(..) | Op::Copy(..) => unreachable!("taken apart before"),
        Op::Sync | Op::Release(_) | Op::Recall(_) | Op::Pin(_) | Op::Unpin(_) | Op::Gc | Op::Remount => {
            unreachable!("only the mount has these")
        }
    }
}
