//! The remote of a mount, from `stepfs.toml` and the environment.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail};

use crate::remote::{Place, Settings, check, check_name, directory_of, last_node, open};
use crate::store::{RemoteSettings, Store};

/// Longest part of a host's name in a node's name.
const HOST: usize = 40;

/// Opens the remote of a store that is about to be mounted on `dir`. It need not answer yet.
///
/// # Errors
/// The settings are wrong; the message says which.
pub(super) fn connect(store: &Store, dir: &Path) -> Result<Option<(Arc<dyn Place>, Settings)>> {
    let Some(remote) = store.settings().remote.clone() else { return Ok(None) };
    let RemoteSettings { url, node, newest, wait, bandwidth_mib, refresh_seconds, grace_seconds } = remote;
    check_place(store, &url, dir)?;
    let node = node.or_else(|| last_node(store, &url)).unwrap_or_else(|| default_node(store));
    check_name(&node).map_err(anyhow::Error::msg)?;
    let Ok(refresh) = Duration::try_from_secs_f64(refresh_seconds.max(0.05)) else {
        bail!("stepfs.toml: refresh_seconds is no time");
    };
    if bandwidth_mib.is_some_and(|rate| !rate.is_finite() || rate <= 0.0) {
        bail!("stepfs.toml: bandwidth_mib is not above 0");
    }
    let place = open(&url)?;
    let bandwidth = bandwidth_mib.map(|rate| (rate * f64::from(1 << 20)) as u64);
    let grace = Duration::from_secs(grace_seconds);
    Ok(Some((place, Settings { url, node, newest, wait, bandwidth, refresh, grace })))
}

/// Writes a remote's URL into the settings of a store that is about to be mounted on `dir`.
///
/// # Errors
/// The URL is wrong, and is written nowhere; the store has another one.
pub(super) fn adopt(store: &mut Store, url: &str, dir: &Path) -> Result<()> {
    check(url)?;
    check_place(store, url, dir)?;
    Ok(store.set_remote(url)?)
}

fn check_place(store: &Store, url: &str, dir: &Path) -> Result<()> {
    let Some(directory) = directory_of(url) else { return Ok(()) };
    apart(directory, store.root(), "the store")?;
    apart(directory, dir, "the mount")
}

/// Refuses a remote inside a place, or around it: each would hold itself.
fn apart(remote: &Path, other: &Path, name: &str) -> Result<()> {
    let real = |path: &Path| -> PathBuf {
        let above = path.ancestors().find_map(|above| Some((above, fs::canonicalize(above).ok()?)));
        above.map_or(path.to_path_buf(), |(above, real)| real.join(path.strip_prefix(above).unwrap_or(Path::new(""))))
    };
    let (remote, other) = (real(remote), real(other));
    if remote.starts_with(&other) || other.starts_with(&remote) {
        bail!(
            "the remote {} and {name} {} are in one another; use a directory of its own",
            remote.display(),
            other.display()
        );
    }
    Ok(())
}

/// The host's name, and the first digits of the store's id: two stores on one host are two nodes. A store keeps this name when
/// its host gets another one.
fn default_node(store: &Store) -> String {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let plain = |c: char| if c.is_ascii_alphanumeric() || c == '-' { c } else { '-' };
    let host: String = host.chars().map(plain).take(HOST).collect();
    format!("{}-{}", host.trim_matches('-'), &store.id().to_string()[..8]).trim_start_matches('-').to_string()
}
