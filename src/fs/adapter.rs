//! The protocol's operations. Each is one line or little more: the work is done elsewhere.

use std::ffi::OsStr;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use fuser::{
    AccessFlags, BsdFileFlags, CopyFileRangeFlags, Errno, FileHandle, Filesystem, INodeNo, InitFlags, IoctlFlags,
    KernelConfig, LockOwner, OpenFlags, PollEvents, PollFlags, PollNotifier, RenameFlags, ReplyAttr, ReplyCreate,
    ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyIoctl, ReplyLseek, ReplyOpen,
    ReplyPoll, ReplyStatfs, ReplyWrite, ReplyXattr, Request, TimeOrNow, WriteFlags,
};

use super::Core;
use super::attr::Change;
use super::errno::Fault;
use super::privileges::Caller;
use super::reply::entry;
use super::shared::when_free;
use super::trash;
use super::tree::Creator;

/// The protocol's operations.
pub(super) struct FuseAdapter {
    pub(super) core: Arc<Core>,
    pub(super) stack_depth: u32,
}

impl Filesystem for FuseAdapter {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> std::io::Result<()> {
        // O_TRUNC with the open: a released file that is emptied need not be recalled first.
        // Two are missing here, for the page cache must never hold former bytes. With FUSE_ASYNC_DIO the kernel does not
        // drop the pages that others read while an asynchronous direct write was under way. With FUSE_AUTO_INVAL_DATA
        // it drops pages that a write has filled when their file's time changes, and may read them anew before the
        // write arrives. Nothing but stepfs changes a file unseen by the kernel, and stepfs tells it.
        // In a shared store each name that the kernel gets has a descriptor, so it gets none that no program asked for.
        let with_attributes = match self.core.tree.archive().store().is_shared() {
            true => InitFlags::empty(),
            false => InitFlags::FUSE_DO_READDIRPLUS | InitFlags::FUSE_READDIRPLUS_AUTO,
        };
        let wanted = [
            InitFlags::FUSE_ATOMIC_O_TRUNC,
            with_attributes,
            InitFlags::FUSE_PARALLEL_DIROPS,
            InitFlags::FUSE_CACHE_SYMLINKS,
            // See `privileges::Caller::drop_privileges`.
            InitFlags::FUSE_HANDLE_KILLPRIV_V2,
        ];
        for flag in wanted {
            // stepfs works without a capability that the kernel lacks.
            let _ = config.add_capabilities(flag);
        }
        let passthrough = &self.core.files.passthrough;
        if passthrough.is_on() {
            let offered = config.add_capabilities(InitFlags::FUSE_PASSTHROUGH).is_ok();
            if !offered || config.set_max_stack_depth(self.stack_depth).is_err() {
                passthrough.give_up("this kernel has none (Linux 6.9)");
            }
        }
        Ok(())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        entry(&self.core.tree, reply, self.core.tree.lookup(parent.0, name));
    }

    fn forget(&self, _: &Request, ino: INodeNo, times: u64) {
        self.core.tree.table().forget(ino.0, times);
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.core.tree.getattr(ino.0) {
            Ok((ttl, shown, _)) => reply.attr(&ttl, &shown),
            Err(fault) => reply.error(fault.into()),
        }
    }

    fn setattr(
        &self,
        req: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _: Option<SystemTime>,
        fh: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        self.core.files.setattr(ino.0, Caller::of(req), Change { mode, uid, gid, size, atime, mtime, fh }, reply);
    }

    fn readlink(&self, _: &Request, ino: INodeNo, reply: ReplyData) {
        match self.core.tree.readlink(ino.0) {
            Ok(target) => reply.data(std::os::unix::ffi::OsStrExt::as_bytes(target.as_os_str())),
            Err(fault) => reply.error(fault.into()),
        }
    }

    fn mknod(&self, req: &Request, parent: INodeNo, name: &OsStr, mode: u32, _: u32, rdev: u32, reply: ReplyEntry) {
        entry(&self.core.tree, reply, self.core.tree.mknod(parent.0, name, Creator::new(req, mode), rdev));
    }

    fn mkdir(&self, req: &Request, parent: INodeNo, name: &OsStr, mode: u32, _: u32, reply: ReplyEntry) {
        entry(&self.core.tree, reply, self.core.tree.mkdir(parent.0, name, Creator::new(req, mode)));
    }

    fn unlink(&self, req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let (caller, name) = (Caller::of(req), name.to_owned());
        self.core.change(reply, move |core| trash::unlink(&core.tree, parent.0, &name, caller));
    }

    fn rmdir(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let name = name.to_owned();
        self.core.change(reply, move |core| core.tree.rmdir(parent.0, &name));
    }

    fn symlink(&self, req: &Request, parent: INodeNo, name: &OsStr, target: &Path, reply: ReplyEntry) {
        entry(&self.core.tree, reply, self.core.tree.symlink(parent.0, name, Creator::new(req, 0o777), target));
    }

    fn rename(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        newparent: INodeNo,
        newname: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let (name, newname) = (name.to_owned(), newname.to_owned());
        self.core.change(reply, move |core| core.tree.rename((parent.0, &name), (newparent.0, &newname), flags));
    }

    fn link(&self, _: &Request, ino: INodeNo, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match self.core.tree.link(ino.0, parent.0, name) {
            // In a shared store a released file has one name: else nobody could replace all of them at once.
            Err(Fault::Locked) => {
                let (core, name) = (Arc::clone(&self.core), name.to_owned());
                self.core.files.recalls.recall(ino.0, move |recalled| match recalled {
                    Ok(()) => {
                        let own = Arc::clone(&core);
                        let link = move || own.tree.link(ino.0, parent.0, &name);
                        when_free(&core.files.recalls.workers, link, {
                            let core = Arc::clone(&core);
                            move |linked| entry(&core.tree, reply, linked)
                        });
                    }
                    Err(fault) => reply.error(fault.into()),
                });
            }
            result => entry(&self.core.tree, reply, result),
        }
    }

    fn open(&self, req: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        self.core.files.answer_open(ino.0, req, flags.0, reply);
    }

    fn create(&self, req: &Request, parent: INodeNo, name: &OsStr, mode: u32, _: u32, flags: i32, reply: ReplyCreate) {
        match self.core.files.create(parent.0, name, Creator::new(req, mode), flags, &reply) {
            Ok(((ttl, shown, generation), super::open::Answer { fh, flags, backing: Some(backing) })) => {
                reply.created_passthrough(&ttl, &shown, generation, fh, flags, backing.id());
            }
            Ok(((ttl, shown, generation), super::open::Answer { fh, flags, backing: None })) => {
                reply.created(&ttl, &shown, generation, fh, flags);
            }
            Err(fault) => reply.error(fault.into()),
        }
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        fh: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        self.core.bytes.read(fh, offset, size, reply);
    }

    fn write(
        &self,
        req: &Request,
        _: INodeNo,
        fh: FileHandle,
        offset: u64,
        data: &[u8],
        how: WriteFlags,
        flags: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        self.core.bytes.write(fh, offset, data, (how, flags.0, Caller::of(req)), reply);
    }

    fn flush(&self, _: &Request, _: INodeNo, fh: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        self.core.bytes.flush(fh, reply);
    }

    fn release(
        &self,
        _: &Request,
        ino: INodeNo,
        fh: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        self.core.files.release(ino.0, fh);
        reply.ok();
    }

    fn fsync(&self, _: &Request, _: INodeNo, fh: FileHandle, datasync: bool, reply: ReplyEmpty) {
        self.core.bytes.fsync(fh, datasync, reply);
    }

    fn opendir(&self, _: &Request, ino: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        self.core.directories.opendir(ino.0, reply);
    }

    fn readdir(&self, _: &Request, _: INodeNo, fh: FileHandle, offset: u64, reply: ReplyDirectory) {
        self.core.directories.readdir(fh, offset, reply);
    }

    fn readdirplus(&self, _: &Request, _: INodeNo, fh: FileHandle, offset: u64, reply: ReplyDirectoryPlus) {
        self.core.directories.readdirplus(fh, offset, reply);
    }

    fn releasedir(&self, _: &Request, _: INodeNo, fh: FileHandle, _: OpenFlags, reply: ReplyEmpty) {
        self.core.directories.releasedir(fh);
        reply.ok();
    }

    fn fsyncdir(&self, _: &Request, _: INodeNo, fh: FileHandle, datasync: bool, reply: ReplyEmpty) {
        self.core.directories.fsyncdir(fh, datasync, reply);
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        match rustix::fs::statvfs(self.core.tree.archive().store().tree()) {
            Ok(found) => reply.statfs(
                found.f_blocks, found.f_bfree, found.f_bavail, found.f_files, found.f_ffree, found.f_bsize as u32,
                found.f_namemax as u32, found.f_frsize as u32,
            ),
            Err(error) => reply.error(super::errno::Fault::from(error).into()),
        }
    }

    fn setxattr(&self, req: &Request, ino: INodeNo, name: &OsStr, value: &[u8], flags: i32, _: u32, reply: ReplyEmpty) {
        self.core.xattrs.answer_setxattr(ino.0, req.uid(), name, value, flags, reply);
    }

    fn getxattr(&self, req: &Request, ino: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        self.core.xattrs.answer_getxattr(ino.0, req.uid(), name, size, reply);
    }

    fn listxattr(&self, req: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        self.core.xattrs.answer_listxattr(ino.0, req.uid(), size, reply);
    }

    fn removexattr(&self, _: &Request, ino: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.core.xattrs.answer_removexattr(ino.0, name, reply);
    }

    fn access(&self, _: &Request, _: INodeNo, _: AccessFlags, reply: ReplyEmpty) {
        // Mounted with default_permissions: the kernel has checked already.
        reply.ok();
    }

    fn ioctl(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: IoctlFlags,
        _: u32,
        _: &[u8],
        _: u32,
        reply: ReplyIoctl,
    ) {
        reply.error(Errno::ENOTTY);
    }

    fn poll(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: PollNotifier,
        _: PollEvents,
        _: PollFlags,
        reply: ReplyPoll,
    ) {
        // Asked once: from then on the kernel says itself that files are always ready.
        reply.error(Errno::ENOSYS);
    }

    fn fallocate(
        &self,
        req: &Request,
        _: INodeNo,
        fh: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        self.core.bytes.fallocate(fh, (offset, length, mode), Caller::of(req), reply);
    }

    fn lseek(&self, _: &Request, _: INodeNo, fh: FileHandle, offset: i64, whence: i32, reply: ReplyLseek) {
        self.core.bytes.lseek(fh, offset, whence, reply);
    }

    fn copy_file_range(
        &self,
        req: &Request,
        _: INodeNo,
        fh_in: FileHandle,
        offset_in: u64,
        _: INodeNo,
        fh_out: FileHandle,
        offset_out: u64,
        len: u64,
        _: CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        self.core.bytes.copy((fh_in, offset_in), (fh_out, offset_out), len, Caller::of(req), reply);
    }
}
