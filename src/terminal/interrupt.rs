//! Ctrl-C: a flag for commands that clean up, and the removal of what a command keeps only for itself.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// How often to try to remove a directory that other threads write to, and the pause in between: at most a second.
const REMOVALS: usize = 200;
const PAUSE: Duration = Duration::from_millis(5);

/// A flag that SIGINT, SIGTERM and SIGHUP set, for commands that must clean up.
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

/// What goes when the command is interrupted. `None` while nobody waits for a signal.
static HELD: Mutex<Option<Vec<Held>>> = Mutex::new(None);

/// A path, and how to remove what is there.
type Held = (PathBuf, fn(&Path) -> io::Result<()>);

fn held() -> MutexGuard<'static, Option<Vec<Held>>> {
    HELD.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A file or directory, which may not exist yet, that goes if SIGINT, SIGTERM or SIGHUP ends the command while this lives.
pub struct Temporary(PathBuf);

impl Temporary {
    /// From now on a signal removes the file at `path` and ends the process. It removes no directory.
    pub fn file(path: PathBuf) -> io::Result<Temporary> {
        let mut held = waiting()?;
        Ok(hold(&mut held, path, |path| fs::remove_file(path)))
    }

    /// A new directory at `path`. A signal removes it and ends the process.
    pub fn new_directory(path: &Path) -> io::Result<Temporary> {
        let mut held = waiting()?;
        fs::create_dir(path)?;
        Ok(hold(&mut held, path.to_path_buf(), |path| fs::remove_dir_all(path)))
    }

    /// A new directory for temporary files that begins with `prefix`. A signal removes it and ends the process.
    pub fn directory(prefix: &str) -> io::Result<(tempfile::TempDir, Temporary)> {
        // Under the lock: no signal is answered between the two.
        let mut held = waiting()?;
        let directory = tempfile::Builder::new().prefix(prefix).tempdir()?;
        let temporary = hold(&mut held, directory.path().to_path_buf(), |path| fs::remove_dir_all(path));
        Ok((directory, temporary))
    }
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

fn hold(held: &mut Option<Vec<Held>>, path: PathBuf, remove: fn(&Path) -> io::Result<()>) -> Temporary {
    held.get_or_insert_default().push((path.clone(), remove));
    Temporary(path)
}

impl Drop for Temporary {
    fn drop(&mut self) {
        held().iter_mut().for_each(|paths| paths.retain(|(path, _)| *path != self.0));
    }
}

fn wait_for_signals() -> io::Result<()> {
    let mut signals = Signals::new(ends())?;
    std::thread::spawn(move || {
        let Some(signal) = signals.forever().next() else { return };
        // Held until the process ends: the command begins no other file.
        let held = held();
        for (path, remove) in held.iter().flatten() {
            // Other threads may add files meanwhile.
            (0..REMOVALS).any(|_| {
                let gone = remove(path).is_ok() || !path.exists();
                if !gone {
                    std::thread::sleep(PAUSE);
                }
                gone
            });
        }
        say_error!("interrupted");
        std::process::exit(128 + signal);
    });
    Ok(())
}
