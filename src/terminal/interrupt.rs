//! Ctrl-C: a flag for commands that clean up, and the removal of what a command keeps only for itself.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// How often to try to remove a directory that other threads write to, and the pause in between: at most a second.
const REMOVALS: usize = 200;
const PAUSE: Duration = Duration::from_millis(5);
/// Time for a program to end after SIGTERM.
const GRACE: Duration = Duration::from_millis(500);

/// A flag that SIGINT, SIGTERM and SIGHUP set, for commands that end by themselves: `pull`, and the screen of `top`.
///
/// # Errors
/// The signals cannot be handled.
pub fn interrupted() -> io::Result<Arc<AtomicBool>> {
    let flag = Arc::new(AtomicBool::new(false));
    for signal in ends() {
        signal_hook::flag::register(signal, Arc::clone(&flag))?;
    }
    Ok(flag)
}

/// The signals that end a command. Under `nohup` SIGHUP is ignored, and stays so. SIGINT counts even where a shell ignores
/// it for a job in the background: who sends it wants the end.
fn ends() -> Vec<i32> {
    let is_ignored = |signal| {
        // SAFETY: it fills in one structure, and changes nothing.
        unsafe {
            let mut now: libc::sigaction = std::mem::zeroed();
            libc::sigaction(signal, std::ptr::null(), &raw mut now) == 0 && now.sa_sigaction == libc::SIG_IGN
        }
    };
    [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|&signal| signal != SIGHUP || !is_ignored(signal)).collect()
}

/// What ends and goes when the command is interrupted. `None` while nobody waits for a signal.
static HELD: Mutex<Option<Vec<Held>>> = Mutex::new(None);
static NUMBERS: AtomicU64 = AtomicU64::new(0);

/// A number, and how to end or remove something: tried until it answers true.
type Held = (u64, Box<dyn Fn() -> bool + Send>);

fn held() -> MutexGuard<'static, Option<Vec<Held>>> {
    HELD.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A file, a directory or a program, which goes if SIGINT, SIGTERM or SIGHUP ends the command while this lives.
pub struct Temporary(u64);

impl Temporary {
    /// From now on a signal removes the file at `path`, which may not exist yet, and ends the process. It removes no directory.
    pub fn file(path: PathBuf) -> io::Result<Temporary> {
        let mut held = waiting()?;
        Ok(hold(&mut held, move || fs::remove_file(&path).is_ok() || !path.exists()))
    }

    /// `make` makes a new directory at `path`. A signal removes it and ends the process.
    pub fn directory_at(path: &Path, make: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<Temporary> {
        // Under the lock: no signal is answered between the two.
        let mut held = waiting()?;
        make(path)?;
        let path = path.to_path_buf();
        Ok(hold(&mut held, move || fs::remove_dir_all(&path).is_ok() || !path.exists()))
    }

    /// A new directory in `parent` for temporary files that begins with `prefix`, which others cannot read. A signal removes
    /// it and ends the process.
    pub fn directory(prefix: &str, parent: &Path) -> io::Result<(tempfile::TempDir, Temporary)> {
        let mut held = waiting()?;
        let private = Permissions::from_mode(0o700);
        let directory = tempfile::Builder::new().prefix(prefix).permissions(private).tempdir_in(parent)?;
        let path = directory.path().to_path_buf();
        Ok((directory, hold(&mut held, move || fs::remove_dir_all(&path).is_ok() || !path.exists())))
    }

    /// Starts a program. A signal ends it and all that it has started, then the process.
    pub fn program(command: &mut Command) -> io::Result<(Child, Temporary)> {
        let mut held = waiting()?;
        let child = command.process_group(0).spawn()?;
        let group = Pid::from_child(&child);
        let temporary = hold(&mut held, move || {
            end_group(group);
            true
        });
        Ok((child, temporary))
    }
}

/// Ends all processes of a group: politely first.
fn end_group(group: Pid) {
    let _ = kill_process_group(group, Signal::TERM);
    std::thread::sleep(GRACE);
    let _ = kill_process_group(group, Signal::KILL);
}

/// The lock, once a thread waits for signals.
fn waiting() -> io::Result<MutexGuard<'static, Option<Vec<Held>>>> {
    let mut held = held();
    if held.is_none() {
        wait_for_signals()?;
        *held = Some(Vec::new());
    }
    Ok(held)
}

fn hold(held: &mut Option<Vec<Held>>, end: impl Fn() -> bool + Send + 'static) -> Temporary {
    let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
    held.get_or_insert_default().push((number, Box::new(end)));
    Temporary(number)
}

impl Drop for Temporary {
    fn drop(&mut self) {
        held().iter_mut().for_each(|all| all.retain(|(number, _)| *number != self.0));
    }
}

fn wait_for_signals() -> io::Result<()> {
    let mut signals = Signals::new(ends())?;
    std::thread::spawn(move || {
        let Some(signal) = signals.forever().next() else { return };
        // Held until the process ends: the command begins no other file.
        let held = held();
        // Programs that write to a directory end before it goes.
        for (_, end) in held.iter().flatten().rev() {
            // Other threads may add files meanwhile.
            (0..REMOVALS).any(|_| {
                let gone = end();
                if !gone {
                    std::thread::sleep(PAUSE);
                }
                gone
            });
        }
        say_error!("stepfs: interrupted; what was unfinished is removed");
        std::process::exit(128 + signal);
    });
    Ok(())
}
