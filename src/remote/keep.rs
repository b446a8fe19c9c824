//! Keeps a file readable that a program has open while its name on the remote already shows another object.
//!
//! The owner of an object deletes it once no name has needed it for the grace. A program that reads such a file in
//! pieces may take longer. So all of its object comes here before.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::store::{Id, Objects};

/// An object that cannot be brought is tried again after this time.
const PAUSE: Duration = Duration::from_secs(30);

/// Objects that open files need, and no name.
#[derive(Default)]
struct Inside {
    since: BTreeMap<Id, Instant>,
    /// A thread brings objects.
    is_bringing: bool,
}

/// See the module.
#[derive(Clone, Default)]
pub(super) struct Keeper(Arc<Mutex<Inside>>);

/// Notes that the thread has ended, by a fault of stepfs too.
struct Ends(Keeper);

impl Drop for Ends {
    fn drop(&mut self) {
        self.0.lock().is_bringing = false;
    }
}

impl Keeper {
    fn lock(&self) -> MutexGuard<'_, Inside> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// These objects, and no others, are such now. Half of the grace later they come, one after the other, on a thread of
    /// their own: that may take long, and nothing else may wait for it.
    pub(super) fn keep(&self, objects: &Arc<Objects>, needed: &BTreeSet<Id>, grace: Duration) {
        let mut inside = self.lock();
        inside.since.retain(|id, _| needed.contains(id));
        let is_due = |id: &&Id, since: Instant| since.elapsed() >= grace / 2 && objects.is_elsewhere(**id);
        let mut due = Vec::new();
        for id in needed {
            let since = *inside.since.entry(*id).or_insert_with(Instant::now);
            due.extend(Some(id).filter(|id| is_due(id, since)).copied());
        }
        if due.is_empty() || std::mem::replace(&mut inside.is_bringing, true) {
            return;
        }
        let (keeper, objects) = (self.clone(), Arc::clone(objects));
        let bring = move || {
            let _ends = Ends(keeper);
            let failed = due.iter().filter_map(|id| Some((id, objects.bring(*id).err()?)));
            let failed = failed
                .inspect(|(id, error)| log::warn!("remote: object {id} of an open file cannot be brought: {error}"));
            if failed.count() > 0 {
                thread::sleep(PAUSE);
            }
        };
        if let Err(error) = thread::Builder::new().name("remote-keep".into()).spawn(bring) {
            log::warn!("remote: no thread can be started: {error}");
            inside.is_bringing = false;
        }
    }
}
