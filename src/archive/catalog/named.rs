//! The files that checkpoints and links name as the best of a run. Pure: statements go in, paths come out.
//!
//! A checkpoint names a path as the trainer saw the mount. So only the last component counts, beside the checkpoint
//! that makes the statement. That holds even after the run's directory moved. Each save states the best so far, so
//! the newest statement of a series counts.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use crate::store::step_pattern;

/// The statement of one file or link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::archive) enum Says {
    /// A checkpoint's file: the paths of the best checkpoints so far, as the trainer saw them; none yet, if empty.
    Best(Vec<String>),
    /// A link whose own name asks for exact bytes: its target, inside the tree.
    Link(PathBuf),
}

#[derive(Debug)]
struct Statement {
    says: Says,
    modified_ns: i64,
    /// The file is gone. Its statement counts until a newer one comes: the run's best does not become worse.
    orphan: bool,
}

/// All statements, and the paths that they name.
#[derive(Debug, Default)]
pub(super) struct Named {
    statements: BTreeMap<PathBuf, Statement>,
    /// Statements of each series, the newest last.
    series: HashMap<Vec<u8>, BTreeSet<(i64, PathBuf)>>,
    /// Paths that count as named, each with the statements that name it.
    best: BTreeMap<PathBuf, BTreeSet<PathBuf>>,
    /// Paths of statements that no longer count. Another statement may name them.
    dropped: Vec<PathBuf>,
}

impl Named {
    /// Sets the statement at `path`, or removes it. Returns the paths that are named only since.
    pub(super) fn set(&mut self, path: &Path, said: Option<(Says, i64)>) -> Vec<PathBuf> {
        let mut new = said.as_ref().map(|(says, _)| targets(path, says)).unwrap_or_default();
        new.retain(|best| !self.best.contains_key(best));
        self.take(path);
        if let Some((says, modified_ns)) = said {
            self.put(path.to_path_buf(), Statement { says, modified_ns, orphan: false });
        }
        new.into_iter().filter(|best| self.best.contains_key(best)).collect()
    }

    /// The file or link at `path` is gone.
    pub(super) fn removed(&mut self, path: &Path) {
        let Some(statement) = self.statements.get_mut(path) else { return };
        let is_only = || self.series.get(&series(path, &statement.says)).is_some_and(|all| all.len() == 1);
        match statement.says {
            Says::Best(_) if is_only() => statement.orphan = true,
            _ => drop(self.take(path)),
        }
    }

    /// Takes out the statements at and below a path, for [`Named::insert`] under another name.
    pub(super) fn take_below(&mut self, path: &Path) -> Taken {
        let below = self.statements.range::<Path, _>((std::ops::Bound::Included(path), std::ops::Bound::Unbounded));
        let below: Vec<PathBuf> = below.map(|(p, _)| p).take_while(|p| p.starts_with(path)).cloned().collect();
        Taken(below.into_iter().filter_map(|path| self.take(&path).map(|statement| (path, statement))).collect())
    }

    /// Puts back the statements taken out at `from`, in place of those at `to`. Returns the links among them,
    /// because their targets must be read again.
    pub(super) fn insert(&mut self, taken: Taken, from: &Path, to: &Path) -> Vec<PathBuf> {
        let mut links = Vec::new();
        for (path, statement) in taken.0 {
            let path = moved(&path, from, to);
            if let Says::Link(_) = statement.says {
                links.push(path.clone());
            }
            self.take(&path);
            self.put(path, statement);
        }
        links
    }

    /// Whether there is a statement at a path.
    pub(super) fn has_said(&self, path: &Path) -> bool {
        self.statements.contains_key(path)
    }

    /// Links that name something. A change of another link may change where one of them leads.
    pub(super) fn links(&self) -> impl Iterator<Item = &PathBuf> {
        self.statements.iter().filter(|(_, of)| matches!(of.says, Says::Link(_))).map(|(path, _)| path)
    }

    /// The statement that names the file at `path`, or a directory above it, as the best.
    pub(super) fn by(&self, path: &Path) -> Option<&Path> {
        let named = path.ancestors().find_map(|above| self.best.get(above));
        named.and_then(|by| by.first()).map(PathBuf::as_path)
    }

    /// Paths that were named before the last changes, and are not any more.
    pub(super) fn take_dropped(&mut self) -> Vec<PathBuf> {
        let mut dropped = std::mem::take(&mut self.dropped);
        dropped.retain(|path| !self.best.contains_key(path));
        dropped
    }

    fn take(&mut self, path: &Path) -> Option<Statement> {
        let statement = self.statements.get(path)?;
        let (key, modified_ns) = (series(path, &statement.says), statement.modified_ns);
        self.count(&key, false);
        if let Some(all) = self.series.get_mut(&key) {
            all.remove(&(modified_ns, path.to_path_buf()));
            if all.is_empty() {
                self.series.remove(&key);
            }
        }
        let taken = self.statements.remove(path);
        self.count(&key, true);
        taken
    }

    fn put(&mut self, path: PathBuf, statement: Statement) {
        let key = series(&path, &statement.says);
        self.count(&key, false);
        let all = self.series.entry(key.clone()).or_default();
        all.insert((statement.modified_ns, path.clone()));
        self.statements.insert(path.clone(), statement);
        // Its file is gone and it was the only other statement, so it is of no use any more.
        let other =
            all.iter().map(|(_, other)| other).find(|other| **other != path).filter(|_| all.len() == 2).cloned();
        if let Some(orphan) = other.filter(|other| self.statements.get(other).is_some_and(|other| other.orphan))
            && let Some(statement) = self.statements.remove(&orphan)
        {
            all.remove(&(statement.modified_ns, orphan));
        }
        self.count(&key, true);
    }

    /// Enters the paths of a series' newest statement, or takes them out.
    fn count(&mut self, key: &[u8], enter: bool) {
        let Some((_, path)) = self.series.get(key).and_then(BTreeSet::last) else { return };
        let Some(statement) = self.statements.get(path) else { return };
        for best in targets(path, &statement.says) {
            let by = self.best.entry(best.clone()).or_default();
            if enter {
                by.insert(path.clone())
            } else {
                by.remove(path)
            };
            if by.is_empty() {
                self.best.remove(&best);
                self.dropped.push(best);
            }
        }
    }
}

/// Statements that were taken out.
#[derive(Debug, Default)]
pub(super) struct Taken(Vec<(PathBuf, Statement)>);

/// A path at or below `from`, below `to`.
fn moved(path: &Path, from: &Path, to: &Path) -> PathBuf {
    match path.strip_prefix(from) {
        Ok(rest) if rest.as_os_str().is_empty() => to.to_path_buf(),
        Ok(rest) => to.join(rest),
        Err(_) => path.to_path_buf(),
    }
}

/// The directory in which the checkpoints lie that a file speaks of.
fn run(path: &Path) -> PathBuf {
    let checkpoint = step_pattern::group(path).unwrap_or_else(|| path.to_path_buf());
    checkpoint.parent().unwrap_or(Path::new("")).to_path_buf()
}

/// The key of a series of statements: those of a run under one name, of which the newest counts. A link is its own
/// series.
fn series(path: &Path, says: &Says) -> Vec<u8> {
    match says {
        Says::Link(_) => [b"link\0", path.as_os_str().as_bytes()].concat(),
        Says::Best(_) => {
            let name = step_pattern::pattern(Path::new(path.file_name().unwrap_or_default()));
            [b"best\0", run(path).as_os_str().as_bytes(), b"/", &name].concat()
        }
    }
}

/// The paths inside the tree that a statement at `path` may mean.
fn targets(path: &Path, says: &Says) -> BTreeSet<PathBuf> {
    let named = match says {
        Says::Link(target) => return BTreeSet::from([target.clone()]),
        Says::Best(named) => named,
    };
    let own = path.parent().unwrap_or(Path::new("")).to_path_buf();
    let beside = [run(path), own];
    let last = |name: &String| match Path::new(name).components().next_back() {
        Some(Component::Normal(last)) => Some(last.to_os_string()),
        _ => None,
    };
    let named: Vec<_> = named.iter().filter_map(last).collect();
    beside.iter().flat_map(|directory| named.iter().map(|last| directory.join(last as &OsStr))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn best(name: &str) -> Says {
        Says::Best(vec![format!("/mnt/elsewhere/{name}")])
    }

    fn paths(named: &Named) -> Vec<&str> {
        named.best.keys().filter_map(|path| path.to_str()).filter(|path| !path.contains("checkpoint-9")).collect()
    }

    fn state(step: u64) -> PathBuf {
        PathBuf::from(format!("run/checkpoint-{step}/trainer_state.json"))
    }

    #[test]
    fn the_newest_statement_of_a_run_counts() {
        let mut named = Named::default();
        named.set(&state(90), Some((best("run/checkpoint-10"), 1)));
        assert_eq!(paths(&named), ["run/checkpoint-10"]);
        named.set(&state(91), Some((best("run/checkpoint-91"), 2)));
        assert_eq!(named.by(Path::new("run/checkpoint-10/model.safetensors")), None);
        assert_eq!(named.by(Path::new("run/checkpoint-91/model.safetensors")), Some(&*state(91)));
        assert_eq!(named.by(Path::new("other/checkpoint-91/model.safetensors")), None);
        // An older statement that is read later changes nothing. One that names no file does.
        named.set(&state(92), Some((best("run/checkpoint-10"), 1)));
        assert!(named.by(Path::new("run/checkpoint-91")).is_some());
        named.set(Path::new("run/trainer_state.json"), Some((Says::Best(Vec::new()), 3)));
        assert_eq!(paths(&named), [""; 0]);
        named.set(Path::new("run/trainer_state.json"), None);
        assert!(named.by(Path::new("run/checkpoint-91")).is_some());
    }

    #[test]
    fn a_run_keeps_its_best_when_the_word_goes() {
        let mut named = Named::default();
        named.set(&state(90), Some((best("checkpoint-10"), 1)));
        named.set(&state(91), Some((best("checkpoint-20"), 2)));
        named.removed(&state(91));
        assert_eq!(paths(&named), ["run/checkpoint-10"]);
        named.removed(&state(90));
        assert_eq!(paths(&named), ["run/checkpoint-10"], "the last word stays");
        named.set(&state(92), Some((best("checkpoint-20"), 1)));
        assert_eq!(paths(&named), ["run/checkpoint-20"]);
        assert_eq!(named.statements.len(), 1);
    }

    #[test]
    fn what_is_said_goes_with_the_directory() {
        let mut named = Named::default();
        named.set(&state(90), Some((best("run/checkpoint-10"), 1)));
        named.set(Path::new("run/best.pt"), Some((Says::Link("run/step_3.pt".into()), 1)));
        let taken = named.take_below(Path::new("run"));
        assert_eq!(paths(&named), [""; 0]);
        let links = named.insert(taken, Path::new("run"), Path::new("kept/run2"));
        assert_eq!(links, [Path::new("kept/run2/best.pt")]);
        assert_eq!(paths(&named), ["kept/run2/checkpoint-10", "run/step_3.pt"]);
        named.removed(Path::new("kept/run2/best.pt"));
        assert_eq!(paths(&named), ["kept/run2/checkpoint-10"]);
    }

    #[test]
    fn files_in_one_directory_are_one_series_by_their_names() {
        let mut named = Named::default();
        let say = |named: &mut Named, name: &str, best: &str, at: i64| {
            named.set(Path::new(name), Some((Says::Best(vec![best.into()]), at)));
        };
        say(&mut named, "a/epoch=0-step=20.ckpt", "/x/epoch=0-step=20.ckpt", 1);
        say(&mut named, "a/epoch=1-step=40.ckpt", "/x/epoch=1-step=40.ckpt", 2);
        say(&mut named, "a/last.ckpt", "/x/epoch=0-step=20.ckpt", 1);
        assert_eq!(paths(&named), ["a/epoch=0-step=20.ckpt", "a/epoch=1-step=40.ckpt"]);
        say(&mut named, "a/last.ckpt", "/x/epoch=1-step=40.ckpt", 3);
        assert_eq!(paths(&named), ["a/epoch=1-step=40.ckpt"]);
        // A path outside cannot be meant.
        say(&mut named, "a/last.ckpt", "/x/..", 4);
        say(&mut named, "a/epoch=2-step=60.ckpt", "", 4);
        assert_eq!(paths(&named), [""; 0]);
    }
}
