//! A store at rest, small checkpoints of an invented training, and their comparison after a release.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use safetensors::tensor::{SafeTensors, TensorView, serialize};
use stepfs::archive::{Archive, AtRest, ReadError};
use stepfs::recall::{Chain, Layout, stream};
use stepfs::store::object::{Index, Object, path_of};
use stepfs::store::{Id, Objects, Store, Stub};

pub(crate) use safetensors::Dtype;

/// Random numbers that are the same on every machine (splitmix64).
#[derive(Clone)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end.max(1)
    }

    /// About normal, of variance 1: the sum of eight uniform numbers of 16 bits, from two draws.
    pub(crate) fn normal(&mut self) -> f64 {
        let fields = |draw: u64| [0, 16, 32, 48].map(|at| (draw >> at) & 0xffff).iter().sum::<u64>();
        let sum = fields(self.next()) + fields(self.next());
        (sum as f64 / 65536.0 - 4.0) * 1.5f64.sqrt()
    }
}

/// One tensor in training.
#[derive(Clone)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) values: Vec<f64>,
}

impl Tensor {
    pub(crate) fn new(name: &str, dtype: Dtype, shape: &[usize], random: &mut Random) -> Tensor {
        let count = shape.iter().product();
        let values =
            (0..count).map(|_| if dtype == Dtype::I64 { random.below(50_000) as f64 } else { random.normal() / 16.0 });
        Tensor { name: name.to_string(), dtype, shape: shape.to_vec(), values: values.collect() }
    }

    pub(crate) fn update(&mut self, size: f64, random: &mut Random) {
        for value in &mut self.values {
            // Integers are like the state of a generator: earlier values do not help.
            *value += if self.dtype == Dtype::I64 { (1e6 * random.normal()).round() } else { size * random.normal() };
        }
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let each = |value: &f64| match self.dtype {
            Dtype::F16 => half::f16::from_f64(*value).to_le_bytes().to_vec(),
            Dtype::F32 => (*value as f32).to_le_bytes().to_vec(),
            Dtype::BF16 => half::bf16::from_f64(*value).to_le_bytes().to_vec(),
            Dtype::F64 => value.to_le_bytes().to_vec(),
            // The byte itself.
            Dtype::F8_E4M3 | Dtype::F8_E5M2 => vec![*value as u8],
            _ => (*value as i64).to_le_bytes().to_vec(),
        };
        self.values.iter().flat_map(each).collect()
    }
}

/// Some weights of each type, a frozen one, a bias and integers; 170 KB.
pub(crate) fn model(random: &mut Random) -> Vec<Tensor> {
    vec![
        Tensor::new("a.weight", Dtype::F32, &[128, 128], random),
        Tensor::new("b.weight", Dtype::BF16, &[64, 128], random),
        Tensor::new("c.weight", Dtype::F64, &[64, 64], random),
        Tensor::new("frozen.weight", Dtype::F32, &[64, 64], random),
        Tensor::new("a.bias", Dtype::F32, &[2048], random),
        Tensor::new("ids", Dtype::I64, &[1024], random),
    ]
}

/// Training continues: everything moves but the frozen tensor.
pub(crate) fn train(model: &mut [Tensor], size: f64, random: &mut Random) {
    model.iter_mut().filter(|t| t.name != "frozen.weight").for_each(|t| t.update(size, random));
}

pub(crate) fn safetensors(model: &[Tensor]) -> Vec<u8> {
    let bytes: Vec<Vec<u8>> = model.iter().map(Tensor::bytes).collect();
    let views = model.iter().zip(&bytes).map(|(t, b)| (&t.name, TensorView::new(t.dtype, t.shape.clone(), b).unwrap()));
    serialize(views, None).unwrap()
}

/// This many states, each 1e-3 from the one before.
pub(crate) fn states(count: usize) -> Vec<Vec<u8>> {
    let mut random = Random(1);
    let mut model = model(&mut random);
    (0..count)
        .map(|_| {
            train(&mut model, 1e-3, &mut random);
            safetensors(&model)
        })
        .collect()
}

/// Free room that all tests at once have enough of. Containers often have 64 MB.
const ROOM_IN_MEMORY: u64 = 2 << 30;

/// A directory in memory, so that no test waits for a device. On disk if `STEPFS_TEST_DISK` is set, and where memory has
/// little room or keeps no attributes of users. Tests of a mount and of real programs use disks.
pub(crate) fn directory() -> tempfile::TempDir {
    let has_room = || rustix::fs::statvfs("/dev/shm").is_ok_and(|of| of.f_bavail * of.f_frsize >= ROOM_IN_MEMORY);
    let usual = || tempfile::tempdir().unwrap();
    if std::env::var_os("STEPFS_TEST_DISK").is_some() || !has_room() {
        return usual();
    }
    let in_memory = tempfile::tempdir_in("/dev/shm").ok();
    in_memory.filter(|dir| xattr::set(dir.path(), "user.stepfs.test", b"1").is_ok()).unwrap_or_else(usual)
}

/// A store in a directory of its own, and the bytes that were written into its tree.
pub(crate) struct Rest {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) written: BTreeMap<String, Vec<u8>>,
    clock: u64,
}

impl Rest {
    pub(crate) fn new() -> Rest {
        Rest::with(|text| text)
    }

    /// The first states are exact, so that the keyframe of the others is not zero.
    pub(crate) fn on_keyframes() -> Rest {
        const EXACT: &str = "[[profile]]\nglob = \"**/step_{1,00020}.*\"\nprofile = \"exact\"\n\n[[profile]]";
        Rest::with(|text| text.replacen("[[profile]]", EXACT, 1))
    }

    /// With other settings.
    pub(crate) fn with(settings: impl Fn(String) -> String) -> Rest {
        let rest = Rest { dir: directory(), written: BTreeMap::new(), clock: 0 };
        drop(Store::open(&rest.root()).unwrap());
        let path = rest.root().join("stepfs.toml");
        let text = settings(fs::read_to_string(&path).unwrap());
        fs::write(&path, text).unwrap();
        rest
    }

    /// Everything under one profile.
    pub(crate) fn under(profile: &str) -> Rest {
        Rest::with(|text| {
            text.replacen("default_profile = \"balanced\"", &format!("default_profile = \"{profile}\""), 1)
        })
    }

    /// Another store with the same bytes.
    pub(crate) fn copied(&self) -> Rest {
        let mut other = Rest::new();
        fs::remove_dir_all(other.root()).unwrap();
        copy(&self.root(), &other.root());
        for name in self.written.keys().filter(|name| self.path(name).exists()) {
            // A copy has no times of its own; the newest must stay the newest.
            let time = fs::metadata(self.path(name)).unwrap().modified().unwrap();
            File::options().write(true).open(other.path(name)).unwrap().set_modified(time).unwrap();
        }
        (other.written, other.clock) = (self.written.clone(), self.clock);
        other
    }

    /// A series that has been settled: the newest is exact, all others are released.
    pub(crate) fn of(count: usize) -> Rest {
        let mut rest = Rest::new();
        for (at, state) in states(count).into_iter().enumerate() {
            rest.write(&step(at + 1), &state);
        }
        rest.settle();
        rest
    }

    pub(crate) fn root(&self) -> PathBuf {
        self.dir.path().join("store")
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.root().join("tree").join(name)
    }

    /// Writes a file that is a minute newer than the last one.
    pub(crate) fn write(&mut self, name: &str, bytes: &[u8]) {
        self.clock += 60;
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, bytes).unwrap();
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000 + self.clock);
        File::options().write(true).open(&path).unwrap().set_modified(time).unwrap();
        self.written.insert(name.to_string(), bytes.to_vec());
    }

    /// Does all pending work, and closes the store.
    pub(crate) fn settle(&self) {
        let archive = self.open();
        work(&archive);
        archive.stop();
    }

    pub(crate) fn open(&self) -> Arc<Archive> {
        Archive::open(Store::open(&self.root()).unwrap()).unwrap()
    }

    pub(crate) fn objects(&self) -> Objects {
        Objects::load(&self.root().join("objects"), |id, error| panic!("{id}: {error}")).unwrap()
    }

    pub(crate) fn count(&self) -> usize {
        self.objects().all().len()
    }

    pub(crate) fn stub(&self, name: &str) -> Option<Stub> {
        let store = Store::look(&self.root()).unwrap();
        Stub::read(&File::open(self.path(name)).unwrap(), store.id()).unwrap()
    }

    pub(crate) fn id(&self, name: &str) -> Id {
        self.stub(name).unwrap_or_else(|| panic!("{name} is not released")).object
    }

    pub(crate) fn object(&self, name: &str) -> Object {
        Object::open(&self.root().join("objects"), self.id(name)).unwrap()
    }

    pub(crate) fn object_path(&self, name: &str) -> PathBuf {
        path_of(&self.root().join("objects"), self.id(name))
    }

    /// The bytes that a reader of the file gets, decoded as a stream if it is released.
    pub(crate) fn read(&self, name: &str) -> Result<Vec<u8>, ReadError> {
        match self.stub(name) {
            Some(stub) => {
                let objects = Objects::load(&self.root().join("objects"), |_, _| {}).unwrap();
                decode(&objects, stub.object)
            }
            None => Ok(fs::read(self.path(name)).unwrap()),
        }
    }

    /// Compares restored bytes with written bytes: tensors on a lattice within their bound, all else exactly. Returns
    /// the object's index.
    #[track_caller]
    pub(crate) fn faithful(&self, name: &str) -> Index {
        let (written, read) = (&self.written[name], self.read(name).unwrap());
        let index = self.object(name).index().clone();
        is_faithful(name, &index, written, &read);
        index
    }
}

/// Compares a restored file with the written one, by the rules that its object's index states.
#[track_caller]
pub(crate) fn is_faithful(name: &str, index: &Index, written: &[u8], read: &[u8]) {
    assert_eq!(read.len(), written.len());
    let same = |a: &[u8], b: &[u8], what: &str| assert!(a == b, "{name}: {what} differs");
    let mut end = 0;
    for tensor in &index.tensors {
        let (from, to) = (tensor.extent.start as usize, tensor.extent.end as usize);
        same(&read[end..from], &written[end..from], &format!("the part before {}", tensor.path));
        end = to;
        match tensor.coding.step() {
            None if tensor.coding.is_external() => {
                let error = largest_error(&written[from..to], &read[from..to], tensor.dtype);
                assert_eq!(error, tensor.bound, "{name}: {}", tensor.path);
                assert!((error..=error * (1.0 + 1.2e-7)).contains(&tensor.max_abs_error), "{name}: {error}");
            }
            None => same(&read[from..to], &written[from..to], &tensor.path),
            Some(step) => {
                assert_eq!(tensor.bound, step / 2.0);
                let error = largest_error(&written[from..to], &read[from..to], tensor.dtype);
                assert!(error <= tensor.bound, "{name}: {} is off by {error}, {}", tensor.path, tensor.bound);
                // It is kept as an f32, rounded up.
                assert!((error..=error * (1.0 + 1.2e-7)).contains(&tensor.max_abs_error), "{name}: {error}");
            }
        }
    }
    same(&read[end..], &written[end..], "the end");
    // The format's own library finds the same tensors.
    let (was, is) = (SafeTensors::deserialize(written).unwrap(), SafeTensors::deserialize(read).unwrap());
    for (name, tensor) in was.tensors() {
        let same = is.tensor(&name).unwrap();
        assert_eq!((same.dtype(), same.shape()), (tensor.dtype(), tensor.shape()), "{name}");
    }
    assert_eq!(was.len(), is.len());
}

/// The name of a state, 20 iterations after the one before: the profiles' steps suit that.
pub(crate) fn step(number: usize) -> String {
    format!("run/step_{:05}.safetensors", 20 * number)
}

/// Runs the archive until nothing is queued, for at most a minute.
pub(crate) fn work(archive: &Arc<Archive>) {
    archive.start(Arc::new(AtRest::of(archive.store())));
    until(|| archive.queue().queued == 0);
    assert_eq!(archive.status().failed, [""; 0]);
}

pub(crate) fn until(done: impl Fn() -> bool) {
    let started = Instant::now();
    while !done() {
        assert!(started.elapsed() < Duration::from_secs(180), "takes too long");
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub(crate) fn decode(objects: &Objects, id: Id) -> Result<Vec<u8>, ReadError> {
    let chain = Chain::open(objects, id)?;
    let mut bytes = Vec::new();
    stream(&chain, &Layout::of(chain.leaf()), |offset, _, run| {
        assert_eq!(offset, bytes.len() as u64);
        bytes.extend_from_slice(run);
        Ok::<(), ReadError>(())
    })?;
    Ok(bytes)
}

fn largest_error(a: &[u8], b: &[u8], dtype: codec::Dtype) -> f64 {
    let value = |bytes: &[u8]| match dtype {
        codec::Dtype::F32 => f64::from(f32::from_le_bytes(bytes.try_into().unwrap())),
        codec::Dtype::Bf16 => half::bf16::from_le_bytes(bytes.try_into().unwrap()).to_f64(),
        _ => f64::from_le_bytes(bytes.try_into().unwrap()),
    };
    let size = dtype.size();
    a.chunks(size).zip(b.chunks(size)).map(|(a, b)| (value(a) - value(b)).abs()).fold(0.0, |largest, error| {
        assert!(error.is_finite());
        error.max(largest)
    })
}

pub(crate) fn find<'a>(tensors: &'a mut [Tensor], name: &str) -> &'a mut Tensor {
    tensors.iter_mut().find(|tensor| tensor.name == name).unwrap()
}

/// The path of a tensor's entry in an index.
pub(crate) fn entry<'a>(index: &'a Index, name: &str) -> &'a stepfs::store::object::TensorEntry {
    index.tensors.iter().find(|t| t.path == name || t.path.ends_with(&format!("/{name}"))).unwrap()
}

/// The copy of a directory.
pub(crate) fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        match entry.file_type().unwrap().is_dir() {
            true => copy(&entry.path(), &to.join(entry.file_name())),
            false => {
                fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
            }
        }
    }
}
