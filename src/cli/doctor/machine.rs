//! Checks of the machine and of this process, independent of the store.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::PermissionsExt;

use rustix::process::{Resource, getrlimit};

use super::{Finding, Level, ok, problem, warning};
use crate::cli::format::size;
use crate::cli::passthrough as helper;
use crate::fs::{SYS_ADMIN, everywhere, is_admin, try_mount};
use crate::recall::{memory_limit, usual_memory};

/// First kernel with passthrough.
const PASSTHROUGH: (u32, u32) = (6, 9);
/// First kernel that can tell fsync errors apart.
const TELLS_ERRORS: (u32, u32) = (6, 1);
/// Memory of a daemon besides the decoded states (docs/PERFORMANCE.md).
const DAEMON_BYTES: u64 = 256 << 20;
/// The program by which users mount.
const FUSERMOUNT: &str = "fusermount3";
/// With fewer open files, a loader with many workers hits the limit.
const FEW_FILES: u64 = 8192;

pub(super) fn findings() -> Vec<Finding> {
    let mut found = vec![kernel().of("kernel"), device().of("/dev/fuse"), privileges().of("privileges")];
    match (is_admin(), is_bound()) {
        (true, _) => found.push(ok("not needed: this process may mount by itself").of(FUSERMOUNT)),
        (false, false) => found.extend([fusermount().of(FUSERMOUNT), others().of("allow-other")]),
        // A mount could only be refused.
        (false, true) => found.push(
            problem(
                "CAP_SYS_ADMIN cannot be had here, so nothing mounts, not even fusermount3",
                "docker run --device /dev/fuse --cap-add SYS_ADMIN --security-opt apparmor=unconfined",
            )
            .of("mount"),
        ),
    }
    // The device's own finding says more.
    if found.iter().all(|finding| finding.level != Level::Problem) {
        found.push(mounting().of("mount"));
    }
    found.extend([files().of("open files"), memory().of("memory")]);
    found
}

/// Version of the running kernel; 0.0 if `release` is no version.
fn version(release: &str) -> (u32, u32) {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

fn release() -> String {
    fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_string()
}

fn kernel() -> Finding {
    let release = release();
    match version(&release) < TELLS_ERRORS {
        true => warning(
            format!("Linux {release}: fsync may report an error although nothing was lost"),
            "use Linux 6.1 or newer, for passthrough 6.9",
        ),
        false => ok(format!("Linux {release}")),
    }
}

fn device() -> Finding {
    const CONTAINER: &str = "in a container: docker run --device /dev/fuse --cap-add SYS_ADMIN";
    let error = match File::options().read(true).write(true).open("/dev/fuse") {
        Ok(_) => return ok("can be opened"),
        Err(error) => error,
    };
    match error.raw_os_error() {
        Some(libc::ENOENT | libc::ENODEV | libc::ENXIO) => {
            problem(format!("FUSE is missing: {error}"), format!("modprobe fuse, or {CONTAINER}"))
        }
        _ => problem(error.to_string(), format!("chmod 666 /dev/fuse as root, or {CONTAINER}")),
    }
}

fn privileges() -> Finding {
    let user = rustix::process::geteuid();
    match (is_admin(), user.is_root()) {
        (true, _) if !everywhere() => warning(
            "CAP_SYS_ADMIN in a user namespace: enough to mount, not for passthrough",
            "run it outside of a rootless container",
        ),
        (true, _) => ok(format!("user {} with CAP_SYS_ADMIN", user.as_raw())),
        (false, true) => warning(
            "root without CAP_SYS_ADMIN: the daemon serves reads and writes itself",
            "docker run --cap-add SYS_ADMIN",
        ),
        (false, false) => warning(
            format!("user {} without CAP_SYS_ADMIN: passthrough takes a helper", user.as_raw()),
            "sudo stepfs mount -o user=NAME STORE DIR, or install the package stepfs-passthrough",
        ),
    }
}

fn own_status() -> String {
    fs::read_to_string("/proc/self/status").unwrap_or_default()
}

/// Whether no program that this process starts can gain CAP_SYS_ADMIN, as in most containers.
fn is_bound() -> bool {
    let status = own_status();
    let bounding = status.lines().find_map(|line| u64::from_str_radix(line.strip_prefix("CapBnd:")?.trim(), 16).ok());
    bounding.is_some_and(|bits| bits >> SYS_ADMIN & 1 == 0)
}

/// Tries a mount on a directory of its own.
fn mounting() -> Finding {
    let place = tempfile::Builder::new().prefix(".stepfs-doctor-").tempdir();
    let Err(error) = place.and_then(|place| try_mount(place.path())) else { return ok("tried, and works") };
    let is_confined = own_status().lines().any(|line| line.split_whitespace().eq(["NoNewPrivs:", "1"]));
    let mend = match is_confined && !is_admin() {
        true => "run it where fusermount3 may become root: outside of this sandbox (no_new_privs is set)",
        false => "mount as root; in a container: docker run --cap-add SYS_ADMIN --security-opt apparmor=unconfined",
    };
    problem(format!("a mount was tried, and refused: {error}"), mend)
}

fn fusermount() -> Finding {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let Some(program) = std::env::split_paths(&path).map(|dir| dir.join(FUSERMOUNT)).find(|path| path.is_file()) else {
        return problem("not found; mounting without CAP_SYS_ADMIN needs it", "apt-get install fuse3");
    };
    match fs::metadata(&program).is_ok_and(|found| found.permissions().mode() & libc::S_ISUID != 0) {
        true => ok(program.display().to_string()),
        false => {
            let mend = format!("chown root {0} && chmod u+s {0}", program.display());
            problem(format!("{} does not run as root, so it cannot mount", program.display()), mend)
        }
    }
}

fn others() -> Finding {
    const LINE: &str = "user_allow_other";
    let conf = fs::read_to_string("/etc/fuse.conf").unwrap_or_default();
    match conf.lines().any(|line| line.trim() == LINE) {
        true => ok("permitted by /etc/fuse.conf"),
        false => warning(
            "/etc/fuse.conf does not permit it, so --allow-other cannot work",
            format!("echo {LINE} | sudo tee -a /etc/fuse.conf"),
        ),
    }
}

fn files() -> Finding {
    let limit = getrlimit(Resource::Nofile).maximum;
    match limit {
        Some(most) if most < FEW_FILES => warning(
            format!("at most {most}; each open file in a mount takes one or two of them in the daemon"),
            "ulimit -Hn 65536 as root before the mount; LimitNOFILE=65536 in a unit",
        ),
        Some(most) => ok(format!("at most {most}")),
        None => ok("no limit"),
    }
}

fn memory() -> Finding {
    let table = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let available = table.lines().find_map(|line| line.strip_prefix("MemAvailable:")?.trim().strip_suffix("kB"));
    let available = available.and_then(|kib| kib.trim().parse::<u64>().ok()).unwrap_or(0) << 10;
    // Of a limited group another program's pages may go, so its limit counts.
    let available = available.min(memory_limit().unwrap_or(u64::MAX));
    let wanted = usual_memory() + DAEMON_BYTES;
    let says = format!("{} available; a daemon may take {}", size(available), size(wanted));
    match available < wanted {
        true => warning(says, "stepfs mount --memory 64M STORE DIR"),
        false => ok(says),
    }
}

/// Checks whether the kernel serves resident files by itself. `leases` tells whether the store's file system supports
/// leases, if a store was named.
pub(super) fn passthrough(leases: Option<io::Result<bool>>) -> Finding {
    let without = |why: &str, mend: &str| warning(format!("none (slower, but equally safe): {why}"), mend);
    if version(&release()) < PASSTHROUGH {
        return without("the kernel supports it from 6.9 on", "use Linux 6.9 or newer");
    }
    let by = match (is_admin() && everywhere(), helper::installed()) {
        (true, _) => "",
        (false, Some(Ok(_))) => ", registered by stepfs-passthrough",
        (false, Some(Err(error))) => {
            return without(
                &format!("stepfs-passthrough does not work: {error}"),
                "getcap /usr/libexec/stepfs-passthrough",
            );
        }
        (false, None) => {
            return without(
                "it needs CAP_SYS_ADMIN of the machine, or a helper",
                "let root mount with -o user=NAME, or install the package stepfs-passthrough",
            );
        }
    };
    match leases {
        Some(Ok(false) | Err(_)) => without(
            "the store's file system does not support leases",
            "put the store on a local disk with ext4, xfs or btrfs",
        ),
        Some(Ok(true)) => ok(format!("the kernel reads and writes resident files by itself{by}")),
        None => ok(format!("yes{by}, if the store's file system supports leases; `stepfs doctor DIR` checks it")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::doctor::Level;

    #[test]
    fn versions_are_compared_by_number() {
        assert_eq!(version("6.18.44-fc"), (6, 18));
        assert!(version("6.10.0") > PASSTHROUGH && version("5.15.0-91-generic") < TELLS_ERRORS);
        assert_eq!(version(""), (0, 0));
    }

    #[test]
    fn without_leases_there_is_no_passthrough() {
        for leases in [Ok(false), Err(io::Error::other("refused"))] {
            assert_eq!(passthrough(Some(leases)).level, Level::Warning);
        }
    }
}
