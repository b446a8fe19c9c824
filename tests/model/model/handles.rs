//! Operations on handles and mappings.

use super::super::op::Slot;
use super::super::sys::Sys;
use super::{Handle, Inode, Kind, Model, Node, Span};

impl Model {
    pub(crate) fn handle(&self, slot: Slot) -> Sys<&Handle> {
        self.handles[usize::from(slot)].as_ref().ok_or(libc::EBADF)
    }

    fn handle_mut(&mut self, slot: Slot) -> Sys<&mut Handle> {
        self.handles[usize::from(slot)].as_mut().ok_or(libc::EBADF)
    }

    /// Whether a reader of a released file may still have the bytes that it opened.
    pub(crate) fn uncertain(&self, slot: Slot) -> bool {
        self.handle(slot).is_ok_and(|handle| handle.kept.is_some() && self.nodes[handle.node].writers != handle.writers)
    }

    fn file(&self, handle: &Handle) -> Sys<&Inode> {
        match &self.nodes[handle.node] {
            inode if inode.kind == Kind::Directory => Err(libc::EISDIR),
            inode => Ok(inode),
        }
    }

    /// The content of `bytes` at `at`, at most `len`.
    pub(crate) fn part(bytes: &[u8], at: u64, len: u32) -> Vec<u8> {
        let from = bytes.len().min(at as usize);
        bytes[from..bytes.len().min(from + len as usize)].to_vec()
    }

    pub(crate) fn pread(&self, slot: Slot, len: u32, at: u64) -> Sys<Vec<u8>> {
        let handle = self.handle(slot)?;
        if !handle.read {
            return Err(libc::EBADF);
        }
        Ok(Self::part(&self.file(handle)?.data, at, len))
    }

    pub(crate) fn write(&mut self, slot: Slot, at: Option<u64>, bytes: &[u8], span: Span) -> Sys<u64> {
        let handle = self.handle(slot)?.clone();
        if !handle.write {
            return Err(libc::EBADF);
        }
        let len = self.nodes[handle.node].data.len() as u64;
        let from = if handle.append { len } else { at.unwrap_or(handle.position) };
        if !bytes.is_empty() {
            self.write_at(handle.node, from as usize, bytes, span);
        }
        if at.is_none() && !(handle.append && bytes.is_empty()) {
            self.handle_mut(slot)?.position = from + bytes.len() as u64;
        }
        Ok(bytes.len() as u64)
    }

    pub(crate) fn ftruncate(&mut self, slot: Slot, len: usize, span: Span) -> Sys<()> {
        let handle = self.handle(slot)?;
        if !handle.write {
            return Err(libc::EINVAL);
        }
        let node = handle.node;
        self.resize(node, len, span);
        Ok(())
    }

    pub(crate) fn fallocate(&mut self, slot: Slot, mode: i32, at: usize, len: usize, span: Span) -> Sys<()> {
        let handle = self.handle(slot)?;
        if len == 0 {
            return Err(libc::EINVAL);
        }
        if !handle.write {
            return Err(libc::EBADF);
        }
        let node = handle.node;
        let inode = &mut self.nodes[node];
        let before = inode.mtime.clone();
        let keep = mode & libc::FALLOC_FL_KEEP_SIZE != 0;
        if !keep && inode.data.len() < at + len {
            inode.data.resize(at + len, 0);
        }
        if mode & (libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_ZERO_RANGE) != 0 {
            let end = inode.data.len();
            inode.data[at.min(end)..(at + len).min(end)].fill(0);
        }
        inode.changed(span);
        // Where nothing had to be done.
        inode.mtime.iter_mut().zip(before).for_each(|(spans, before)| spans.extend(before));
        Ok(())
    }

    pub(crate) fn seek(&mut self, slot: Slot, at: i64, whence: i32) -> Sys<u64> {
        let handle = self.handle(slot)?;
        let from = match whence {
            libc::SEEK_SET => 0,
            libc::SEEK_CUR => handle.position as i64,
            _ => self.nodes[handle.node].data.len() as i64,
        };
        let to = u64::try_from(from + at).map_err(|_| libc::EINVAL)?;
        self.handle_mut(slot)?.position = to;
        Ok(to)
    }

    pub(crate) fn copy_range(&mut self, from: (Slot, u64), to: (Slot, u64), len: u64, span: Span) -> Sys<u64> {
        let (source, target) = (self.handle(from.0)?, self.handle(to.0)?);
        let (input, output) = (self.file(source)?, self.file(target)?);
        if input.kind != Kind::File || output.kind != Kind::File {
            return Err(libc::EINVAL);
        }
        if !source.read || !target.write || target.append {
            return Err(libc::EBADF);
        }
        let len = len.min((input.data.len() as u64).saturating_sub(from.1));
        if source.node == target.node && to.1 + len > from.1 && to.1 < from.1 + len {
            return Err(libc::EINVAL);
        }
        let bytes = Self::part(&input.data, from.1, len as u32);
        let node = target.node;
        if len > 0 {
            self.write_at(node, to.1 as usize, &bytes, span);
        }
        Ok(len)
    }

    pub(crate) fn flock(&mut self, slot: Slot, how: i32) -> Sys<()> {
        let node = self.handle(slot)?.node;
        let others = |(other, handle): (usize, &Option<Handle>)| {
            let lock = handle.as_ref().filter(|handle| handle.node == node && other != usize::from(slot))?.lock;
            lock.filter(|lock| how == libc::LOCK_EX || *lock == libc::LOCK_EX)
        };
        if how != libc::LOCK_UN && self.handles.iter().enumerate().find_map(others).is_some() {
            // A changed lock is dropped first, and does not come back (flock(2)).
            self.handle_mut(slot)?.lock = None;
            return Err(libc::EWOULDBLOCK);
        }
        self.handle_mut(slot)?.lock = (how != libc::LOCK_UN).then_some(how);
        Ok(())
    }

    // --- mappings

    /// Whether a shared mapping may be made.
    pub(crate) fn may_map(&self, slot: Slot, write: bool) -> Sys<()> {
        let handle = self.handle(slot)?;
        if !handle.read || (write && !handle.write) {
            return Err(libc::EACCES);
        }
        if self.nodes[handle.node].kind == Kind::Directory { Err(libc::ENODEV) } else { Ok(()) }
    }

    pub(crate) fn store(&mut self, node: Node, at: usize, bytes: &[u8], span: Span) {
        if !bytes.is_empty() {
            self.write_at(node, at, bytes, span);
        }
    }
}
