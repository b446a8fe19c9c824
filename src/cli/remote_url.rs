//! Commands on the URL of a remote: `ls`, `status`, `gc --node`, and a store for those that read files.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::Serialize;

use crate::remote::{self, Content, Missing, Place, Reader, View, Writer};
use crate::store::{Store, name_bytes};

use super::format::{name, size, table};
use super::interrupt::Temporary;
use super::target::Target;

/// What stands in front of the store that a remote is copied into.
const COPY: &str = "stepfs-remote-";

/// The URL that a path is, of whatever kind: errors then say which kinds there are. `None` for a path.
pub(super) fn url_of(path: &Path) -> Option<&str> {
    path.to_str().filter(|text| text.contains("://"))
}

/// A store for a command that reads files. A remote's is removed at the end.
pub(super) struct Brought {
    pub(super) root: PathBuf,
    /// The wanted path in its tree.
    pub(super) path: PathBuf,
    /// The names that could not be brought.
    pub(super) missing: Missing,
    _copy: Option<(tempfile::TempDir, Temporary)>,
}

impl Brought {
    /// A store, and what could not be brought into it.
    pub(super) fn of(root: PathBuf, missing: Missing) -> Brought {
        Brought { root, path: PathBuf::new(), missing, _copy: None }
    }

    /// Says what could not be brought; answers whether something could not.
    pub(super) fn tell_missing(&self) -> bool {
        tell(&self.missing)
    }
}

/// Says what is missing; answers whether something is.
fn tell(Missing { names, nodes, .. }: &Missing) -> bool {
    names.iter().for_each(|(path, why)| say_error!("{}: {}", name(&path.display().to_string()), name(why)));
    nodes.iter().for_each(|why| say_error!("part of a node cannot be read, which may have more files: {}", name(why)));
    !names.is_empty() || !nodes.is_empty()
}

/// The store of `path`, which may be in a mount; `wanted` is relative to `path`. For a URL: a new store in the directory
/// for temporary files, with the names of the remote and the objects of those at and below `wanted`.
pub(super) fn bring(path: &Path, wanted: &Path) -> Result<Brought> {
    let Some(url) = url_of(path) else {
        let target = match Target::through_mount(path)? {
            Some(target) => target,
            None => Target { store: path.to_path_buf(), mount: None, path: PathBuf::new() },
        };
        let wanted = inside(&target, path, wanted)?;
        return Ok(Brought { path: wanted, ..Brought::of(target.store, Missing::default()) });
    };
    let place = existing(url)?;
    // It may be large.
    let (copy, temporary) = Temporary::directory(COPY)?;
    let root = copy.path().join("store");
    let wanted = inside(&Target { store: root.clone(), mount: None, path: PathBuf::new() }, path, wanted)?;
    let from = remote::Origin { place: &place, name: (url, "copy"), watch: Arc::new(|_| true) };
    let missing = remote::copy(&from, Store::open(&root)?, &wanted)?;
    Ok(Brought { root, path: wanted, missing, _copy: Some((copy, temporary)) })
}

/// The path in the tree that a name means, below the place that the user named.
fn inside(target: &Target, place: &Path, name: &Path) -> Result<PathBuf> {
    target.inside(name).with_context(|| {
        format!(
            "{} is not inside {}; paths are relative to it, without a leading `/`: `stepfs ls {1}` shows them",
            name.display(),
            place.display()
        )
    })
}

/// Opens a remote that must be there: a command that reads creates none.
pub(super) fn existing(url: &str) -> Result<Arc<dyn Place>> {
    if remote::directory_of(url).is_some_and(|directory| !directory.is_dir()) {
        bail!("{url}: there is no such directory");
    }
    let place = remote::open(url)?;
    if place.folders("nodes/")?.is_empty() {
        bail!("{url} has no files of stepfs; is the URL right?");
    }
    Ok(place)
}

pub(super) fn view_of(place: &dyn Place) -> Result<View> {
    let view = Mutex::default();
    Reader::refresh(place, &view)?;
    Ok(view.into_inner().unwrap_or_else(PoisonError::into_inner))
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

/// `stepfs ls URL`
pub(super) fn list(url: &str, json: bool) -> Result<ExitCode> {
    let view = view_of(existing(url)?.as_ref())?;
    let lines: Vec<Line> = view
        .files()
        .map(|(path, stamp, shown)| {
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
        })
        .collect();
    let broken = view.nodes().iter().filter_map(|(node, of)| Some(format!("node {node}: {}", of.broken.as_ref()?)));
    let missing = Missing { nodes: broken.collect(), ..Missing::default() };
    let code = ExitCode::from(if tell(&missing) { super::DAMAGED } else { 0 });
    let mut out = std::io::stdout().lock();
    if json {
        serde_json::to_writer_pretty(&mut out, &lines)?;
        writeln!(out)?;
        return Ok(code);
    }
    let mut rows = vec![["size", "stored", "chain", "node", "path"].map(String::from).to_vec()];
    for line in &lines {
        let chain =
            if line.owner.is_some() && line.chain_len == 0 { "MISSING".into() } else { line.chain_len.to_string() };
        rows.push(vec![size(line.logical_bytes), size(line.stored_bytes), chain, line.node.clone(), name(&line.path)]);
    }
    write!(out, "{}", table(&rows, &[true, true, true, false, false]))?;
    Ok(code)
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

/// `stepfs status URL`. Exit code 3 if part of the remote cannot be read.
pub(super) fn status(url: &str, json: bool) -> Result<ExitCode> {
    let view = view_of(existing(url)?.as_ref())?;
    let mut nodes: Vec<Node> = view
        .nodes()
        .iter()
        .map(|(node, of)| Node {
            node,
            names: 0,
            objects: of.objects.len(),
            object_bytes: of.objects.values().map(|object| object.len).sum(),
            broken: of.broken.as_deref(),
        })
        .collect();
    for (_, stamp, _) in view.files() {
        if let Ok(at) = nodes.binary_search_by(|node| node.node.cmp(&stamp.node)) {
            nodes[at].names += 1;
        }
    }
    let is_broken = nodes.iter().any(|node| node.broken.is_some());
    if json {
        say!("{}", serde_json::to_string_pretty(&nodes)?);
    } else {
        let mut rows = vec![["names", "objects", "size", "node", ""].map(String::from).to_vec()];
        for node in &nodes {
            let broken = node.broken.unwrap_or_default().to_string();
            let counts = [node.names.to_string(), node.objects.to_string(), size(node.object_bytes)];
            rows.push([&counts[..], &[node.node.to_string(), broken]].concat());
        }
        say_part!("{}", table(&rows, &[true, true, true, false, false]));
    }
    Ok(ExitCode::from(if is_broken { super::DAMAGED } else { 0 }))
}

/// `stepfs gc URL --node NODE`: deletes the objects of a node that is gone for good, if no name of any node needs them.
pub(super) fn collect(url: &str, node: &str, grace: Duration) -> Result<ExitCode> {
    let place = existing(url)?;
    let view: Arc<Mutex<View>> = Arc::default();
    Reader::refresh(place.as_ref(), &view)?;
    let store = {
        let view = view.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((broken, why)) = view.nodes().iter().find_map(|(name, of)| Some((name, of.broken.as_ref()?))) {
            bail!("node {broken}: {why}; nothing is deleted while part of a journal cannot be read");
        }
        match view.nodes().get(node).and_then(|of| of.store) {
            Some(store) => store,
            None => bail!("{url} has no node {node}; `stepfs status {url}` lists the nodes"),
        }
    };
    let deleted = Writer::bury(place, view, node, store, grace)?;
    say!("{deleted} object{} deleted", if deleted == 1 { "" } else { "s" });
    Ok(ExitCode::SUCCESS)
}
