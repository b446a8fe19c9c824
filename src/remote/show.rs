//! Shows in the tree what changed on a remote, many names together.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use super::journal::{Content, Shown};
use super::local::{Local, Shape, walk};
use super::place::Result;
use super::plan::plan;
use super::reader::lock;
use super::shared::Shared;
use super::tree;
use super::view::Stamp;
use crate::store::{Id, in_parallel};

/// Names that are shown together. Each is an open file meanwhile.
const AT_ONCE: usize = 256;
/// Programs that list a directory wait for more than that many names, and for so many at most: a few seconds.
const MOST_AWAITED: usize = 20_000;

/// Why a name is left for a later round.
const IS_OPEN: &str = "a program has it open, or has changed it";

/// A name, the change that it is to show, and what that is: nothing if the name is to go.
type Due = (PathBuf, Stamp, Option<Shown>);

/// Shows what changed. Returns the names that cannot be shown now, each with the reason.
pub(super) fn take_all(local: &dyn Local, shared: &Shared) -> Result<BTreeMap<PathBuf, String>> {
    let (node, newest) = (&shared.settings.node, shared.settings.newest);
    let listing = walk(local)?;
    let files = &listing.files;
    // After the tree was listed: a name that a user removes meanwhile is not shown again.
    let shown = shared.shown();
    // First what appears, then what goes: a directory never lacks a file in between, and is not taken for an empty one.
    let (due, appearing, forgotten): (Vec<Due>, usize, BTreeSet<PathBuf>) = {
        let view = lock(&shared.view);
        let plan = plan(node, &view, &listing, &shown, newest);
        let takes = plan.takes.into_iter().filter_map(|(path, stamp)| {
            let now = view.winner(&path).and_then(|(_, now)| now.cloned())?;
            Some((path, stamp, Some(now)))
        });
        let mut due: Vec<Due> = takes.collect();
        // First the names that are here: programs wait to open their files after a mount.
        due.sort_by_key(|(path, ..)| !files.contains_key(path));
        let appearing = due.len();
        shared.forget(&plan.forgets);
        let is_forgotten = |path: &&PathBuf| view.winner(path).is_none();
        let forgotten = plan.drops.iter().map(|(path, _)| path).filter(is_forgotten).cloned().collect();
        due.extend(plan.drops.into_iter().map(|(path, stamp)| (path, stamp, None)));
        (due, appearing, forgotten)
    };
    let is_awaited = (AT_ONCE + 1..=MOST_AWAITED).contains(&due.len());
    let showing = is_awaited.then(|| shared.waiting.begin_showing());
    shared.will_show(due.iter().map(|(path, ..)| path));
    // All directories become durable together, before a program has a file there.
    drop(directories(local, &due, drop)?);
    let mut failed: BTreeMap<PathBuf, String> = BTreeMap::new();
    let (appear, go) = due.split_at(appearing);
    let exchanges = appear.iter().filter(|(path, ..)| files.contains_key(path)).count().div_ceil(AT_ONCE);
    let mut opens = exchanges == 0;
    if opens {
        shared.waiting.set_current();
    }
    for (number, some) in appear.chunks(AT_ONCE).chain(go.chunks(AT_ONCE)).enumerate() {
        if shared.is_stopped() {
            break;
        }
        let directories = directories(local, some, |directory| directory)?;
        // All are written before the first one becomes durable: then one commit of the file system does for all.
        let ready = in_parallel(some, |(path, stamp, now)| {
            now.as_ref().map(|now| tree::make_ready(local.store(), path, stamp, now)).transpose()
        });
        let with_ready: Vec<_> = some.iter().zip(ready).collect();
        let taken = in_parallel(&with_ready, |((path, _, now), ready)| {
            let done = match (ready, now, directories.get(above(path))) {
                (Err(error), ..) | (_, _, Some(Err(error))) => return Some((path.clone(), error.to_string())),
                (Ok(Some(ready)), Some(now), Some(Ok(directory))) => {
                    tree::show(local, (path, directory), files.get(path), now, ready)
                }
                _ => files.get(path).map_or(Ok(true), |found| tree::take_away(local, path, found)),
            };
            match done {
                Ok(true) => None,
                Ok(false) => Some((path.clone(), IS_OPEN.into())),
                Err(error) => Some((path.clone(), error.to_string())),
            }
        });
        failed.extend(taken.into_iter().flatten());
        let shown = some.iter().filter(|(path, ..)| !failed.contains_key(path));
        shared.agree(&shown.clone().map(|(path, stamp, _)| (path.clone(), stamp.clone())).collect());
        let went: Vec<&PathBuf> = shown.filter(|(.., now)| now.is_none()).map(|(path, ..)| path).collect();
        shared.went(went.iter().copied());
        // If a name that no journal has appears again with the same change, that is news: nobody removed it here.
        let forgotten: Vec<PathBuf> = went.into_iter().filter(|path| forgotten.contains(*path)).cloned().collect();
        shared.forget(&forgotten);
        if !opens && number + 1 >= exchanges {
            shared.waiting.set_current();
            opens = true;
        }
    }
    drop(showing);
    let needed = {
        let view = lock(&shared.view);
        let object = |path: &PathBuf| match files.get(path)?.shape {
            Shape::Object(id) => Some(id),
            _ => None,
        };
        let is_replaced = |path: &PathBuf, id: Id| {
            let now = view.winner(path).and_then(|(_, now)| Some(now?.content.clone()));
            now.is_some_and(|now| !matches!(now, Content::Object { id: now, .. } if now == id))
        };
        let open = failed
            .iter()
            .filter(|(_, why)| why.as_str() == IS_OPEN)
            .filter_map(|(path, _)| Some((path, object(path)?)));
        open.filter(|(path, id)| is_replaced(path, *id)).map(|(_, id)| id).collect()
    };
    shared.keeper.keep(local.objects(), &needed, shared.settings.grace);
    shared.sync_shown(local.store())?;
    Ok(failed)
}

fn above(path: &Path) -> &Path {
    path.parent().unwrap_or(Path::new(""))
}

/// What `keep` makes of the directories of names that are to be shown. Those that were missing are durable then.
fn directories<'a, T>(
    local: &dyn Local,
    due: &'a [Due],
    keep: impl Fn(File) -> T,
) -> Result<BTreeMap<&'a Path, io::Result<T>>> {
    let (mut opened, mut grown) = (BTreeMap::new(), BTreeSet::new());
    for (path, shown) in due.iter().filter_map(|(path, _, now)| Some((path, now.as_ref()?))) {
        let open = || tree::directory(local.store(), above(path), (shown.uid, shown.gid), &mut grown).map(&keep);
        opened.entry(above(path)).or_insert_with(open);
    }
    tree::sync(local.store(), &grown)?;
    Ok(opened)
}
