//! A file system in memory: the effect of each operation on names, bytes and metadata, by POSIX and Linux.
//!
//! It knows nothing of stepfs except that a released file reads as other bytes, which [`super::history`] tells it. It
//! is the third witness beside the mount and the plain directory: of bytes, names, modes, owners, links, times and
//! errnos.

mod handles;

use std::collections::BTreeMap;

use super::judge::LEAST_RELEASED;
use super::op::{ALL_SLOTS, MAPS, Mode, PATHS, Slot};
use super::sys::{Stamp, Sys};

/// Number of an inode of the model.
pub(crate) type Node = usize;

/// The directory of this history alone.
pub(crate) const TOP: Node = 0;

/// In [`TOP`]: the start of all paths of operations. So `..` leads nowhere else.
pub(crate) const BASE: &str = "r";

/// Links that the kernel follows on the way to a file.
const MOST_LINKS: u32 = 40;

/// Seconds that ext4 can keep.
const FIRST_SECOND: i64 = -(1 << 31);
const LAST_SECOND: i64 = (1 << 34) - (1 << 31) - 1;

/// Between two moments, in nanoseconds.
pub(crate) type Span = (i128, i128);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    File,
    Directory,
    Link,
    Fifo,
    Socket,
}

impl Kind {
    pub(crate) fn bits(self) -> u32 {
        match self {
            Kind::File => libc::S_IFREG,
            Kind::Directory => libc::S_IFDIR,
            Kind::Link => libc::S_IFLNK,
            Kind::Fifo => libc::S_IFIFO,
            Kind::Socket => libc::S_IFSOCK,
        }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Inode {
    pub(crate) kind: Kind,
    /// Without the type.
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// Names of a file.
    pub(crate) names: u64,
    pub(crate) data: Vec<u8>,
    pub(crate) children: BTreeMap<String, Node>,
    pub(crate) parent: Node,
    pub(crate) target: String,
    pub(crate) xattrs: BTreeMap<String, Vec<u8>>,
    /// The modification time lies in one of these: on the mount, and in the plain directory.
    pub(crate) mtime: [Vec<Span>; 2],
    /// `stepfs pin` was run on it.
    pub(crate) pinned: bool,
    /// The number of opens for writing and truncations: readers of a released file may have been left behind.
    pub(crate) writers: u64,
    /// The possible effect of a release.
    pub(crate) fate: Fate,
}

/// The known facts of a file's releases.
#[derive(Clone, Debug, Default)]
pub(crate) struct Fate {
    /// It was seen released: its bytes never change again, unless somebody writes.
    pub(crate) last: bool,
    /// A newer state of its lineage has existed since it was written.
    pub(crate) superseded: bool,
    /// It is pinned, and was resident at that time.
    pub(crate) stays: bool,
    /// The remaining length of bytes that may have been released, and were truncated before anybody looked.
    pub(crate) cut: Option<usize>,
}

#[derive(Clone, Debug)]
pub(crate) struct Handle {
    pub(crate) node: Node,
    pub(crate) read: bool,
    pub(crate) write: bool,
    append: bool,
    pub(crate) position: u64,
    /// The bytes at its opening, if the file was released then. If somebody writes to the file, such a reader may keep
    /// these bytes.
    pub(crate) kept: Option<Vec<u8>>,
    /// [`Inode::writers`] at its opening.
    writers: u64,
    lock: Option<i32>,
}

#[derive(Clone, Debug)]
pub(crate) struct Held {
    pub(crate) node: Node,
    pub(crate) write: bool,
    pub(crate) len: usize,
    /// When it was first stored to.
    pub(crate) stored: Option<i128>,
    /// Bytes that the file had before it was released: a read-only mapping keeps them.
    pub(crate) kept: Vec<Vec<u8>>,
}

/// The target of a path.
pub(crate) struct Found {
    pub(crate) parent: Node,
    pub(crate) name: String,
    pub(crate) node: Option<Node>,
}

pub(crate) struct Model {
    pub(crate) nodes: Vec<Inode>,
    pub(crate) handles: [Option<Handle>; ALL_SLOTS],
    pub(crate) maps: [Option<Held>; MAPS],
}

impl Model {
    /// A directory `BASE` with the directories `s` and `t`, made in `span`.
    pub(crate) fn new(span: Span) -> Model {
        let mut model =
            Model { nodes: Vec::new(), handles: std::array::from_fn(|_| None), maps: std::array::from_fn(|_| None) };
        model.nodes.push(Inode::new(Kind::Directory, 0o755, span));
        let base = model.add(TOP, BASE, Inode::new(Kind::Directory, 0o755, span), span);
        for name in ["s", "t"] {
            model.add(base, name, Inode::new(Kind::Directory, 0o755, span), span);
        }
        model
    }

    pub(crate) fn base(&self) -> Node {
        self.nodes[TOP].children[BASE]
    }

    /// Follows a path of [`PATHS`]; `follow` is for its last component.
    pub(crate) fn resolve(&self, path: &str, follow: bool) -> Sys<Found> {
        self.walk(self.base(), path, follow, &mut 0)
    }

    fn walk(&self, from: Node, path: &str, follow: bool, links: &mut u32) -> Sys<Found> {
        let mut at = from;
        let mut parts = path.split('/').peekable();
        while let Some(name) = parts.next() {
            let last = parts.peek().is_none();
            if self.nodes[at].kind != Kind::Directory {
                return Err(libc::ENOTDIR);
            }
            if name == "." || name == ".." {
                let next = if name == "." { at } else { self.nodes[at].parent };
                if last {
                    return Ok(Found { parent: self.nodes[next].parent, name: name.into(), node: Some(next) });
                }
                at = next;
                continue;
            }
            let child = self.nodes[at].children.get(name).copied();
            let Some(child) = child else {
                return if last { Ok(Found { parent: at, name: name.into(), node: None }) } else { Err(libc::ENOENT) };
            };
            if self.nodes[child].kind == Kind::Link && (!last || follow) {
                *links += 1;
                if *links > MOST_LINKS {
                    return Err(libc::ELOOP);
                }
                let found = self.walk(at, &self.nodes[child].target, true, links)?;
                if last {
                    return Ok(found);
                }
                at = found.node.ok_or(libc::ENOENT)?;
                continue;
            }
            if last {
                return Ok(Found { parent: at, name: name.into(), node: Some(child) });
            }
            at = child;
        }
        Err(libc::ENOENT)
    }

    pub(crate) fn existing(&self, at: u8, follow: bool) -> Sys<Node> {
        self.resolve(PATHS[usize::from(at)], follow)?.node.ok_or(libc::ENOENT)
    }

    /// A name for something new.
    fn vacant(&self, at: u8) -> Sys<Found> {
        let found = self.resolve(PATHS[usize::from(at)], false)?;
        if found.node.is_some() { Err(libc::EEXIST) } else { Ok(found) }
    }

    /// Gives something new a name.
    fn add(&mut self, parent: Node, name: &str, mut inode: Inode, span: Span) -> Node {
        let directory = &mut self.nodes[parent];
        if directory.mode & libc::S_ISGID != 0 {
            inode.gid = directory.gid;
            if inode.kind == Kind::Directory {
                inode.mode |= libc::S_ISGID;
            }
        }
        inode.parent = parent;
        self.nodes.push(inode);
        let node = self.nodes.len() - 1;
        self.put(parent, name, node, span);
        node
    }

    fn put(&mut self, parent: Node, name: &str, node: Node, span: Span) {
        self.nodes[parent].children.insert(name.into(), node);
        self.nodes[parent].modified(span);
        self.nodes[node].names += 1;
        if self.nodes[node].kind == Kind::Directory {
            self.nodes[node].parent = parent;
        }
    }

    fn take(&mut self, parent: Node, name: &str, span: Span) -> Option<Node> {
        let node = self.nodes[parent].children.remove(name)?;
        self.nodes[parent].modified(span);
        self.nodes[node].names -= 1;
        Some(node)
    }

    pub(crate) fn nlink(&self, node: Node) -> u64 {
        let inode = &self.nodes[node];
        if inode.kind != Kind::Directory {
            return inode.names;
        }
        if inode.names == 0 && node != TOP {
            return 0;
        }
        2 + inode.children.values().filter(|child| self.nodes[**child].kind == Kind::Directory).count() as u64
    }

    /// The content of a directory, in the form of [`super::world::list`].
    pub(crate) fn names(&self, node: Node) -> Vec<String> {
        let mark = |child: &Node| match self.nodes[*child].kind {
            Kind::Directory => '/',
            Kind::Link => '@',
            Kind::File => ' ',
            _ => '=',
        };
        let mut names: Vec<_> =
            self.nodes[node].children.iter().map(|(name, child)| format!("{name}{}", mark(child))).collect();
        names.sort();
        names
    }

    pub(crate) fn list(&self, at: u8) -> Sys<Vec<String>> {
        let node = self.existing(at, true)?;
        if self.nodes[node].kind == Kind::Directory { Ok(self.names(node)) } else { Err(libc::ENOTDIR) }
    }

    /// Bytes of a file change now.
    fn write_at(&mut self, node: Node, at: usize, bytes: &[u8], span: Span) {
        let inode = &mut self.nodes[node];
        if inode.data.len() < at + bytes.len() {
            inode.data.resize(at + bytes.len(), 0);
        }
        inode.data[at..at + bytes.len()].copy_from_slice(bytes);
        inode.changed(span);
    }

    fn resize(&mut self, node: Node, len: usize, span: Span) {
        let inode = &mut self.nodes[node];
        inode.data.resize(len, 0);
        inode.changed(span);
    }

    // --- names

    pub(crate) fn open(&mut self, slot: Slot, at: u8, flags: i32, mode: u32, span: Span) -> Sys<()> {
        let create = flags & libc::O_CREAT != 0;
        let exclusive = create && flags & libc::O_EXCL != 0;
        let directory_only = flags & libc::O_DIRECTORY != 0;
        if create && directory_only {
            return Err(libc::EINVAL);
        }
        let nofollow = flags & libc::O_NOFOLLOW != 0 || exclusive;
        let found = self.resolve(PATHS[usize::from(at)], !nofollow)?;
        let access = flags & libc::O_ACCMODE;
        let (node, fresh) = match found.node {
            None if create => {
                let inode = Inode::new(Kind::File, mode & !0o022, span);
                (self.add(found.parent, &found.name, inode, span), true)
            }
            None => return Err(libc::ENOENT),
            Some(_) if exclusive => return Err(libc::EEXIST),
            Some(node) => (node, false),
        };
        match self.nodes[node].kind {
            Kind::Link if directory_only => return Err(libc::ENOTDIR),
            Kind::Link => return Err(libc::ELOOP),
            Kind::Directory if create || access != libc::O_RDONLY || flags & libc::O_TRUNC != 0 => {
                return Err(libc::EISDIR);
            }
            kind if directory_only && kind != Kind::Directory => return Err(libc::ENOTDIR),
            Kind::Socket => return Err(libc::ENXIO),
            _ => {}
        }
        if flags & libc::O_TRUNC != 0 && !fresh {
            self.resize(node, 0, span);
        }
        let inode = &mut self.nodes[node];
        inode.writers += u64::from(access != libc::O_RDONLY || flags & libc::O_TRUNC != 0);
        let writers = inode.writers;
        self.handles[usize::from(slot)] = Some(Handle {
            node,
            read: access != libc::O_WRONLY,
            write: access != libc::O_RDONLY,
            append: flags & libc::O_APPEND != 0,
            position: 0,
            kept: None,
            writers,
            lock: None,
        });
        Ok(())
    }

    pub(crate) fn mkdir(&mut self, at: u8, mode: u32, span: Span) -> Sys<()> {
        let found = self.vacant(at)?;
        self.add(found.parent, &found.name, Inode::new(Kind::Directory, mode & 0o1777 & !0o022, span), span);
        Ok(())
    }

    pub(crate) fn mknod(&mut self, at: u8, mode: u32, span: Span) -> Sys<()> {
        let found = self.vacant(at)?;
        let kind = match mode & libc::S_IFMT {
            libc::S_IFIFO => Kind::Fifo,
            libc::S_IFSOCK => Kind::Socket,
            _ => Kind::File,
        };
        self.add(found.parent, &found.name, Inode::new(kind, mode & 0o7777 & !0o022, span), span);
        Ok(())
    }

    pub(crate) fn symlink(&mut self, target: &str, at: u8, span: Span) -> Sys<()> {
        let found = self.vacant(at)?;
        let inode = Inode { target: target.into(), ..Inode::new(Kind::Link, 0o777, span) };
        self.add(found.parent, &found.name, inode, span);
        Ok(())
    }

    pub(crate) fn link(&mut self, from: u8, to: u8, span: Span) -> Sys<()> {
        let node = self.existing(from, false)?;
        let found = self.vacant(to)?;
        if self.nodes[node].kind == Kind::Directory {
            return Err(libc::EPERM);
        }
        self.put(found.parent, &found.name, node, span);
        Ok(())
    }

    pub(crate) fn remove(&mut self, at: u8, directory: bool, span: Span) -> Sys<()> {
        let found = self.resolve(PATHS[usize::from(at)], false)?;
        let node = found.node.ok_or(libc::ENOENT)?;
        match (self.nodes[node].kind == Kind::Directory, directory) {
            (true, false) => return Err(libc::EISDIR),
            (false, true) => return Err(libc::ENOTDIR),
            (true, true) if !self.nodes[node].children.is_empty() => return Err(libc::ENOTEMPTY),
            _ => {}
        }
        self.take(found.parent, &found.name, span);
        Ok(())
    }

    /// Whether `above` is `node` or a directory on the way to it.
    fn contains(&self, above: Node, mut node: Node) -> bool {
        loop {
            if node == above {
                return true;
            }
            if node == TOP {
                return false;
            }
            node = self.nodes[node].parent;
        }
    }

    pub(crate) fn rename(&mut self, from: u8, to: u8, how: Mode, span: Span) -> Sys<()> {
        let (source, target) =
            (self.resolve(PATHS[usize::from(from)], false)?, self.resolve(PATHS[usize::from(to)], false)?);
        let node = source.node.ok_or(libc::ENOENT)?;
        match (how, target.node) {
            (Mode::NoReplace, Some(_)) => return Err(libc::EEXIST),
            (Mode::Exchange, None) => return Err(libc::ENOENT),
            _ => {}
        }
        if self.contains(node, target.parent) {
            return Err(libc::EINVAL);
        }
        if let Some(there) = target.node
            && self.contains(there, source.parent)
        {
            return Err(if how == Mode::Exchange { libc::EINVAL } else { libc::ENOTEMPTY });
        }
        if target.node == Some(node) {
            return Ok(());
        }
        if let (Some(there), true) = (target.node, how != Mode::Exchange) {
            match (self.nodes[node].kind == Kind::Directory, self.nodes[there].kind == Kind::Directory) {
                (true, false) => return Err(libc::ENOTDIR),
                (false, true) => return Err(libc::EISDIR),
                (true, true) if !self.nodes[there].children.is_empty() => return Err(libc::ENOTEMPTY),
                _ => {}
            }
        }
        let there = self.take(target.parent, &target.name, span);
        self.take(source.parent, &source.name, span);
        self.put(target.parent, &target.name, node, span);
        if let (Some(there), Mode::Exchange) = (there, how) {
            self.put(source.parent, &source.name, there, span);
        }
        Ok(())
    }

    // --- metadata

    pub(crate) fn chmod(&mut self, at: u8, mode: u32) -> Sys<()> {
        let node = self.existing(at, true)?;
        self.nodes[node].mode = mode & 0o7777;
        Ok(())
    }

    pub(crate) fn chown(&mut self, at: u8, uid: u32, gid: u32) -> Sys<()> {
        let node = self.existing(at, false)?;
        let inode = &mut self.nodes[node];
        if uid != u32::MAX {
            inode.uid = uid;
        }
        if gid != u32::MAX {
            inode.gid = gid;
        }
        if inode.kind != Kind::Directory {
            inode.mode &= !libc::S_ISUID;
            if inode.mode & libc::S_IXGRP != 0 {
                inode.mode &= !libc::S_ISGID;
            }
        }
        Ok(())
    }

    pub(crate) fn utimens(&mut self, at: u8, atime: Stamp, mtime: Stamp, span: Span) -> Sys<()> {
        if (atime, mtime) == (Stamp::Omit, Stamp::Omit) {
            return Ok(());
        }
        let node = self.existing(at, false)?;
        let inode = &mut self.nodes[node];
        let span = match mtime {
            Stamp::Omit => return Ok(()),
            Stamp::Now => span,
            Stamp::At(seconds, nanoseconds) => {
                let kept = seconds.clamp(FIRST_SECOND, LAST_SECOND);
                let part = if kept == FIRST_SECOND || kept == LAST_SECOND { 0 } else { i128::from(nanoseconds) };
                let time = i128::from(kept) * 1_000_000_000 + part;
                (time, time)
            }
        };
        inode.modified(span);
        Ok(())
    }

    /// The time of the first store through a mapping of the file.
    pub(crate) fn stored(&self, node: Node) -> Option<i128> {
        self.maps.iter().flatten().filter(|map| map.node == node).filter_map(|map| map.stored).min()
    }

    /// The inodes that can have an attribute: `user.` on files and directories only.
    fn takes(&self, node: Node, name: &str) -> bool {
        !name.starts_with("user.") || matches!(self.nodes[node].kind, Kind::File | Kind::Directory)
    }

    pub(crate) fn setxattr(&mut self, at: u8, name: &str, value: Vec<u8>, flags: i32) -> Sys<()> {
        let node = self.existing(at, false)?;
        if !self.takes(node, name) {
            return Err(libc::EPERM);
        }
        let there = self.nodes[node].xattrs.contains_key(name);
        match flags {
            libc::XATTR_CREATE if there => Err(libc::EEXIST),
            libc::XATTR_REPLACE if !there => Err(libc::ENODATA),
            _ => {
                self.nodes[node].xattrs.insert(name.into(), value);
                Ok(())
            }
        }
    }

    pub(crate) fn getxattr(&self, at: u8, name: &str) -> Sys<Vec<u8>> {
        let node = self.existing(at, false)?;
        self.nodes[node].xattrs.get(name).cloned().ok_or(libc::ENODATA)
    }

    pub(crate) fn removexattr(&mut self, at: u8, name: &str) -> Sys<()> {
        let node = self.existing(at, false)?;
        if !self.takes(node, name) {
            return Err(libc::EPERM);
        }
        self.nodes[node].xattrs.remove(name).map(drop).ok_or(libc::ENODATA)
    }

    pub(crate) fn truncate(&mut self, at: u8, len: usize, span: Span) -> Sys<()> {
        let node = self.existing(at, true)?;
        match self.nodes[node].kind {
            Kind::File => {}
            Kind::Directory => return Err(libc::EISDIR),
            _ => return Err(libc::EINVAL),
        }
        self.nodes[node].writers += 1;
        let (before, fate) = (self.nodes[node].data.len(), self.nodes[node].fate.clone());
        self.resize(node, len, span);
        if fate.superseded && !fate.last && len > 0 && before >= LEAST_RELEASED {
            // Perhaps it had been released before the cut; nobody had looked.
            self.nodes[node].fate.superseded = true;
            self.nodes[node].fate.cut = Some(fate.cut.unwrap_or(usize::MAX).min(before).min(len));
        }
        Ok(())
    }
}

impl Inode {
    pub(crate) fn new(kind: Kind, mode: u32, span: Span) -> Inode {
        Inode {
            kind,
            mode,
            uid: 0,
            gid: 0,
            names: 0,
            data: Vec::new(),
            children: BTreeMap::new(),
            parent: TOP,
            target: String::new(),
            xattrs: BTreeMap::new(),
            mtime: [vec![span], vec![span]],
            pinned: false,
            writers: 0,
            fate: Fate::default(),
        }
    }

    /// Somebody wrote: the effect of an earlier release is over.
    fn changed(&mut self, span: Span) {
        self.modified(span);
        self.fate = Fate { stays: self.pinned, ..Fate::default() };
    }

    fn modified(&mut self, span: Span) {
        self.mtime = [vec![span], vec![span]];
    }
}
