//! Removes what a command keeps only for itself when Ctrl-C ends it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// How often to remove a directory that other threads write to.
const REMOVALS: usize = 20;

/// What goes when the command is interrupted. `None` while nobody waits for a signal.
static HELD: Mutex<Option<Vec<Held>>> = Mutex::new(None);

/// A path, and how to remove what is there.
type Held = (PathBuf, fn(&Path) -> io::Result<()>);

fn held() -> MutexGuard<'static, Option<Vec<Held>>> {
    HELD.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A file or directory, which may not exist yet, that goes if SIGINT or SIGTERM ends the command while this lives.
pub(super) struct Temporary(PathBuf);

impl Temporary {
    /// From now on a signal removes the file at `path` and ends the process. It removes no directory.
    pub(super) fn file(path: PathBuf) -> io::Result<Temporary> {
        Temporary::new(path, |path| fs::remove_file(path))
    }

    /// From now on a signal removes the directory at `path` and ends the process.
    pub(super) fn directory(path: PathBuf) -> io::Result<Temporary> {
        Temporary::new(path, |path| fs::remove_dir_all(path))
    }

    fn new(path: PathBuf, remove: fn(&Path) -> io::Result<()>) -> io::Result<Temporary> {
        let mut held = held();
        let paths = match &mut *held {
            Some(paths) => paths,
            none => {
                wait_for_signals()?;
                none.insert(Vec::new())
            }
        };
        paths.push((path.clone(), remove));
        Ok(Temporary(path))
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        held().iter_mut().for_each(|paths| paths.retain(|(path, _)| *path != self.0));
    }
}

fn wait_for_signals() -> io::Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM])?;
    std::thread::spawn(move || {
        let Some(signal) = signals.forever().next() else { return };
        // Held until the process ends: the command begins no other file.
        let held = held();
        for (path, remove) in held.iter().flatten() {
            // Other threads may add files meanwhile.
            (0..REMOVALS).any(|_| remove(path).is_ok() || !path.exists());
        }
        eprintln!("interrupted");
        std::process::exit(128 + signal);
    });
    Ok(())
}
