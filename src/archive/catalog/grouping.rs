//! The index's groups: which files of a checkpoint wait for which, and for how long.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::store::step_pattern;

use super::Entry;
use super::group::Group;
use super::index::Index;
use super::member::Member;

/// The time of groups that wait without a limit.
const NEVER: i64 = i64::MAX;

impl Index {
    /// Puts a group where it belongs.
    pub(super) fn refresh(&mut self, key: &Arc<step_pattern::Group>) {
        let Some(group) = self.groups.get_mut(key) else { return };
        group.is_fullest = key.steps.is_none() && self.fullest.has(&key.directory);
        if let Some(head) = group.head.take() {
            self.heads.remove(&head);
        }
        match group.timer.take() {
            Some(due) => {
                self.timers.remove(&(due, Arc::clone(key)));
                self.settling -= group.counted;
            }
            None => self.open -= group.counted,
        }
        group.counted = group.ready.queued;
        if group.members == 0 {
            self.groups.remove(key);
        } else if group.is_open() {
            self.open += group.counted;
            let archive = group.ready.archives.first().map(|rank| (2, rank.clone()));
            group.head = archive.or_else(|| group.ready.next_release().map(|rank| (1, rank.clone())));
            self.heads.extend(group.head.clone());
        } else if group.counted > 0 {
            let settles = group.newest().saturating_add(self.settle_ns);
            let due = if group.waits_without_limit() { NEVER } else { settles };
            self.settling += group.counted;
            group.timer = Some(due);
            self.timers.insert((due, Arc::clone(key)));
        }
    }

    /// A file of a checkpoint directory became durable, or is so no longer.
    pub(super) fn count_file(&mut self, path: &Path, came: bool) {
        if self.settle_ns == 0 || step_pattern::is_temporary(path) {
            return;
        }
        let Some(directory) = step_pattern::group(path) else { return };
        for directory in self.fullest.count(&directory, came) {
            self.refresh(&Arc::new(step_pattern::Group { directory, steps: None, name: None }));
        }
    }

    /// Opens groups whose time has passed.
    pub(super) fn expire(&mut self, wall_ns: i64) {
        let passed = |due: i64| due <= wall_ns && due < NEVER;
        while let Some((_, key)) = self.timers.first().filter(|(due, _)| passed(*due)).cloned() {
            if let Some(group) = self.groups.get_mut(&key) {
                group.settled = group.newest();
            }
            self.refresh(&key);
        }
    }

    /// Opens a group in its present state: a user wants its files released.
    pub(super) fn hasten(&mut self, key: &Arc<step_pattern::Group>) {
        if let Some(group) = self.groups.get_mut(key) {
            group.asked = group.newest();
            self.refresh(key);
        }
    }

    /// When the next group is not waited for any longer; nanoseconds since 1970.
    pub(super) fn settles(&self) -> Option<i64> {
        self.timers.first().map(|(due, _)| *due).filter(|due| *due < NEVER)
    }

    /// The next file of an open group that can be released, if all that can be are archived.
    pub(super) fn next_release(&self, key: &step_pattern::Group) -> Option<PathBuf> {
        let group = self.groups.get(key).filter(|group| group.is_open())?;
        self.path(group.ready.next_release()?)
    }

    /// The group of an entry.
    pub(super) fn group(&self, entry: &Entry) -> Option<&Arc<step_pattern::Group>> {
        self.members.get(&entry.sequence)?.group.as_ref()
    }

    /// Whether nothing in the file's group holds it back.
    pub(super) fn is_open(&self, entry: &Entry) -> bool {
        self.members.get(&entry.sequence).is_none_or(|member| self.is_free(member))
    }

    /// The file without a newer state for whose sake the file's group waits.
    pub(super) fn held_up_by(&self, entry: &Entry) -> Option<&PathBuf> {
        let group = self.closed_group(entry)?;
        self.members.get(&group.held_up_by()?).map(|member| &member.path)
    }

    /// Whether the file waits for a newer checkpoint with as many files, and for no file without a limit.
    pub(super) fn is_of_fullest(&self, entry: &Entry) -> bool {
        self.closed_group(entry).is_some_and(|group| group.is_fullest && group.essential.is_empty())
    }

    /// When the group or a newer state of it was last modified, if the file waits for another.
    pub(super) fn held_up_since(&self, entry: &Entry) -> Option<i64> {
        self.closed_group(entry).map(Group::newest)
    }

    fn closed_group(&self, entry: &Entry) -> Option<&Group> {
        self.groups.get(self.group(entry)?).filter(|group| !group.is_open())
    }

    pub(super) fn is_free(&self, member: &Member) -> bool {
        member.group.as_ref().and_then(|key| self.groups.get(key)).is_none_or(Group::is_open)
    }
}

/// The group of this key, made if there is none.
pub(super) fn group_of<'a>(
    groups: &'a mut HashMap<Arc<step_pattern::Group>, Group>,
    key: &Arc<step_pattern::Group>,
) -> &'a mut Group {
    groups.entry(Arc::clone(key)).or_insert_with(|| Group::new(key.steps.is_none()))
}
