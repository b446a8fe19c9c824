//! Keeps a series in a store: through the archive, as under a mount, and decoded again from the device.
//!
//! The newest file of a lineage is never archived. So a copy of an older one goes behind the series. To the archive
//! it is a state like any other, with an update as large as the last one.

use std::collections::{BTreeMap, HashSet};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Error, Result, anyhow};

use crate::archive::{Archive, AtRest};
use crate::clock;
use crate::recall::{Chain, Layout, ReadError, stream};
use crate::store::durable::scratch;
use crate::store::object::{Object, path_of};
use crate::store::{Objects, Profile, STUB_BYTES, Store, Stub, step_pattern};
use crate::tools::of_file;
use crate::tools::series::{Series, State};
use crate::tools::values::Size;
use formats::ReadAt;

use super::Steps;
use super::report::{Measured, RoleKept, SKELETON};

/// How often the queue is polled.
const INTERVAL: Duration = Duration::from_millis(20);
/// A failed removal of data may pass at any moment, but the caller should not wait for ever.
const PATIENCE: Duration = Duration::from_secs(5);
/// The first file's time, as far as the store knows, and the time between two: whole minutes, long ago, so that no
/// step waits for a later file.
const FIRST: Duration = Duration::from_secs(1_700_000_000);
const BETWEEN: Duration = Duration::from_secs(60);

/// Puts the series into a new store below `dir`, archives all of it, and measures the result.
pub(super) fn measure(series: &Series, profile: Profile, dir: &Path, steps: &Steps) -> Result<Measured> {
    let failed = |why: String| anyhow!("{}: {why}", profile.name());
    let open = || -> Result<Store, crate::store::Error> {
        let mut store = Store::open(&dir.join("store"))?;
        store.set_default_profile(profile)?;
        Ok(store)
    };
    let store = open().map_err(|error| failed(error.to_string()))?;
    let (root, tree) = (store.root().to_path_buf(), store.tree());
    let names: Vec<PathBuf> = steps_of(series).into_iter().map(|step| tree.join(format!("step_{step:06}"))).collect();
    for (at, (state, name)) in series.states.iter().chain(follower(series)?).zip(&names).enumerate() {
        steps.check()?;
        put(state, name, at as u32)?;
    }
    let spent = archive(store, series, steps, &failed)?;
    let store = Store::look(&root).map_err(|error| failed(error.to_string()))?;
    let objects = Objects::load(&store.objects(), |id, error| log::error!("object {id}: {error}"));
    let objects = objects.map_err(of_file(&root))?;
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build();
    let pool = pool.map_err(|error| failed(error.to_string()))?;
    let decoded = tempfile::tempfile_in(dir).map_err(of_file(dir))?;
    let mut measured = Measured::default();
    measured.encode = spent;
    let mut counted = HashSet::new();
    for (at, (state, name)) in series.states.iter().zip(&names).enumerate() {
        steps.check()?;
        let file = File::open(name).map_err(of_file(name))?;
        match Stub::read(&file, store.id()).map_err(of_file(name))? {
            Some(stub) => {
                let chain = Chain::open(&objects, stub.object).map_err(|error| failed(error.to_string()))?;
                // Two files with the same bytes are one object.
                let is_first = counted.insert(stub.object);
                let len = fs::metadata(path_of(&store.objects(), stub.object)).map_err(of_file(&root))?.len();
                let bytes = weigh(chain.leaf(), if is_first { len } else { 0 }, &mut measured.roles);
                let spent = pool.install(|| decode(&chain, &decoded)).map_err(|error| failed(error.to_string()))?;
                measured.decode += spent;
                measured.add(bytes, series.errors(state, &decoded)?, chain.objects().len() as u64);
            }
            None => {
                whole(state, &mut measured.roles);
                measured.add(state.len, Size::default(), 0);
            }
        }
        steps.at((series.len() + at + 1) as u64);
    }
    Ok(measured)
}

/// A step for each file, and for the one behind them. As in their names, where these count iterations: the archive follows
/// the distance.
fn steps_of(series: &Series) -> Vec<u64> {
    let pairs = series.states.windows(2);
    let apart: Option<Vec<f64>> = pairs.map(|pair| step_pattern::iterations(&pair[0].path, &pair[1].path)).collect();
    let apart = apart.filter(|apart| !apart.is_empty()).unwrap_or_else(|| vec![1.0; series.states.len().max(2) - 1]);
    let (mut steps, mut step) = (vec![0], 0);
    for apart in apart.iter().chain(apart.last()) {
        step += *apart as u64;
        steps.push(step);
    }
    steps
}

/// The newest of the older files whose bytes differ from the newest file's.
fn follower(series: &Series) -> Result<Option<&State>> {
    let Some((newest, older)) = series.states.split_last() else { return Ok(None) };
    for state in older.iter().rev() {
        if !same(state, newest)? {
            return Ok(Some(state));
        }
    }
    Ok(None)
}

/// Whether two files have the same bytes.
fn same(a: &State, b: &State) -> Result<bool> {
    if a.len != b.len {
        return Ok(false);
    }
    let (mut left, mut right) = (vec![0; 1 << 20], vec![0; 1 << 20]);
    for at in (0..a.len).step_by(left.len()) {
        let count = left.len().min((a.len - at) as usize);
        a.file.read_exact_at(&mut left[..count], at).map_err(of_file(&a.path))?;
        b.file.read_exact_at(&mut right[..count], at).map_err(of_file(&b.path))?;
        if left[..count] != right[..count] {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Copies a file to its place in the tree; each is a minute newer than the one before.
fn put(state: &State, name: &Path, at: u32) -> Result<()> {
    let copy = || -> io::Result<()> {
        let to = scratch::create_new(name)?;
        // Shares blocks where the file system can.
        let copied = io::copy(&mut io::Read::take(File::open(&state.path)?, state.len), &mut &to)?;
        if copied != state.len {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it became shorter while it was compared"));
        }
        to.set_modified(SystemTime::UNIX_EPOCH + FIRST + BETWEEN * at)
    };
    copy().map_err(of_file(&state.path))
}

/// Lets the archive do all it can, and answers the processor time of all its threads.
fn archive(store: Store, series: &Series, steps: &Steps, failed: &impl Fn(String) -> Error) -> Result<Duration> {
    let at_rest = AtRest::of(&store);
    let archive = Archive::open(store).map_err(|error| failed(error.to_string()))?;
    // The copy behind the series is an older state, and counts as one.
    archive.trust_in_one_run();
    let start = clock::of_process();
    archive.start(Arc::new(at_rest));
    let done = wait(&archive, series, steps, failed);
    archive.stop();
    let spent = clock::of_process().saturating_sub(start);
    done.map(|()| spent)
}

fn wait(archive: &Archive, series: &Series, steps: &Steps, failed: &impl Fn(String) -> Error) -> Result<()> {
    let mut stalled: Option<Instant> = None;
    loop {
        steps.check()?;
        let queue = archive.queue();
        if queue.queued == 0 {
            return if queue.failed.is_empty() { Ok(()) } else { Err(failed(queue.failed.join("; "))) };
        }
        match queue.stalled {
            Some(why) if stalled.get_or_insert_with(Instant::now).elapsed() > PATIENCE => return Err(failed(why)),
            Some(_) => {}
            None => stalled = None,
        }
        steps.at((series.len() as u64).saturating_sub(queue.queued));
        std::thread::sleep(INTERVAL);
    }
}

/// Adds an object's tensors to the roles, and returns the size of the object and its stub. `len` 0: it was counted
/// already, and takes no more room.
fn weigh(object: &Object, len: u64, roles: &mut BTreeMap<&'static str, RoleKept>) -> u64 {
    let (mut raw, mut kept) = (0, 0);
    for tensor in &object.index().tensors {
        let bytes = tensor.extent.end - tensor.extent.start;
        let stored = tensor.stored().min(len);
        roles.entry(tensor.role.name()).or_default().add(stored, bytes, bytes / tensor.dtype.size() as u64);
        (raw, kept) = (raw + bytes, kept + stored);
    }
    let bytes = len + STUB_BYTES as u64;
    roles.entry(SKELETON).or_default().add(bytes - kept, object.header().logical_len - raw, 0);
    bytes
}

/// Adds a file that stays as it was written.
fn whole(state: &State, roles: &mut BTreeMap<&'static str, RoleKept>) {
    let mut tensors = 0;
    for tensor in &state.description.tensors {
        let len = tensor.extent.end - tensor.extent.start;
        roles.entry(tensor.role.name()).or_default().add(len, len, len / tensor.dtype.size() as u64);
        tensors += len;
    }
    roles.entry(SKELETON).or_default().add(state.len - tensors, state.len - tensors, 0);
}

/// Decodes a file with its whole chain into `to`, rows in the order of their ids, and returns this thread's time for
/// it.
fn decode(chain: &Chain, to: &File) -> Result<Duration, ReadError> {
    let id = chain.leaf().header().id;
    to.set_len(0).map_err(|error| ReadError::object(id, error))?;
    let (start, mut writing) = (clock::of_thread(), Duration::ZERO);
    stream(chain, &Layout::of(chain.leaf()), |offset, _, bytes| {
        clock::timed(&mut writing, || scratch::write_all_at(to, bytes, offset))
            .map_err(|error| ReadError::object(id, error))
    })?;
    Ok(clock::of_thread().saturating_sub(start).saturating_sub(writing))
}
