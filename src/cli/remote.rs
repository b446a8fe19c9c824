//! Remotes: the one of a store, from `stepfs.toml` and the environment, and commands on the URL of one.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Result, bail};
use serde::Serialize;

use crate::remote::{
    self, Content, Missing, Place, Reader, Settings, View, Writer, check, check_name, directory_of, last_node, open,
};
use crate::store::{RemoteSettings, Store, name_bytes};

use super::format::{name, size, table};
use super::interrupt::Temporary;
use super::source::{Brought, Local};
use super::{DAMAGED, say_json};

/// Longest part of a host's name in a node's name.
const HOST: usize = 40;
/// Begins the name of a store that a remote is copied into.
const COPY: &str = "stepfs-remote-";

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

/// Says what could not be brought; answers whether something could not.
pub(super) fn tell(Missing { names, nodes, .. }: &Missing) -> bool {
    names.iter().for_each(|(path, why)| say_error!("{}: {}", name(&path.display().to_string()), name(why)));
    nodes.iter().for_each(|why| say_error!("part of a node cannot be read, which may have more files: {}", name(why)));
    !names.is_empty() || !nodes.is_empty()
}

/// A remote by its URL, of whatever kind: errors then say which kinds there are.
pub(super) struct Remote {
    url: String,
}

/// A name on a remote.
#[derive(Serialize)]
struct Line<'a> {
    path: String,
    /// In hexadecimal, if it is not UTF-8.
    #[serde(skip_serializing_if = "Option::is_none")]
    path_bytes: Option<String>,
    logical_bytes: u64,
    /// Of its own object, or of its bytes in the journal.
    stored_bytes: u64,
    /// The node that wrote the name last.
    node: String,
    /// Objects that a read needs; 0 if the journal has the bytes.
    chain_len: usize,
    modified_ns: i64,
    #[serde(skip)]
    owner: Option<&'a str>,
}

/// A node of a remote.
#[derive(Serialize)]
struct Node<'a> {
    node: &'a str,
    names: usize,
    objects: usize,
    object_bytes: u64,
    /// Why part of it cannot be read.
    broken: Option<&'a str>,
}

impl Remote {
    /// `None` for a path.
    pub(super) fn of(path: &Path) -> Option<Remote> {
        path.to_str().filter(|text| text.contains("://")).map(Remote::at)
    }

    pub(super) fn at(url: &str) -> Remote {
        Remote { url: url.to_string() }
    }

    /// Opens a remote that must be there: a command that reads creates none.
    fn place(&self) -> Result<Arc<dyn Place>> {
        let url = &self.url;
        if directory_of(url).is_some_and(|directory| !directory.is_dir()) {
            bail!("{url}: there is no such directory");
        }
        let place = open(url)?;
        if place.folders("nodes/")?.is_empty() {
            bail!("{url} has no files of stepfs; is the URL right?");
        }
        Ok(place)
    }

    fn view(&self) -> Result<View> {
        let view = Mutex::default();
        Reader::refresh(self.place()?.as_ref(), &view)?;
        Ok(view.into_inner().unwrap_or_else(PoisonError::into_inner))
    }

    /// Refuses a URL without files of stepfs: one that is mistyped must not become a store's remote.
    pub(super) fn must_exist(&self) -> Result<()> {
        if self.view()?.nodes().is_empty() {
            bail!("{} has no files of stepfs", self.url);
        }
        Ok(())
    }

    /// A new store with the names of the remote, and the objects of those at and below `wanted`.
    pub(super) fn bring(&self, wanted: &Path) -> Result<Brought> {
        let place = self.place()?;
        // It may be large.
        let (copy, temporary) = Temporary::directory(COPY)?;
        let root = copy.path().join("store");
        let local = Local { store: root.clone(), mount: None, path: PathBuf::new() };
        let path = local.wanted(Path::new(&self.url), wanted)?;
        let from = remote::Origin { place: &place, name: (&self.url, "copy"), watch: Arc::new(|_| true) };
        let missing = remote::copy(&from, Store::open(&root)?, &path)?;
        Ok(Brought { root, path, missing, _copy: Some((copy, temporary)) })
    }

    /// `stepfs ls URL`
    pub(super) fn list(&self, json: bool) -> Result<ExitCode> {
        let view = self.view()?;
        let lines = view.files().map(|(path, stamp, shown)| {
            let (owner, chain) = match &shown.content {
                Content::Object { owner, id } => (Some(owner.as_str()), view.chain(owner, *id).unwrap_or_default()),
                Content::Inline(_) | Content::Link(_) => (None, Vec::new()),
            };
            Line {
                path: path.to_string_lossy().into_owned(),
                path_bytes: name_bytes(path),
                logical_bytes: shown.len,
                stored_bytes: if owner.is_some() { chain.last().map_or(0, |last| last.len) } else { shown.len },
                node: stamp.node,
                chain_len: chain.len(),
                modified_ns: shown.modified_ns,
                owner,
            }
        });
        let lines: Vec<Line> = lines.collect();
        let broken = view.nodes().iter().filter_map(|(node, of)| Some(format!("node {node}: {}", of.broken.as_ref()?)));
        let is_incomplete = tell(&Missing { nodes: broken.collect(), ..Missing::default() });
        if json {
            say_json(&lines)?;
        } else {
            let mut rows = vec![["size", "stored", "chain", "node", "path"].map(String::from).to_vec()];
            for line in &lines {
                let is_lost = line.owner.is_some() && line.chain_len == 0;
                let chain = if is_lost { "MISSING".into() } else { line.chain_len.to_string() };
                let (whole, stored) = (size(line.logical_bytes), size(line.stored_bytes));
                rows.push(vec![whole, stored, chain, line.node.clone(), name(&line.path)]);
            }
            say_part!("{}", table(&rows, &[true, true, true, false, false]));
        }
        Ok(ExitCode::from(if is_incomplete { DAMAGED } else { 0 }))
    }

    /// `stepfs status URL`. Exit code 3 if part of the remote cannot be read.
    pub(super) fn status(&self, json: bool) -> Result<ExitCode> {
        let view = self.view()?;
        let nodes = view.nodes().iter().map(|(node, of)| Node {
            node,
            names: 0,
            objects: of.objects.len(),
            object_bytes: of.objects.values().map(|object| object.len).sum(),
            broken: of.broken.as_deref(),
        });
        let mut nodes: Vec<Node> = nodes.collect();
        for (_, stamp, _) in view.files() {
            if let Ok(at) = nodes.binary_search_by(|node| node.node.cmp(&stamp.node)) {
                nodes[at].names += 1;
            }
        }
        let is_broken = nodes.iter().any(|node| node.broken.is_some());
        if json {
            say_json(&nodes)?;
        } else {
            let mut rows = vec![["names", "objects", "size", "node", ""].map(String::from).to_vec()];
            for node in &nodes {
                let broken = node.broken.unwrap_or_default().to_string();
                let counts = [node.names.to_string(), node.objects.to_string(), size(node.object_bytes)];
                rows.push([&counts[..], &[node.node.to_string(), broken]].concat());
            }
            say_part!("{}", table(&rows, &[true, true, true, false, false]));
        }
        Ok(ExitCode::from(if is_broken { DAMAGED } else { 0 }))
    }

    /// `stepfs gc URL --node NODE`: deletes the objects of a node that is gone for good, if no name of any node needs
    /// them.
    pub(super) fn collect(&self, node: &str, grace: Duration) -> Result<ExitCode> {
        let place = self.place()?;
        let view: Arc<Mutex<View>> = Arc::default();
        Reader::refresh(place.as_ref(), &view)?;
        let store = {
            let view = view.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some((broken, why)) = view.nodes().iter().find_map(|(name, of)| Some((name, of.broken.as_ref()?))) {
                bail!("node {broken}: {why}; nothing is deleted while part of a journal cannot be read");
            }
            match view.nodes().get(node).and_then(|of| of.store) {
                Some(store) => store,
                None => bail!("{0} has no node {node}; `stepfs status {0}` lists the nodes", self.url),
            }
        };
        let deleted = Writer::bury(place, view, node, store, grace)?;
        say!("{deleted} object{} deleted", if deleted == 1 { "" } else { "s" });
        Ok(ExitCode::SUCCESS)
    }
}
