//! A store at rest, driven by operations, against a model: written bytes come back, and once read after a release they
//! stay.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use safetensors::Dtype;
use safetensors::tensor::{TensorView, serialize};
use stepfs::archive::{Archive, AtRest, ReadError};
use stepfs::recall::{Chain, Layout, stream};
use stepfs::store::{Objects, Store, Stub};

use super::input::Input;

/// Elements of the one weight, and of the padding up to the least size that is released.
const WEIGHTS: usize = 600;
const PADDING: usize = 66_000;

/// A file of the model.
#[derive(Clone)]
struct Known {
    written: Vec<u8>,
    /// The bytes read since it was released.
    read: Option<Vec<u8>>,
}

struct Model {
    dir: tempfile::TempDir,
    files: BTreeMap<String, Known>,
    weights: [Vec<f32>; 2],
    clock: u64,
}

/// A limited number of operations. Few of them run the archive, because each run opens the store.
pub(crate) fn operations(data: &[u8]) {
    let mut input = Input::new(data);
    let memory = Path::new("/dev/shm");
    let dir = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.expect("a directory");
    let weights = [vec![0.25; WEIGHTS], vec![-0.5; WEIGHTS]];
    let mut model = Model { dir, files: BTreeMap::new(), weights, clock: 0 };
    drop(Store::open(&model.root()).expect("a new store"));
    let mut works = 0;
    for _ in 0..24 {
        let path = format!("run{}/step_{}.safetensors", input.upto(1), input.upto(5));
        let other = format!("run{}/step_{}.safetensors", input.upto(1), input.upto(5));
        match input.byte() % 10 {
            0..=3 => model.save(&path, &mut input),
            4 => model.remove(&path),
            5 => model.rename(&path, &other),
            6 => model.copy(&path, &other),
            7 => model.truncate(&path, input.upto(70_000) as u64),
            _ if works < 4 => {
                works += 1;
                model.work();
            }
            _ => model.compare(),
        }
    }
    model.work();
}

impl Model {
    fn root(&self) -> std::path::PathBuf {
        self.dir.path().join("store")
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.root().join("tree").join(name)
    }

    /// A minute later than all others before.
    fn touch(&mut self, name: &str) {
        self.clock += 60;
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000 + self.clock);
        File::options().write(true).open(self.path(name)).expect("a file").set_modified(time).expect("its time");
    }

    /// Replaces a file by a new one.
    fn put(&mut self, name: &str, bytes: &[u8]) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().expect("a directory")).expect("a directory");
        let part = self.root().join("tree/part");
        fs::write(&part, bytes).expect("room");
        fs::rename(&part, &path).expect("a name");
        self.touch(name);
        self.files.insert(name.to_string(), Known { written: bytes.to_vec(), read: None });
    }

    fn save(&mut self, name: &str, input: &mut Input) {
        let run = usize::from(name.starts_with("run1"));
        let size = f32::from(input.byte()) / 65_536.0;
        let mut state = u64::from(input.u32());
        for weight in &mut self.weights[run] {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            *weight += size * ((state >> 40) as f32 / 8_388_608.0 - 1.0);
        }
        let weights: Vec<u8> = self.weights[run].iter().flat_map(|weight| weight.to_le_bytes()).collect();
        let padding = vec![run as u8; PADDING];
        let tensors = [
            ("w", TensorView::new(Dtype::F32, vec![20, WEIGHTS / 20], &weights).expect("lengths")),
            ("ids", TensorView::new(Dtype::U8, vec![PADDING], &padding).expect("lengths")),
        ];
        let bytes = serialize(tensors, None).expect("a file");
        self.put(name, &bytes);
    }

    fn remove(&mut self, name: &str) {
        if self.files.remove(name).is_some() {
            fs::remove_file(self.path(name)).expect("it is there");
        }
    }

    fn rename(&mut self, from: &str, to: &str) {
        if from == to || !self.files.contains_key(from) {
            return;
        }
        fs::create_dir_all(self.path(to).parent().expect("a directory")).expect("a directory");
        fs::rename(self.path(from), self.path(to)).expect("a name");
        let known = self.files.remove(from).expect("it is there");
        self.files.insert(to.to_string(), known);
    }

    /// Writes the bytes that a reader gets into another file.
    fn copy(&mut self, from: &str, to: &str) {
        if from == to || !self.files.contains_key(from) {
            return;
        }
        let bytes = self.read(from).0;
        self.put(to, &bytes);
    }

    /// As a program truncates a file that is not released.
    fn truncate(&mut self, name: &str, length: u64) {
        if !self.files.contains_key(name) || self.read(name).1.is_some() {
            return;
        }
        File::options().write(true).open(self.path(name)).expect("a file").set_len(length).expect("room");
        let bytes = fs::read(self.path(name)).expect("a file");
        self.touch(name);
        self.files.insert(name.to_string(), Known { written: bytes, read: None });
    }

    /// Archives, releases, merges and collects everything, then compares.
    fn work(&mut self) {
        let store = Store::open(&self.root()).expect("a store");
        let archive = Archive::open_with(store, 1 << 20).expect("a store");
        archive.start(Arc::new(AtRest::of(archive.store())));
        let began = Instant::now();
        while archive.queue().queued > 0 {
            assert!(began.elapsed() < Duration::from_secs(60), "it takes too long");
            std::thread::sleep(Duration::from_millis(1));
        }
        let failed = archive.status().failed;
        archive.stop();
        assert!(failed.is_empty(), "{failed:?}");
        self.compare();
    }

    /// The bytes that a reader of a file gets, and the bound of its weights if it is released.
    fn read(&self, name: &str) -> (Vec<u8>, Option<f64>) {
        let store = Store::look(&self.root()).expect("a store");
        let file = File::open(self.path(name)).expect("a file");
        let Some(stub) = Stub::read(&file, store.id()).expect("a sound stub") else {
            return (fs::read(self.path(name)).expect("a file"), None);
        };
        let objects = Objects::load(&store.objects(), |id, error| panic!("{id}: {error}")).expect("objects");
        let chain = Chain::open(&objects, stub.object).expect("the object and its ancestors");
        let mut bytes = Vec::new();
        stream(&chain, &Layout::of(chain.leaf()), |_, _, run| {
            bytes.extend_from_slice(run);
            Ok::<(), ReadError>(())
        })
        .expect("sound objects");
        let bound = chain.leaf().index().tensors.iter().find(|tensor| tensor.path == "w").map_or(0.0, |w| w.bound);
        (bytes, Some(bound))
    }

    fn compare(&mut self) {
        let names: Vec<String> = self.files.keys().cloned().collect();
        for name in names {
            let (read, bound) = self.read(&name);
            let known = self.files.get_mut(&name).expect("it is there");
            let Some(bound) = bound else {
                // Resident: exact, unless it is a copy of a released file.
                assert!(read == known.written, "{name} is resident and another");
                continue;
            };
            if let Some(before) = &known.read {
                assert!(read == *before, "{name} changed twice");
                continue;
            }
            assert_eq!(read.len(), known.written.len(), "{name}");
            let header = 8 + u64::from_le_bytes(read[..8].try_into().expect("a length")) as usize;
            for (at, (is, was)) in read.iter().zip(&known.written).enumerate() {
                let weight = read.len() - at <= 4 * WEIGHTS || (header..header + 4 * WEIGHTS).contains(&at);
                assert!(is == was || weight, "{name}: byte {at} is not of a weight and differs");
            }
            let floats = |bytes: &[u8]| -> Vec<f32> {
                let text = std::str::from_utf8(&bytes[8..header]).unwrap_or_default();
                let start = if text.find("\"w\"") < text.find("\"ids\"") { header } else { bytes.len() - 4 * WEIGHTS };
                let start = start.min(bytes.len().saturating_sub(4 * WEIGHTS));
                bytes[start..start + 4 * WEIGHTS]
                    .chunks(4)
                    .map(|e| f32::from_le_bytes(e.try_into().expect("four")))
                    .collect()
            };
            for (is, was) in floats(&read).into_iter().zip(floats(&known.written)) {
                assert!(
                    is.to_bits() == was.to_bits() || f64::from((is - was).abs()) <= bound,
                    "{name}: {was} became {is}"
                );
            }
            known.read = Some(read);
        }
    }
}
