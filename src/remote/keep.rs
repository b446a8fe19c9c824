//! Keeps files readable that programs have open while their names already show other objects.
//!
//! The owner of an object deletes it once no name has needed it for the grace. A program that reads such a file in pieces may
//! take longer. So all of its object comes here before.

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
    /// A thread brings these.
    coming: BTreeSet<Id>,
}

/// See the module.
#[derive(Clone, Default)]
pub(super) struct Keeper(Arc<Mutex<Inside>>);

impl Keeper {
    fn lock(&self) -> MutexGuard<'_, Inside> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// These objects, and no others, are such now. Half of the grace later they begin to come, each on its own thread: that
    /// may take long, and nothing else may wait for it.
    pub(super) fn keep(&self, objects: &Arc<Objects>, needed: &BTreeSet<Id>, grace: Duration) {
        let mut inside = self.lock();
        inside.since.retain(|id, _| needed.contains(id));
        for id in needed {
            let since = *inside.since.entry(*id).or_insert_with(Instant::now);
            if since.elapsed() < grace / 2 || !objects.is_elsewhere(*id) || !inside.coming.insert(*id) {
                continue;
            }
            let (keeper, objects, id) = (self.clone(), Arc::clone(objects), *id);
            let bring = move || {
                if let Err(error) = objects.bring(id) {
                    log::warn!(
                        "remote: object {id} of an open file cannot be brought before it is deleted there: {error}"
                    );
                    thread::sleep(PAUSE);
                }
                keeper.lock().coming.remove(&id);
            };
            if let Err(error) = thread::Builder::new().name("remote-keep".into()).spawn(bring) {
                log::warn!("remote: no thread can be started: {error}");
                inside.coming.remove(&id);
            }
        }
    }
}
