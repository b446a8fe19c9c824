//! Rebuilds a damaged or missing `stepfs.toml`. Every stub has the store's id; users must set everything else again.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};

use super::durable::{CrashPoint, Io, parent};
use super::object::{Id, path_of};
use super::settings::{self, Settings};
use super::{Error, Profile, STUB_BYTES, Stub, files_below};

/// Number of stubs to read. All have the same id, except those that were copied from other stores.
const MOST_STUBS: usize = 10_000;

/// The text of a new `stepfs.toml` for the store of this tree, and a message about the parts kept from the old one.
///
/// # Errors
/// [`Error::Settings`] if the store's id cannot be found; device errors.
pub(super) fn settings(io: &Io, tree: &Path, damaged: &str) -> Result<(String, String), Error> {
    let stubs = ids(io, tree).map_err(Error::io(tree))?;
    let said = damaged.lines().find_map(|line| {
        let value = line.split_once('=').filter(|(key, _)| key.trim() == "store")?.1;
        value.trim().trim_matches('"').parse::<Id>().ok()
    });
    // The majority: a tree may have stubs of another store, copied into it as files.
    let most = stubs.iter().max_by_key(|(id, count)| (**count, Some(**id) == said)).map(|(id, _)| *id);
    let id = most.or(said).ok_or_else(|| {
        let why = "it cannot be read, and no file in tree/ has the store's id; restore it from a backup";
        Error::Settings(why.into())
    })?;
    // Perhaps only the store's id or the format is wrong: all else is kept then.
    for key in ["store", "format"] {
        let right = if key == "store" { format!("store = \"{id}\"") } else { format!("format = {}", settings::FORMAT) };
        let is_it = |line: &str| line.split_once('=').is_some_and(|(name, _)| name.trim() == key);
        let text: String =
            damaged.lines().map(|line| if is_it(line) { &right } else { line }.to_string() + "\n").collect();
        if Settings::parse(&text).is_ok_and(|settings| settings.id == id) {
            return Ok((text, format!("stepfs.toml: its line `{key}` is rebuilt, all others are unchanged")));
        }
    }
    // The old rules are unknown. Future states must not lose more than the user permitted.
    let text = Settings::with_default_profile(&settings::template(id), Profile::Exact)?;
    let words = "stepfs.toml: rebuilt with the profile exact for all files and without retention; set your rules \
                 again, the old text is in stepfs.toml.damaged";
    Ok((text, words.into()))
}

/// True if a store has another id than this one: stubs have it, their objects exist here, and no stub has `id`.
pub(super) fn is_wrong(io: &Io, root: &Path, id: Id) -> io::Result<bool> {
    let tree = root.join("tree");
    if !tree.is_dir() {
        return Ok(false);
    }
    let objects = root.join("objects");
    let here = each(io, &tree, |stub| path_of(&objects, stub.object).exists())?;
    Ok(!here.is_empty() && !here.contains_key(&id))
}

/// The number of stubs in a tree by store.
fn ids(io: &Io, tree: &Path) -> io::Result<HashMap<Id, usize>> {
    each(io, tree, |_| true)
}

fn each(io: &Io, tree: &Path, counts: impl Fn(&Stub) -> bool) -> io::Result<HashMap<Id, usize>> {
    let (mut ids, mut seen): (HashMap<Id, usize>, usize) = Default::default();
    for path in files_below(tree, Path::new(""))? {
        let file = io.open_with(&tree.join(path), libc::O_NOFOLLOW | libc::O_NONBLOCK)?;
        let mut block = [0; STUB_BYTES];
        if file.read_exact_at(&mut block, 0).is_err() {
            continue;
        }
        if let Some(stub) = Stub::decode(&block).ok().flatten().filter(&counts) {
            seen += 1;
            *ids.entry(stub.store).or_default() += 1;
        }
        if seen == MOST_STUBS {
            break;
        }
    }
    Ok(ids)
}

/// Keeps the file at `path` under a second name beside it, which no later call takes.
pub(super) fn keep(io: &Io, path: &Path) -> io::Result<()> {
    for number in 0.. {
        let suffix = if number == 0 { ".damaged".to_string() } else { format!(".damaged.{number}") };
        let mut name = path.as_os_str().to_os_string();
        name.push(suffix);
        match io.device().link(path, &PathBuf::from(name), CrashPoint::SettingsKept) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            result => {
                result?;
                break;
            }
        }
    }
    io.sync_dir(parent(path), CrashPoint::SettingsKept)
}
