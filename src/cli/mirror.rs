//! Mirrors: the one of a store, from `stepfs.toml` and the environment, and commands on the URL of one.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use clap::builder::{PathBufValueParser, TypedValueParser};
use serde::Serialize;

use crate::clock::wall_ns;
use crate::mirror::tree::{Content, Node};
use crate::mirror::{Missing, Place, Reader, Settings, claim, directory_of, open};
use crate::store::retention::duration;
use crate::store::{MirrorSettings, Named, Store, natural, real};

use super::format::{name, size, table, utc};
use super::{DAMAGED, exit_if, say_answer};

/// Opens the mirror of a store that is about to be mounted on `dir`. It need not answer yet.
///
/// # Errors
/// The settings are wrong; the message says which.
pub(super) fn connect(store: &Store, dir: &Path) -> Result<Option<(Arc<dyn Place>, Settings)>> {
    let Some(mirror) = store.settings().mirror.clone() else { return Ok(None) };
    let keep = mirror.keep()?;
    let MirrorSettings { url, bandwidth_mib, .. } = mirror;
    check_place(store, &url, dir)?;
    let bandwidth = bandwidth_mib.map(|rate| rate * f64::from(1 << 20));
    Ok(Some((open(&url)?, Settings { url, keep, bandwidth })))
}

/// Makes a URL the mirror of a store that is about to be mounted on `dir`.
///
/// # Errors
/// The URL is wrong, does not answer, or is the mirror of another store; the store has another one.
pub(super) fn adopt(store: &mut Store, url: &str, dir: &Path) -> Result<()> {
    let place = open(url)?;
    check_place(store, url, dir)?;
    if store.settings().mirror.as_ref().is_none_or(|mirror| mirror.url != url) {
        // A disk that is not mounted must not become a directory of this one.
        if let Some(above) = directory_of(url).and_then(Path::parent).filter(|above| !above.is_dir()) {
            bail!("{} does not exist, so {url} cannot be made in it; mount its disk, or mkdir -p {0}", above.display());
        }
        claim(place.as_ref(), store.id()).with_context(|| url.to_string())?;
    }
    Ok(store.set_mirror(url)?)
}

fn check_place(store: &Store, url: &str, dir: &Path) -> Result<()> {
    let Some(directory) = directory_of(url) else { return Ok(()) };
    apart(directory, store.root(), "the store")?;
    apart(directory, dir, "the mount")
}

/// Refuses a mirror inside a place, or around it: each would hold itself.
fn apart(mirror: &Path, other: &Path, name: &str) -> Result<()> {
    let (mirror, other) = (real(mirror), real(other));
    if mirror.starts_with(&other) || other.starts_with(&mirror) {
        bail!(
            "the mirror {} and {name} {} are in one another; use a directory of its own",
            mirror.display(),
            other.display()
        );
    }
    Ok(())
}

/// Names the files that could not be brought.
///
/// # Errors
/// Something could not.
pub(super) fn tell(Missing { names, unread, .. }: &Missing) -> Result<()> {
    names.iter().for_each(|(path, why)| say_error!("{}: {}", name(path), name(why)));
    unread.iter().for_each(|why| say_error!("a directory cannot be read, which may have more files: {}", name(why)));
    exit_if(!names.is_empty() || !unread.is_empty(), DAMAGED)
}

/// A time in the past, in milliseconds since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct At(pub(super) u64);

impl std::str::FromStr for At {
    type Err = String;

    /// An age such as `3h`, or seconds since 1970 after an `@`, as date(1) takes and `date +@%s` prints them. That command
    /// prints a second that is not over yet, so a second counts to its end.
    fn from_str(text: &str) -> Result<At, String> {
        let ms = match text.strip_prefix('@') {
            Some(seconds) => seconds.parse::<u32>().ok().map(|seconds| u64::from(seconds) * 1000 + 999),
            None => duration(text).ok().map(|ns| (wall_ns() as u64).saturating_sub(ns) / 1_000_000),
        };
        ms.map(At).ok_or_else(|| "write an age such as 3h or 2d, or @ and seconds since 1970".into())
    }
}

/// A mirror by its URL, of whatever kind: errors then say which kinds there are.
pub(super) struct Mirror {
    pub(super) url: String,
    at: Option<At>,
}

/// A name on a mirror.
#[derive(Serialize)]
struct Line {
    #[serde(flatten)]
    path: Named,
    logical_bytes: u64,
    /// Of its own object, or of the file, before they are packed.
    stored_bytes: u64,
    /// Objects that a read needs; 0 if there is none, or if one is missing.
    chain_len: usize,
    lossy: bool,
    modified_ns: i64,
}

impl Line {
    fn cells(&self) -> Vec<String> {
        let chain = if self.chain_len == 0 { String::new() } else { self.chain_len.to_string() };
        let lossy = if self.lossy { "lossy" } else { "" };
        vec![size(self.logical_bytes), size(self.stored_bytes), chain, lossy.into(), name(&*self.path)]
    }
}

/// A state of a mirror.
#[derive(Serialize)]
struct State {
    /// Seconds since 1970, rounded up: `--at @SECONDS` finds it.
    at: u64,
}

/// Reads a path of this machine, for clap.
///
/// # Errors
/// It is a URL.
pub(super) fn local(path: PathBuf) -> Result<PathBuf, String> {
    match Mirror::of(&path) {
        Some(_) => Err("it is a URL; name a path of this machine. `stepfs pull` makes a store of a mirror, \
                        `stepfs mount --mirror URL` keeps one, and `stepfs export URL` copies files of one"
            .into()),
        None => Ok(path),
    }
}

/// [`local`] for clap.
pub(super) fn local_path() -> impl TypedValueParser<Value = PathBuf> {
    PathBufValueParser::new().try_map(local)
}

impl Mirror {
    /// `None` for a path.
    pub(super) fn of(path: &Path) -> Option<Mirror> {
        path.to_str().filter(|text| text.contains("://")).map(|url| Mirror { url: url.to_string(), at: None })
    }

    /// As it was at a time.
    pub(super) fn at(self, at: Option<At>) -> Mirror {
        Mirror { at, ..self }
    }

    /// The state that is asked for, with the names at and below `wanted`.
    pub(super) fn read(&self, wanted: &Path) -> Result<Reader> {
        let place = open(&self.url)?;
        Reader::open(&place, self.at.map(|at| at.0), wanted).with_context(|| self.url.clone())
    }

    /// `stepfs ls URL`
    pub(super) fn list(&self, json: bool) -> Result<()> {
        let reader = self.read(Path::new(""))?;
        let mut lines = Vec::new();
        for (path, node) in reader.tree.iter() {
            let (len, attributes, id) = match node {
                Node::Directory(..) => continue,
                Node::Link(attributes, _) => (0, attributes, None),
                Node::File(file) => match &file.content {
                    Content::Plain(bytes) => (bytes.len, &file.attributes, None),
                    Content::Object(id, len) => (*len, &file.attributes, Some(*id)),
                },
            };
            let chain = id.and_then(|id| reader.tree.chain(id)).unwrap_or_default();
            let own = chain.first();
            lines.push(Line {
                path: Named("path", path),
                logical_bytes: len,
                stored_bytes: if id.is_none() { len } else { own.map_or(0, |own| own.bytes.len) },
                chain_len: chain.len(),
                lossy: own.is_some_and(|own| own.lossy),
                modified_ns: attributes.modified_ns,
            });
        }
        lines.sort_by(|a, b| natural::order(&a.path, &b.path));
        let told = tell(&Missing { unread: reader.tree.unread, ..Missing::default() });
        say_answer(json, &lines, |lines| {
            let rows: Vec<Vec<String>> = lines.iter().map(Line::cells).collect();
            say_part!("{}", table(&[">size", ">stored", ">chain", "", "path"], &rows));
        })?;
        told
    }

    /// `stepfs status URL`: the states that are there.
    pub(super) fn status(&self, json: bool) -> Result<()> {
        let (store, states) = Reader::states(open(&self.url)?.as_ref()).with_context(|| self.url.clone())?;
        let states: Vec<State> = states.iter().map(|(_, at_ms)| State { at: at_ms.div_ceil(1000) }).collect();
        say_answer(json, &states, |states| {
            say!("mirror of store {store}, {} states", states.len());
            states.iter().for_each(|State { at }| say!("  {}  --at @{at}", utc(*at)));
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_and_written() {
        let known = [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_798_761_599, "2026-12-31T23:59:59Z"),
            (u64::MAX, "9999-12-31T23:59:59Z"),
        ];
        known.into_iter().for_each(|(seconds, text)| assert_eq!(utc(seconds), text));
        assert_eq!("@951782400".parse(), Ok(At(951_782_400_999)));
        let now_ms = wall_ns() as u64 / 1_000_000;
        let At(hour) = "1h".parse().unwrap();
        assert!((3_599_000..3_700_000).contains(&(now_ms - hour)));
        ["", "yesterday", "@x", "-1h"].into_iter().for_each(|text| assert!(text.parse::<At>().is_err(), "{text}"));
    }
}
