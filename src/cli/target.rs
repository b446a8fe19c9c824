//! Maps a path from the user to a store, a mount and a path inside the tree.

use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result, bail};

/// A store, its mount if the path leads through one, and the path inside the tree.
#[derive(Debug)]
pub(super) struct Target {
    /// Absolute path of the store.
    pub(super) store: PathBuf,
    /// Absolute path of the mount's root.
    pub(super) mount: Option<PathBuf>,
    /// Path inside the tree; empty for the whole tree.
    pub(super) path: PathBuf,
}

impl Target {
    /// Finds the place of `path`: a store, a mount, or a path in a mount.
    pub(super) fn of(path: &Path) -> Result<Target> {
        let absolute = fs::canonicalize(path).with_context(|| format!("{}", path.display()))?;
        if absolute.join("stepfs.toml").is_file() {
            return Ok(Target { store: absolute, mount: None, path: PathBuf::new() });
        }
        let Some(mount) = mount_of(&absolute) else {
            bail!(
                "{} is neither a stepfs store nor in a stepfs mount (mount the store and name the file there)",
                path.display()
            );
        };
        let store = attribute(&mount, "store").with_context(|| {
            format!("{} does not answer; `stepfs mount` again clears a dead mount", mount.display())
        })?;
        let path = absolute.strip_prefix(&mount).unwrap_or(&absolute).to_path_buf();
        Ok(Target { store: PathBuf::from(std::ffi::OsString::from_vec(store)), mount: Some(mount), path })
    }

    /// The place of `path` if it leads into a mount; `None` for a store, and for what does not exist.
    pub(super) fn through_mount(path: &Path) -> Result<Option<Target>> {
        match fs::canonicalize(path) {
            Ok(absolute) if !absolute.join("stepfs.toml").is_file() && mount_of(&absolute).is_some() => {
                Target::of(path).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// Maps a name from the user to a path in the tree, or `None` if it lies outside. An absolute name is a path in the
    /// mount or in the store's tree. Any other name is relative to this place.
    pub(super) fn inside(&self, name: &Path) -> Option<PathBuf> {
        let below = match name.is_absolute() {
            true => {
                let roots = self.mount.iter().cloned().chain([self.store.join("tree")]);
                roots.into_iter().find_map(|root| Some(name.strip_prefix(root).ok()?.to_path_buf()))?
            }
            false => self.path.join(name),
        };
        let mut path = PathBuf::new();
        for part in below.components() {
            match part {
                Component::Normal(name) => path.push(name),
                Component::ParentDir if !path.pop() => return None,
                _ => {}
            }
        }
        Some(path)
    }

    /// The place of `path`, which must be in a mount, for actions that need the daemon. Also returns the mount's root.
    pub(super) fn in_mount(path: &Path) -> Result<(Target, PathBuf)> {
        let target = Target::of(path)?;
        match target.mount.clone() {
            Some(mount) => Ok((target, mount)),
            None => bail!(
                "{} is a store; this needs the daemon: `stepfs mount {} DIR`, then name files below DIR",
                path.display(),
                path.display()
            ),
        }
    }

    /// The mount that holds `path`.
    pub(super) fn mounted(path: &Path) -> Result<PathBuf> {
        match Target::of(path)?.mount {
            Some(mount) => Ok(mount),
            None => bail!("{} is a store; name the directory where it is mounted", path.display()),
        }
    }
}

/// The value of a `user.stepfs.*` attribute.
pub(super) fn attribute(path: &Path, name: &str) -> std::io::Result<Vec<u8>> {
    xattr::get(path, format!("user.stepfs.{name}"))?.ok_or_else(|| std::io::Error::from_raw_os_error(libc::ENODATA))
}

/// The stepfs mount that holds an absolute path.
fn mount_of(path: &Path) -> Option<PathBuf> {
    let mounts = fs::read("/proc/self/mountinfo").ok()?;
    let mut best: Option<PathBuf> = None;
    for line in mounts.split(|b| *b == b'\n') {
        // Field 5 is the mount point; the type follows the lone hyphen.
        let Some(point) = line.split(|b| *b == b' ').nth(4) else { continue };
        if !contains(line, b" - fuse.stepfs ") {
            continue;
        }
        let point = PathBuf::from(std::ffi::OsString::from_vec(unescape(point)));
        if path.starts_with(&point) && best.as_ref().is_none_or(|b| point.as_os_str().len() > b.as_os_str().len()) {
            best = Some(point);
        }
    }
    best
}

fn contains(line: &[u8], wanted: &[u8]) -> bool {
    line.windows(wanted.len()).any(|window| window == wanted)
}

/// The kernel escapes blanks and backslashes in mount points, as in `\040`.
fn unescape(text: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text;
    while let [first, tail @ ..] = rest {
        let octal = tail.get(..3).and_then(|digits| std::str::from_utf8(digits).ok());
        match (first, octal.and_then(|digits| u8::from_str_radix(digits, 8).ok())) {
            (b'\\', Some(byte)) => {
                out.push(byte);
                rest = &tail[3..];
            }
            _ => {
                out.push(*first);
                rest = tail;
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_looked_for_in_the_tree() {
        let target = |path: &str| Target { store: "/s".into(), mount: Some("/mnt".into()), path: path.into() };
        let inside = |path: &str, name: &str| target(path).inside(Path::new(name));
        assert_eq!(inside("", "run/a.pt"), Some("run/a.pt".into()));
        assert_eq!(inside("run", "./a.pt"), Some("run/a.pt".into()));
        assert_eq!(inside("run", "../b/a.pt"), Some("b/a.pt".into()));
        assert_eq!(inside("run", "/mnt/a.pt"), Some("a.pt".into()));
        assert_eq!(inside("run", "/s/tree/a.pt"), Some("a.pt".into()));
        assert_eq!(inside("run", "/elsewhere/a.pt"), None);
        assert_eq!(inside("", "../a.pt"), None);
    }
}
