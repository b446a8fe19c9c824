//! Checks of a store, or of the place for one.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, RenameFlags, renameat_with, statvfs, syncfs};

use super::{Finding, ok, problem, warning};
use crate::cli::format::size;
use crate::cli::source::Local;
use crate::fs::{has_leases, has_leases_of_others, is_dead, kind_of};
use crate::store::engine::refusal;
use crate::store::{Store, exposed};

/// With less free space the next checkpoint may not fit.
const LITTLE_ROOM: u64 = 1 << 30;
const FEW_INODES: u64 = 10_000;
/// File systems that other machines may write to. Crashes on these are not tested.
const NETWORK: [&str; 10] = ["nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "gpfs", "beegfs", "glusterfs"];

/// The findings, and whether the file system supports leases, if that could be tested.
pub(super) fn findings(dir: &Path) -> (Vec<Finding>, Option<io::Result<bool>>) {
    if is_dead(dir) {
        let mend = format!("stepfs mount STORE {0}, or stepfs umount {0}", dir.display());
        let says = format!(
            "{} is a mount whose daemon is gone: {}",
            dir.display(),
            io::Error::from_raw_os_error(libc::ENOTCONN)
        );
        return (vec![problem(says, mend).of("store")], None);
    }
    let (found, root) = store(dir);
    let mut found = vec![found.of("store")];
    let inside = root.join("tmp");
    let place = if root.join("stepfs.toml").exists() && inside.is_dir() { inside } else { nearest(&root) };
    let is_shared = Store::look(&root).is_ok_and(|store| store.is_shared());
    found.extend([file_system(&place).of("file system"), reachable(&root).of("owners")]);
    found.extend(shared(&place, is_shared).map(|found| found.of("sharing")));
    found.extend(room(&place));
    let probe = match tempfile::Builder::new().prefix(".stepfs-doctor-").tempdir_in(&place) {
        Ok(probe) => probe,
        Err(error) => {
            found.push(unwritable(&place, &error).of("writing"));
            return (found, None);
        }
    };
    let path = probe.path();
    found.extend([attributes(path).of("attributes"), renames(path).of("rename")]);
    found.extend([durable(path).of("durability"), locks(path).of("locks")]);
    if rustix::process::geteuid().is_root() {
        found.push(others(path).of("others"));
    }
    (found, Some(has_leases(path)))
}

/// Finds the store at `dir`, or checks that one can be created there. Also returns its path.
fn store(dir: &Path) -> (Finding, PathBuf) {
    let path = std::path::absolute(dir).unwrap_or_else(|_| dir.to_path_buf());
    let Ok(place) = Local::of(dir) else { return (no_store(&path), path) };
    let shown = place.store.display();
    let found = match (Store::look(&place.store), &place.mount) {
        (Err(error), _) => problem(error.to_string(), format!("stepfs verify {shown}")),
        (Ok(_), Some(mount)) => ok(format!("{shown}, mounted at {}", mount.root.display())),
        (Ok(_), None) => match Store::is_locked(&place.store) {
            Ok(true) => ok(format!("{shown}, in use by another process")),
            _ => ok(format!("{shown}, not in use")),
        },
    };
    (found, place.store)
}

fn no_store(path: &Path) -> Finding {
    let shown = path.display();
    match fs::read_dir(path).map(|mut entries| entries.next().is_none()) {
        Ok(true) => ok(format!("none at {shown} yet; the directory is empty, so one can be created there")),
        Ok(false) => warning(
            format!("{shown} is not a store and has files, so none can be created there"),
            format!("stepfs mount {} DIR", path.parent().unwrap_or(path).join("NEW").display()),
        ),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            ok(format!("none at {shown} yet; stepfs mount creates it"))
        }
        Err(error) => problem(format!("{shown}: {error}"), "name a directory that you may read"),
    }
}

/// The closest existing directory at or above `path`.
fn nearest(path: &Path) -> PathBuf {
    path.ancestors().find(|path| path.is_dir()).unwrap_or(Path::new("/")).to_path_buf()
}

fn unwritable(place: &Path, error: &io::Error) -> Finding {
    let shown = place.display();
    let mend = match error.kind() {
        io::ErrorKind::ReadOnlyFilesystem => format!("mount -o remount,rw on the file system of {shown}"),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => format!("free room on the file system of {shown}"),
        _ => format!("chown $(id -u) {shown} as root"),
    };
    problem(error.to_string(), mend)
}

fn file_system(place: &Path) -> Finding {
    let kind = kind_of(&fs::canonicalize(place).unwrap_or_default()).unwrap_or_else(|| "unknown".into());
    let local = "put the store on a local disk";
    match kind.as_str() {
        "tmpfs" | "ramfs" => warning(format!("{kind}: the store is lost at the next boot"), local),
        "overlay" => warning(
            "overlay: the store is lost with the container",
            "docker run -v /data:/data, and the store below /data",
        ),
        _ if NETWORK.contains(&kind.as_str()) || kind.starts_with("fuse") => {
            warning(format!("{kind}: crashes on it are not tested"), local)
        }
        _ => ok(kind),
    }
}

/// Whether a store here can be shared.
fn shared(place: &Path, is_shared: bool) -> Option<Finding> {
    Some(match (refusal(place).ok()?, is_shared) {
        (None, true) => ok("the store is shared: several daemons may mount it"),
        (None, false) => ok("a store here can be shared (stepfs mount --shared, when it is made)"),
        (Some((engine, why)), true) => problem(
            format!("the store is shared, and lies on {engine}: {why}"),
            "put it on ext4, XFS, NFS 4.2 or CephFS",
        ),
        (Some((engine, why)), false) => ok(format!("a store here cannot be shared: it lies on {engine}, and {why}")),
    })
}

fn reachable(root: &Path) -> Finding {
    match nearest(root).canonicalize().and_then(|root| exposed(&root)) {
        Ok(None) => ok("only its user and root can replace the store"),
        Ok(Some(dir)) => warning(
            format!("other users may change {}, so --allow-other is refused", dir.display()),
            format!("chown $(id -u) {0} && chmod go-w {0}", dir.display()),
        ),
        Err(error) => problem(error.to_string(), "name a directory that you may reach"),
    }
}

fn room(place: &Path) -> Vec<Finding> {
    let found = match statvfs(place) {
        Ok(found) => found,
        Err(error) => return vec![problem(error.to_string(), "name a directory that you may reach").of("room")],
    };
    let bytes = found.f_bavail.saturating_mul(found.f_frsize);
    let says = format!("{} free of {}", size(bytes), size(found.f_blocks.saturating_mul(found.f_frsize)));
    let mend = format!("df -h {}; then remove unneeded files", place.display());
    let graded = |free: u64, little: u64, says: String, mend: String| match free {
        0 => problem(says, mend),
        free if free < little => warning(says, mend),
        _ => ok(says),
    };
    let room = graded(bytes, LITTLE_ROOM, says, mend);
    // File systems that create inodes on demand report no total.
    let says = format!("{} free of {}", found.f_favail, found.f_files);
    let mend = format!("df -i {}; then remove small files", place.display());
    let inodes = match found.f_files {
        0 => ok("no limit"),
        _ => graded(found.f_favail, FEW_INODES, says, mend),
    };
    vec![room.of("room"), inodes.of("inodes")]
}

/// Creates a file for tests.
fn file(probe: &Path, name: &str) -> io::Result<PathBuf> {
    let path = probe.join(name);
    fs::write(&path, name)?;
    Ok(path)
}

fn attributes(probe: &Path) -> Finding {
    const NAME: &str = "user.stepfs.doctor";
    let tried = file(probe, "attributes").and_then(|path| {
        xattr::set(&path, NAME, b"1")?;
        xattr::get(&path, NAME)
    });
    if matches!(tried, Ok(Some(value)) if value == b"1") {
        return ok("user.* can be set");
    }
    let says = "user.* cannot be set: no pins, no profiles of single files";
    warning(says, "put the store on ext4, xfs or btrfs, mounted with user_xattr")
}

fn renames(probe: &Path) -> Finding {
    let tried = || -> io::Result<bool> {
        let (one, two) = (file(probe, "one")?, file(probe, "two")?);
        renameat_with(CWD, &one, CWD, &two, RenameFlags::EXCHANGE)?;
        let refused = renameat_with(CWD, &one, CWD, &two, RenameFlags::NOREPLACE);
        Ok(fs::read(&one)? == b"two" && refused == Err(rustix::io::Errno::EXIST))
    };
    if tried().unwrap_or(false) {
        return ok("supports NOREPLACE and EXCHANGE");
    }
    let says = "does not support NOREPLACE and EXCHANGE, so programs in the mount get an error for them";
    warning(says, "put the store on ext4, xfs or btrfs")
}

fn durable(probe: &Path) -> Finding {
    let tried = || -> io::Result<()> {
        File::open(file(probe, "durable")?)?.sync_all()?;
        let dir = File::open(probe)?;
        dir.sync_all()?;
        Ok(syncfs(&dir)?)
    };
    match tried() {
        Ok(()) => ok("fsync of files and directories, and syncfs, work"),
        Err(error) => {
            let says = format!("the file system cannot make writes durable ({error}), so no file would be safe");
            problem(says, "put the store on ext4, xfs or btrfs")
        }
    }
}

fn locks(probe: &Path) -> Finding {
    match file(probe, "locks").and_then(|path| Store::can_lock(&path)) {
        Ok(()) => ok("work, so only one daemon can use the store"),
        Err(error) => {
            problem(format!("they fail ({error}), so two daemons could use the store"), "put the store on a local disk")
        }
    }
}

/// Whether root can tell when other users have stopped writing a file: without that it never releases theirs.
fn others(probe: &Path) -> Finding {
    match has_leases_of_others(probe) {
        Ok(true) => ok("files of other users can be released"),
        Err(error) if matches!(error.raw_os_error(), Some(libc::EACCES | libc::EPERM)) => warning(
            format!("files of other users are never released ({error}): CAP_LEASE and CAP_SETUID are missing"),
            "docker run --cap-add LEASE",
        ),
        Ok(false) | Err(_) => ok("not needed: the file system has no leases"),
    }
}
