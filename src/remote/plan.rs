//! Decides what to push and what to show, from the tree and the view alone (pure).

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;

use super::journal::{Content, Shown};
use super::local::{Found, Listing, Shape};
use super::view::{Stamp, View};
use crate::store::{Id, MIN_RELEASE_BYTES, Newest};

/// The bytes of a name to be pushed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Want {
    /// The journal takes them: a small file or a link.
    Inline,
    /// They are on the remote already.
    There(Content),
    /// An object of the archive.
    Object(Id),
    /// An object that the archive makes ahead.
    Ahead,
    /// All bytes, as an object that is made for it.
    Whole,
    /// They cannot be had; the pusher says so.
    Stuck,
}

/// The pushes and the changes to show that a round needs.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Plan {
    /// Names to push, the newest first.
    pub(super) puts: Vec<(PathBuf, Want)>,
    /// Names that a user of this tree removed.
    pub(super) removals: Vec<PathBuf>,
    /// Names to show here.
    pub(super) takes: Vec<(PathBuf, Stamp)>,
    /// Names that another node removed, each with the last change that is known.
    pub(super) drops: Vec<(PathBuf, Stamp)>,
    /// Names that are neither here nor on the remote.
    pub(super) forgets: Vec<PathBuf>,
    /// What the tree shows of the remote now.
    pub(super) agrees: BTreeMap<PathBuf, Stamp>,
}

/// Compares the tree of node `me` with the view. `shown` is what the tree showed before its files were listed: a name of
/// it that is missing now was removed here.
pub(super) fn plan(me: &str, view: &View, listing: &Listing, shown: &BTreeMap<PathBuf, Stamp>, newest: Newest) -> Plan {
    let (files, mut plan) = (&listing.files, Plan::default());
    let known = Known::of(me, view);
    for (path, stamp, now) in view.all() {
        if files.contains_key(path) || listing.hides(path) {
            continue;
        }
        match now {
            Some(_) if shown.get(path) == Some(&stamp) => plan.removals.push(path.clone()),
            Some(now) if is_whole(view, now) => plan.takes.push((path.clone(), stamp)),
            _ => {}
        }
    }
    for (path, file) in files {
        let winner = view.winner(path);
        let own = view.of_node(path, me).and_then(|change| Some((change.time, change.shown.as_ref()?)));
        let is_own = own.is_some_and(|(_, record)| is_same_file(file, record));
        match &winner {
            // It shows the change that counts.
            Some((stamp, Some(_))) if file.foreign.as_ref() == Some(stamp) && !file.is_access_changed => {
                plan.agrees.insert(path.clone(), stamp.clone());
                continue;
            }
            // A program has changed its mode or owner since, which leaves the mark as it is: that travels.
            Some((stamp, Some(_))) if file.foreign.as_ref() == Some(stamp) => {}
            // Nobody removed it: its node's journal cannot be read at the moment. A node that this remote never had is not
            // waited for: the file came from another remote.
            None if file.foreign.as_ref().is_some_and(|stamp| match view.nodes().get(&stamp.node) {
                Some(node) => node.broken.is_some(),
                None => shown.contains_key(path) || !view.is_read(),
            }) =>
            {
                continue;
            }
            // Its node removed it, and forgot that with its last snapshot.
            None if shows_another(me, file, shown.get(path)) => {
                let had = shown.get(path).filter(|stamp| {
                    is_all_read(view) && view.nodes().get(&stamp.node).is_some_and(|of| !of.read.is_empty())
                });
                plan.drops.extend(had.map(|stamp| (path.clone(), stamp.clone())));
                continue;
            }
            Some((stamp, Some(now))) if file.link.is_some() && is_same_file(file, now) => {
                plan.agrees.insert(path.clone(), stamp.clone());
                continue;
            }
            // Somebody has written: what is there then is the later change.
            Some((stamp, _)) if stamp.node != me && file.shape == Shape::Unsettled && file.foreign.is_none() => {
                continue;
            }
            // A link has no mark: a change that was never shown here is news.
            Some((stamp, now))
                if stamp.node != me && file.link.is_some() && shown.get(path).is_some_and(|had| had < stamp) =>
            {
                match now {
                    Some(_) => plan.takes.push((path.clone(), stamp.clone())),
                    None => plan.drops.push((path.clone(), stamp.clone())),
                }
                continue;
            }
            // Another node's later change counts, and nobody wrote here since the change that this file shows.
            Some((stamp, now)) if stamp.node != me && (file.foreign.is_some() || is_own) => {
                match now {
                    Some(now) if is_whole(view, now) => plan.takes.push((path.clone(), stamp.clone())),
                    Some(_) => {}
                    None => plan.drops.push((path.clone(), stamp.clone())),
                }
                continue;
            }
            _ => {}
        }
        let counts = winner.as_ref().filter(|(stamp, now)| stamp.node == me && now.is_some());
        let pushed = counts.and_then(|(stamp, now)| Some((stamp, (*now)?)));
        match want(me, view, file, pushed.map(|(_, record)| record), &known, newest) {
            Some(want) => plan.puts.push((path.clone(), want)),
            None => plan.agrees.extend(pushed.map(|(stamp, _)| (path.clone(), stamp.clone()))),
        }
    }
    let is_here = |path: &PathBuf| files.contains_key(path) || listing.hides(path);
    let is_nowhere = |path: &&PathBuf| !is_here(path) && view.winner(path).is_none();
    if is_all_read(view) {
        plan.forgets = shown.keys().filter(is_nowhere).cloned().collect();
    }
    let modified = |path: &PathBuf| files.get(path).map_or(0, |file| file.modified_ns);
    plan.puts.sort_by_key(|(path, _)| std::cmp::Reverse(modified(path)));
    plan
}

/// Whole files that this node pushed, by the file they were made from: a rename pushes nothing again.
struct Known(HashMap<(u64, i64, u64), Content>);

impl Known {
    fn of(me: &str, view: &View) -> Known {
        let own = view.files().filter(|(_, stamp, _)| stamp.node == me);
        // Of two names of one file, the exact one is known.
        let (lossy, exact): (Vec<_>, Vec<_>) = own.partition(|(_, _, record)| is_lossy(view, &record.content));
        let all = lossy.into_iter().chain(exact);
        Known(
            all.map(|(_, _, record)| ((record.identity, record.modified_ns, record.len), record.content.clone()))
                .collect(),
        )
    }
}

/// What to push of a file; `None` if nothing.
fn want(me: &str, view: &View, file: &Found, pushed: Option<&Shown>, known: &Known, newest: Newest) -> Option<Want> {
    let same_attributes = |record: &Shown| (record.mode, record.uid, record.gid) == (file.mode, file.uid, file.gid);
    if let Some(target) = &file.link {
        let is_pushed = pushed.is_some_and(|record| record.content == Content::Link(target.clone()));
        return (!is_pushed).then_some(Want::Inline);
    }
    match file.shape {
        Shape::Unsettled => None,
        Shape::Stuck => (!pushed.is_some_and(|record| is_same_file(file, record))).then_some(Want::Stuck),
        Shape::Object(id) => {
            let has = |record: &&Shown| matches!(&record.content, Content::Object { id: of, .. } if *of == id);
            let same = |record: &Shown| same_attributes(record) && record.modified_ns == file.modified_ns;
            // If an object has gone there, the name shows nothing to others.
            if pushed.filter(has).filter(|record| is_whole(view, record)).is_some_and(same) {
                return None;
            }
            // A renamed copy of another node's name, or new attributes of an object that is there.
            let owner = if view.chain(me, id).is_some() { Some(me) } else { view.owner_of(id) };
            let there = owner.filter(|owner| *owner == me || file.came);
            Some(there.map_or(Want::Object(id), |owner| Want::There(Content::Object { owner: owner.into(), id })))
        }
        Shape::Newest if newest == Newest::None && file.len >= MIN_RELEASE_BYTES => None,
        Shape::Newest | Shape::Whole | Shape::Awaited => {
            let is_ahead = newest == Newest::Quantized && file.shape == Shape::Newest;
            // An object that was made ahead is too coarse once the file is to stay exact, or once it was rejected.
            let is_fine = |content: &Content| is_ahead || !is_lossy(view, content);
            let pushed = pushed.filter(|record| is_fine(&record.content));
            if pushed.is_some_and(|record| is_same_file(file, record) && same_attributes(record)) {
                return None;
            }
            if file.len < MIN_RELEASE_BYTES {
                return Some(Want::Inline);
            }
            let there = known.0.get(&(file.identity, file.modified_ns, file.len));
            let there = there.filter(|content| matches!(content, Content::Object { .. }) && is_fine(content)).cloned();
            Some(there.map_or(if is_ahead { Want::Ahead } else { Want::Whole }, Want::There))
        }
    }
}

/// True if a record of this node was made from this very file. Content cannot change without its time.
fn is_same_file(file: &Found, record: &Shown) -> bool {
    if let (Some(target), Content::Link(of)) = (&file.link, &record.content) {
        return target == of;
    }
    // A release makes another file of it, but not the state that the file is.
    let same_bytes = record.identity == file.identity || matches!(file.shape, Shape::Object(_));
    same_bytes && (record.modified_ns, record.len) == (file.modified_ns, file.len) && file.link.is_none()
}

/// True if a file is what `had` says that another node's name showed, and nobody wrote to it or renamed it here. A link
/// has no mark, so it may be a new one.
fn shows_another(me: &str, file: &Found, had: Option<&Stamp>) -> bool {
    had.is_some_and(|had| had.node != me && file.foreign.as_ref() == Some(had))
}

/// True if all journals were read, and no part of any is missing: what the view has not, the remote has not.
fn is_all_read(view: &View) -> bool {
    view.is_read() && view.nodes().values().all(|node| node.broken.is_none())
}

/// True if a content is an object that decodes to other bytes than its file had.
fn is_lossy(view: &View, content: &Content) -> bool {
    let Content::Object { owner, id } = content else { return false };
    view.nodes().get(owner).and_then(|node| node.objects.get(id)).is_some_and(|encoding| encoding.lossy)
}

/// True if all objects of a name are known to be on the remote.
fn is_whole(view: &View, shown: &Shown) -> bool {
    match &shown.content {
        Content::Inline(_) | Content::Link(_) => true,
        Content::Object { owner, id } => view.chain(owner, *id).is_some(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::journal::{Encoding, Kind, Record, Segment};
    use super::*;

    /// Objects from this number on are lossy.
    const LOSSY: u8 = 100;

    fn file(shape: Shape) -> Found {
        let (mode, uid, gid, len) = (0o644, 0, 0, 100_000);
        Found {
            shape,
            inode: 5,
            identity: 5,
            len,
            mode,
            uid,
            gid,
            modified_ns: 50,
            link: None,
            foreign: None,
            came: false,
            is_access_changed: false,
        }
    }

    fn record(file: &Found, content: Content) -> Shown {
        let Found { mode, uid, gid, len, modified_ns, identity, .. } = *file;
        Shown { mode, uid, gid, len, modified_ns, identity, content }
    }

    fn object(owner: &str, id: u8) -> Content {
        Content::Object { owner: owner.into(), id: Id([id; 16]) }
    }

    fn put(view: &mut View, node: &str, time: u64, path: &str, shown: Option<Shown>) {
        let path = PathBuf::from(path);
        let mut records = Vec::new();
        if let Some(Content::Object { id, .. }) = shown.as_ref().map(|shown| &shown.content) {
            records.push(Record::Object(Encoding { id: *id, parent: None, hash: 0, len: 1, lossy: id.0[0] >= LOSSY }));
        }
        records.push(match shown {
            Some(shown) => Record::Put { time, path, shown },
            None => Record::Removed { time, path },
        });
        let segment =
            Segment { kind: Kind::Changes, store: Id([1; 16]), node: node.into(), epoch: 1, sequence: time, records };
        view.apply(&segment);
    }

    fn decide(view: &View, files: &[(&str, Found)], shown: &[(&str, u64, &str)]) -> Plan {
        let files = files.iter().map(|(path, file)| (PathBuf::from(path), file.clone())).collect();
        let listing = Listing { files, ..Listing::default() };
        let stamp = |time: u64, node: &str| Stamp { time, node: node.into() };
        let shown = shown.iter().map(|(path, time, node)| (PathBuf::from(path), stamp(*time, node))).collect();
        plan("me", view, &listing, &shown, Newest::Exact)
    }

    #[test]
    fn a_new_file_is_pushed_once() {
        let mut view = View::default();
        let new = file(Shape::Newest);
        assert_eq!(decide(&view, &[("x", new.clone())], &[]).puts, [("x".into(), Want::Whole)]);
        put(&mut view, "me", 1, "x", Some(record(&new, object("me", 1))));
        let done = decide(&view, &[("x", new.clone())], &[]);
        assert!(done.puts.is_empty() && done.agrees.len() == 1);
        // Released: another file, and an object of the archive.
        let released = Found { identity: 9, ..file(Shape::Object(Id([2; 16]))) };
        assert_eq!(decide(&view, &[("x", released.clone())], &[]).puts, [("x".into(), Want::Object(Id([2; 16])))]);
        put(&mut view, "me", 2, "x", Some(record(&released, object("me", 2))));
        assert!(decide(&view, &[("x", released)], &[]).puts.is_empty());
        // Renamed: its bytes are there.
        let renamed = decide(&view, &[("y", Found { identity: 9, ..new })], &[("x", 2, "me")]);
        assert!(matches!(&renamed.puts[..], [(_, Want::There(_))]), "{renamed:?}");
        assert_eq!(renamed.removals, [PathBuf::from("x")]);
    }

    #[test]
    fn a_lossy_object_does_not_do_for_a_file_that_stays_exact() {
        let mut view = View::default();
        let newest = file(Shape::Newest);
        put(&mut view, "me", 1, "x", Some(record(&newest, object("me", LOSSY))));
        let wants = |view: &View, path: &str, shape, newest| {
            let files = BTreeMap::from([(PathBuf::from(path), file(shape))]);
            let listing = Listing { files, ..Listing::default() };
            plan("me", view, &listing, &BTreeMap::new(), newest)
                .puts
                .into_iter()
                .map(|(_, want)| want)
                .collect::<Vec<_>>()
        };
        assert_eq!(wants(&view, "x", Shape::Newest, Newest::Quantized), []);
        // It was rejected, is named best or pinned, or its closer waits; or the settings ask for exact bytes now.
        for shape in [Shape::Whole, Shape::Awaited] {
            assert_eq!(wants(&view, "x", shape, Newest::Quantized), [Want::Whole], "{shape:?}");
            assert_eq!(wants(&view, "renamed", shape, Newest::Quantized), [Want::Whole], "{shape:?}");
        }
        assert_eq!(wants(&view, "x", Shape::Newest, Newest::Exact), [Want::Whole]);
        assert!(matches!(wants(&view, "renamed", Shape::Newest, Newest::Quantized)[..], [Want::There(_)]));
        // Once its bytes are there, nothing travels again.
        put(&mut view, "me", 2, "x", Some(record(&newest, object("me", 1))));
        assert_eq!(wants(&view, "x", Shape::Whole, Newest::Quantized), []);
    }

    #[test]
    fn what_a_directory_hides_is_neither_removed_nor_shown() {
        let mut view = View::default();
        put(&mut view, "me", 1, "a/x", Some(record(&file(Shape::Whole), object("me", 1))));
        put(&mut view, "b", 2, "a/b/y", Some(record(&file(Shape::Whole), object("b", 2))));
        let stamp = |time, node: &str| Stamp { time, node: node.into() };
        let shown = BTreeMap::from([("a/x".into(), stamp(1, "me")), ("a/z".into(), stamp(9, "b"))]);
        let unlisted = BTreeMap::from([("a".into(), "Permission denied".into())]);
        let hidden = plan("me", &view, &Listing { unlisted, ..Listing::default() }, &shown, Newest::Exact);
        assert_eq!(hidden, Plan::default());
        let empty = plan("me", &view, &Listing::default(), &shown, Newest::Exact);
        assert_eq!(empty.removals, [PathBuf::from("a/x")]);
        assert_eq!(empty.takes, [("a/b/y".into(), stamp(2, "b"))]);
    }

    #[test]
    fn another_file_with_the_inode_number_of_a_removed_one_is_pushed() {
        let mut view = View::default();
        let removed = file(Shape::Whole);
        put(&mut view, "me", 1, "rank0.pt", Some(record(&removed, object("me", 1))));
        let other = Found { identity: 6, ..removed };
        for path in ["rank0.pt", "rank1.pt"] {
            assert_eq!(decide(&view, &[(path, other.clone())], &[]).puts, [(path.into(), Want::Whole)]);
        }
    }

    #[test]
    fn what_may_still_change_is_left_alone() {
        let mut view = View::default();
        let open = file(Shape::Unsettled);
        put(&mut view, "me", 1, "x", Some(record(&file(Shape::Newest), object("me", 1))));
        let plan = decide(&view, &[("x", Found { modified_ns: 99, ..open }), ("y", file(Shape::Unsettled))], &[]);
        assert_eq!((plan.puts.len(), plan.removals.len(), plan.takes.len(), plan.drops.len()), (0, 0, 0, 0));
    }

    #[test]
    fn only_a_name_that_was_shown_here_is_removed_everywhere() {
        let mut view = View::default();
        put(&mut view, "other", 3, "x", Some(record(&file(Shape::Newest), object("other", 1))));
        put(&mut view, "me", 4, "mine", Some(record(&file(Shape::Newest), object("me", 1))));
        // A store that lost its tree, or is new, shows them; it removes nothing.
        let fresh = decide(&view, &[], &[]);
        assert_eq!((fresh.takes.len(), fresh.removals.len()), (2, 0));
        // An older state of the name was shown: the newer one was never removed.
        assert_eq!(decide(&view, &[], &[("x", 2, "other")]).removals.len(), 0);
        let removed = decide(&view, &[], &[("x", 3, "other"), ("mine", 4, "me")]);
        assert_eq!((removed.takes.len(), removed.removals.len()), (0, 2));
    }

    #[test]
    fn a_name_without_its_object_is_not_shown() {
        let mut view = View::default();
        let gone = record(&file(Shape::Newest), object("nobody", 7));
        put(&mut view, "other", 3, "x", Some(gone));
        assert_eq!(decide(&view, &[], &[]), Plan::default());
    }

    #[test]
    fn a_removal_that_a_snapshot_forgot_is_one() {
        let mut view = View::default();
        let stamp = |time, node: &str| Some(Stamp { time, node: node.into() });
        put(&mut view, "other", 3, "y", Some(record(&file(Shape::Newest), object("other", 1))));
        let copy = Found { foreign: stamp(3, "other"), came: true, ..file(Shape::Object(Id([1; 16]))) };
        let (had, files) = ([("x", 3, "other")], [("x", copy.clone())]);
        // Not all journals are read yet.
        let early = decide(&view, &files, &had);
        assert!(early.drops.is_empty() && early.puts.is_empty(), "{early:?}");
        view.set_read();
        let late = decide(&view, &files, &had);
        assert_eq!(decide(&view, &[], &had).forgets, [PathBuf::from("x")]);
        assert!(decide(&view, &files, &had).forgets.is_empty());
        assert_eq!((late.drops, late.puts), (vec![("x".into(), stamp(3, "other").unwrap())], Vec::new()));
        // A program renamed it here: that is a change of this node.
        let renamed = decide(&view, &[("x", copy.clone())], &[]);
        assert!(renamed.drops.is_empty() && renamed.puts.len() == 1, "{renamed:?}");
        // Or wrote to it.
        let written = Found { foreign: None, came: false, ..copy.clone() };
        assert_eq!(decide(&view, &[("x", written)], &had).drops, []);
        // Some part of a journal may say more of the name.
        view.node_mut("third").broken = Some("damaged".into());
        assert!(decide(&view, &[("x", copy)], &had).drops.is_empty());
    }

    #[test]
    fn the_later_change_counts_unless_somebody_wrote_here_since() {
        let mut view = View::default();
        let stamp = |time, node: &str| Some(Stamp { time, node: node.into() });
        put(&mut view, "other", 3, "x", Some(record(&file(Shape::Newest), object("other", 1))));
        let copy = Found { foreign: stamp(3, "other"), came: true, ..file(Shape::Object(Id([1; 16]))) };
        assert_eq!(decide(&view, &[("x", copy.clone())], &[]).agrees.len(), 1);
        put(&mut view, "third", 5, "x", Some(record(&file(Shape::Newest), object("third", 2))));
        assert_eq!(decide(&view, &[("x", copy.clone())], &[]).takes, [("x".into(), stamp(5, "third").unwrap())]);
        let written = Found { foreign: None, came: false, modified_ns: 60, ..file(Shape::Newest) };
        assert_eq!(decide(&view, &[("x", written.clone())], &[]).puts, [("x".into(), Want::Whole)]);
        put(&mut view, "third", 6, "x", None);
        assert_eq!(decide(&view, &[("x", copy)], &[]).drops, [("x".into(), stamp(6, "third").unwrap())]);
        assert_eq!(decide(&view, &[("x", written.clone())], &[]).puts, [("x".into(), Want::Whole)]);
        // This node's own removal never takes a file away that is there again.
        put(&mut view, "me", 7, "x", None);
        let back = Found { foreign: stamp(3, "other"), came: true, ..file(Shape::Object(Id([1; 16]))) };
        let plan = decide(&view, &[("x", back)], &[]);
        assert!(plan.drops.is_empty() && matches!(&plan.puts[..], [(_, Want::There(_))]), "{plan:?}");
    }
}
