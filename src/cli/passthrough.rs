//! Who registers files for a daemon without CAP_SYS_ADMIN: a helper that root forks for a user (`-o user=NAME`), or the
//! program of the package stepfs-passthrough.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use passthrough::Client;
use passthrough::helper::{self, Caller};

/// Where the package puts the helper.
const HELPER: &str = "/usr/libexec/stepfs-passthrough";
/// Names another place. The helper trusts no environment; this only says which program to start.
const VARIABLE: &str = "STEPFS_PASSTHROUGH";

/// A user of this machine.
struct User {
    name: CString,
    caller: Caller,
}

impl User {
    fn named(name: &str) -> Result<User> {
        let name = CString::new(name)?;
        let mut found = std::mem::MaybeUninit::<libc::passwd>::uninit();
        let (mut text, mut result) = (vec![0; 16 << 10], std::ptr::null_mut());
        // SAFETY: all pointers are valid during the call, and `text` has the stated length.
        let code = unsafe {
            libc::getpwnam_r(name.as_ptr(), found.as_mut_ptr(), text.as_mut_ptr(), text.len(), &raw mut result)
        };
        if code != 0 {
            return Err(io::Error::from_raw_os_error(code)).context("cannot read the list of users");
        }
        if result.is_null() {
            bail!("user={}: there is no such user", name.to_string_lossy());
        }
        // SAFETY: `result` is not null, so `found` was filled.
        let found = unsafe { found.assume_init() };
        Ok(User { name, caller: Caller { uid: found.pw_uid, gid: found.pw_gid } })
    }

    /// Gives up root for good, in all threads.
    fn become_it(&self) -> io::Result<()> {
        let Caller { uid, gid } = self.caller;
        let name: &CStr = &self.name;
        // SAFETY: `name` ends with a zero; the other calls pass no memory.
        let done = unsafe {
            libc::initgroups(name.as_ptr(), gid) == 0
                && libc::setresgid(gid, gid, gid) == 0
                && libc::setresuid(uid, uid, uid) == 0
        };
        if done { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

/// Becomes the user `name`, for a mount that root starts; before that forks a helper, and returns its socket. Nothing
/// happens if the process is that user already. Call it before anything of the store is opened.
///
/// # Errors
/// There is no such user, or the process may not become it.
pub(super) fn serve_as(name: &str, with_helper: bool) -> Result<Option<OwnedFd>> {
    let user = User::named(name)?;
    let own = rustix::process::geteuid().as_raw();
    if user.caller.uid == own {
        return Ok(None);
    }
    if own != 0 {
        bail!("user={name}: only root can mount for another user");
    }
    // Root's shell may have left descriptors open. The daemon runs as the user, who may use what it has.
    // SAFETY: no memory is passed; the descriptors stay open, and are closed in programs that this one starts.
    unsafe { libc::close_range(3, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC as libc::c_int) };
    let socket = if with_helper { Some(fork_helper(user.caller)?) } else { None };
    user.become_it().with_context(|| format!("cannot become {name}"))?;
    Ok(socket)
}

/// Gives a command a session of its own: closing the terminal or Ctrl-C there must not end the mount. It has that
/// before its program starts: until then the user for whom root mounts cannot trace it, and could afterwards type into
/// root's terminal through it.
pub(super) fn leave_terminal(command: &mut Command) {
    // SAFETY: between fork and exec this makes one system call and allocates nothing.
    unsafe { command.pre_exec(|| Ok(rustix::process::setsid().map(drop)?)) };
}

/// Gives a command no environment but this: its user can read it, and root's is none of the user's business.
pub(super) fn leave_environment(command: &mut Command) {
    let kept = ["PATH", "LANG", "LC_ALL", "TZ", "RUST_LOG", "NOTIFY_SOCKET"];
    let kept: Vec<_> = kept.iter().filter_map(|name| Some((name, std::env::var_os(name)?))).collect();
    command.env_clear().envs(kept);
}

/// Forks the helper; it ends when the returned socket and its copies are closed.
fn fork_helper(caller: Caller) -> Result<OwnedFd> {
    let (ours, theirs) = passthrough::pair()?;
    // SAFETY: the child runs on this thread's copy alone. It takes no lock that another thread may hold: the allocator's
    // are released in the child, and nothing else has threads before a mount.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()).context("cannot fork the passthrough helper"),
        0 => {
            let code = i32::from(serve(&theirs, caller).is_err());
            // SAFETY: ends the process without the parent's clean-up.
            unsafe { libc::_exit(code) }
        }
        _ => Ok(ours),
    }
}

/// The forked helper. An error ends it, and the daemon finds its socket closed.
fn serve(socket: &OwnedFd, caller: Caller) -> io::Result<()> {
    rustix::process::setsid()?;
    rustix::process::chdir("/")?;
    // Not those of the command, which ends: whoever reads its output waits for all that have them.
    let null = std::fs::File::options().write(true).open("/dev/null")?;
    rustix::stdio::dup2_stdout(&null)?;
    rustix::stdio::dup2_stderr(&null)?;
    rustix::stdio::dup2_stdin(socket)?;
    helper::run(Some(caller))
}

/// Starts the installed helper. `None`: none is installed.
pub(super) fn installed() -> Option<io::Result<Client>> {
    let program = std::env::var_os(VARIABLE).map_or_else(|| PathBuf::from(HELPER), PathBuf::from);
    program.exists().then(|| Client::start(&program))
}

/// The helper of a daemon: at the other end of `socket`, or the installed program. `None`: there is none, or none is
/// needed. The log says why a helper does not work.
pub(super) fn client(socket: Option<&OwnedFd>) -> Option<Arc<Client>> {
    let started = match socket {
        Some(socket) => socket.try_clone().and_then(Client::over),
        None if crate::fs::is_admin() => return None,
        None => installed()?,
    };
    started.inspect_err(|error| log::warn!("the passthrough helper does not work: {error}")).ok().map(Arc::new)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemons_program_starts_in_a_session_of_its_own() {
        let mut command = Command::new("/bin/cat");
        command.arg("/proc/self/stat");
        leave_terminal(&mut command);
        let stat = String::from_utf8(command.output().unwrap().stdout).unwrap();
        // Its number, name, state, parent, group, session, and terminal.
        let words: Vec<&str> = stat.split(' ').collect();
        assert_eq!((words[5], words[6]), (words[0], "0"), "{stat}");
    }
}
