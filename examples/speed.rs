//! The cost of a whole AdamW checkpoint on one core: planned, encoded, read back and compared, and decoded again.
//!
//!     cargo run --release --example speed [balanced|compact [MiB]]
//!
//! Makes a store in a temporary directory and puts four states of a synthetic training into it (fp32: weights, first
//! and second moments, some vectors). Archives them with one thread for tiles, and prints GB of checkpoint per second
//! of processor time, and its ratio to a memcpy of the same bytes. So other load costs cache but not turns.

use std::collections::BTreeMap;
use std::error::Error;
use std::fs::{self, File};
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use stepfs::archive::{Archive, AtRest};
use stepfs::encode::STAGES;
use stepfs::recall::{Chain, Layout, Memory, ReadError, stream, walk};
use stepfs::store::object::Object;
use stepfs::store::{Objects, Store, Stub};
use stepfs::tile::Coding;

/// Checkpoints: a keyframe, two differences, and the newest, which stays as it was written.
const STATES: usize = 4;
/// Bytes of decoded states: all that this needs.
const MEMORY: u64 = 2 << 30;
/// Each decoding is done this often, and the best counts.
const ROUNDS: usize = 5;

fn main() -> Result<(), Box<dyn Error>> {
    let profile = std::env::args().nth(1).unwrap_or_else(|| "balanced".to_string());
    let mib: usize = std::env::args().nth(2).unwrap_or_else(|| "384".to_string()).parse()?;
    on_one_core()?;
    log::set_logger(&CLOCK)?;
    log::set_max_level(log::LevelFilter::Trace);
    let dir = tempfile::tempdir()?;
    let root = dir.path().join("store");
    let tree = Store::open(&root)?.tree();
    let settings = root.join("stepfs.toml");
    let text = fs::read_to_string(&settings)?;
    fs::write(
        &settings,
        text.replace("\ndefault_profile = \"balanced\"", &format!("\ndefault_profile = \"{profile}\"")),
    )?;
    let mut training = Training::new(mib << 20);
    let paths: Vec<PathBuf> = (0..STATES).map(|at| tree.join(format!("step_{at}.safetensors"))).collect();
    for (at, path) in paths.iter().enumerate() {
        training.step();
        training.save(path)?;
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000 + 60 * at as u64);
        File::options().write(true).open(path)?.set_modified(time)?;
    }
    let bytes = fs::metadata(&paths[0])?.len();
    println!("{profile}, {} MB, {} tensors; GB/s of one core", bytes / 1_000_000, 3 * training.parameters.len());
    let copied = memcpy(bytes as usize);
    println!("memcpy {copied:.1}; each speed and its ratio to memcpy");
    let archive = Archive::open_with(Store::open(&root)?, MEMORY)?;
    archive.start(Arc::new(AtRest::of(archive.store())));
    while archive.queue().queued > 0 {
        std::thread::sleep(Duration::from_millis(20));
    }
    let failed = archive.status().failed;
    archive.stop();
    drop(archive);
    if !failed.is_empty() {
        return Err(failed.join("; ").into());
    }
    print_stages(bytes, copied);
    decode(&root, &paths, copied)
}

/// The rest of this process has one processor, and so one thread in each of its pools.
fn on_one_core() -> Result<(), Box<dyn Error>> {
    // SAFETY: a set of processors is plain bits, and the calls read and write no more than its size says.
    let status = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(libc::sched_getcpu().max(0) as usize, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set)
    };
    if status == 0 { Ok(()) } else { Err(std::io::Error::last_os_error().into()) }
}

/// Processor time of this thread so far, in seconds.
fn processor_time() -> f64 {
    time_of(libc::CLOCK_THREAD_CPUTIME_ID)
}

/// Time of a clock, in seconds; 0 if its thread has ended.
fn time_of(clock: libc::clockid_t) -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a timespec of ours, and the call writes nothing else.
    unsafe { libc::clock_gettime(clock, &mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Processor time: of this thread and the archive's thread for tiles, then of the whole process. The process also hashes
/// the file as it was written.
fn times() -> [f64; 2] {
    let mut tiles = 0.0;
    for task in fs::read_dir("/proc/self/task").into_iter().flatten().flatten() {
        let is_of_tiles = fs::read_to_string(task.path().join("comm")).is_ok_and(|name| name.starts_with("archive-"));
        let id = task.file_name().to_str().and_then(|id| id.parse::<libc::pid_t>().ok());
        if let Some(id) = id.filter(|_| is_of_tiles) {
            // Linux numbers the clocks of threads like this: the inverted id, then "per thread" and "scheduler's".
            tiles += time_of(!id << 3 | 6);
        }
    }
    [processor_time() + tiles, time_of(libc::CLOCK_PROCESS_CPUTIME_ID)]
}

/// Takes the time whenever the archive notes that a stage ended. The thread that writes the object notes it; the one
/// for tiles may be a few tiles ahead.
struct Clock {
    noted: Mutex<Noted>,
}

/// When the last stage ended, each file's time per stage, and the process's time for the file.
struct Noted {
    last: [f64; 2],
    files: Vec<(BTreeMap<String, f64>, f64)>,
}

static CLOCK: Clock = Clock { noted: Mutex::new(Noted { last: [0.0; 2], files: Vec::new() }) };

impl log::Log for Clock {
    fn enabled(&self, metadata: &log::Metadata) -> bool {
        metadata.target() == STAGES || metadata.level() <= log::Level::Warn
    }

    fn log(&self, record: &log::Record) {
        if record.target() != STAGES {
            if record.level() <= log::Level::Warn {
                eprintln!("{}", record.args());
            }
            return;
        }
        let mut noted = self.noted.lock().unwrap_or_else(PoisonError::into_inner);
        let (now, stage) = (times(), record.args().to_string());
        if stage == "begin" {
            noted.files.push((BTreeMap::new(), 0.0));
        } else {
            let spent = [now[0] - noted.last[0], now[1] - noted.last[1]];
            if let Some((file, process)) = noted.files.last_mut() {
                *file.entry(stage).or_default() += spent[0];
                *process += spent[1];
            }
        }
        noted.last = times();
    }

    fn flush(&self) {}
}

/// The speed of each file's stages: of roles in bytes of theirs, else in bytes of the file.
fn print_stages(bytes: u64, memcpy: f64) {
    let noted = CLOCK.noted.lock().unwrap_or_else(PoisonError::into_inner);
    for (at, (file, process)) in noted.files.iter().enumerate() {
        println!("state {at}:");
        let third = bytes as f64 / 3.0;
        let print = |stage: &str, bytes: f64, seconds: f64| {
            let speed = bytes / seconds / 1e9;
            println!("  {stage:<24} {speed:>6.2} {:>6.3}  ({:.0} ms)", speed / memcpy, 1e3 * seconds);
        };
        for (stage, &seconds) in file {
            let of = match stage.as_str() {
                // Both moments are written together.
                "encode second_moment" => 2.0 * third,
                stage if stage.starts_with("encode ") => third,
                _ => bytes as f64,
            };
            print(stage, of, seconds);
        }
        let encode: f64 = file.iter().filter(|(stage, _)| stage.starts_with("encode ")).map(|(_, s)| s).sum();
        print("encode, all roles", bytes as f64, encode);
        let whole: f64 = file.values().sum();
        print("all stages", bytes as f64, whole);
        print("with SHA-256", bytes as f64, *process);
    }
}

/// The best of some rounds, as GB/s.
fn best(bytes: u64, mut run: impl FnMut() -> Result<(), ReadError>) -> Result<f64, ReadError> {
    let mut least = f64::MAX;
    for _ in 0..ROUNDS {
        let start = processor_time();
        run()?;
        least = least.min(processor_time() - start);
    }
    Ok(bytes as f64 / least / 1e9)
}

/// Copies tile after tile into one buffer, as decoding does.
fn memcpy(bytes: usize) -> f64 {
    let from = vec![1u8; bytes];
    let mut to = vec![0u8; stepfs::codec::TILE_BYTES];
    let copied = best(bytes as u64, || {
        for tile in from.chunks_exact(to.len()) {
            to.copy_from_slice(tile);
            black_box(&to);
        }
        Ok(())
    });
    copied.unwrap_or_default()
}

/// Decodes each released state: whole and by role, from the device, and on top of its base in memory.
fn decode(root: &Path, paths: &[PathBuf], memcpy: f64) -> Result<(), Box<dyn Error>> {
    let store = Store::look(root)?;
    let objects = Arc::new(Objects::load(&store.objects(), |id, error| eprintln!("object {id}: {error}"))?);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build()?;
    for (at, path) in paths.iter().enumerate() {
        let Some(stub) = Stub::read(&File::open(path)?, store.id())? else { continue };
        let stored = objects.get(stub.object).map_or(0, |(_, stored)| stored);
        println!("state {at}, decoded: {:.2}% stored", 100.0 * stored as f64 / stub.logical_len as f64);
        let whole = |chain: &Chain| {
            pool.install(|| {
                stream(chain, &Layout::of(chain.leaf()), |_, _, bytes| {
                    black_box(bytes);
                    Ok::<(), ReadError>(())
                })
            })
        };
        let cold = Chain::open(&objects, stub.object)?;
        let mut chains = vec![("from the device", cold.clone())];
        if let Some(base) = cold.leaf().header().parent {
            // Only the archive keeps states in memory: those of an object that it just wrote.
            let memory = Arc::new(Memory::new(MEMORY));
            let bases =
                cold.from_ancestor(base).and_then(|chain| chain.from_ancestor(chain.objects().get(1)?.header().id));
            whole(&Chain::of_new(Object::open(&store.objects(), base)?, bases.as_ref(), &memory, false))?;
            chains.push(("with its base in memory", cold.with_memory(&memory)));
        }
        for (name, chain) in &chains {
            whole(chain)?;
            // The clock is the thread's, so it must be read in the pool.
            let speed = pool.install(|| best(stub.logical_len, || whole(chain)))?;
            let ratio = speed / memcpy;
            println!("  {name:<24} {speed:>6.2} {ratio:>6.3}  whole file, objects: {}", chain.objects().len());
            for (role, tensors) in by_role(chain) {
                let tensors: Vec<(usize, usize)> = tensors.into_iter().collect();
                let entries = &chain.leaf().index().tensors;
                let bytes = tensors.iter().map(|&(n, _)| entries[n].extent.end - entries[n].extent.start).sum();
                let speed = best(bytes, || {
                    for &(tensor, tiles) in &tensors {
                        for number in 0..tiles {
                            black_box(walk::decode(chain, tensor, number)?);
                        }
                    }
                    Ok(())
                })?;
                println!("    {role:<22} {speed:>6.2} {:>6.3}", speed / memcpy);
            }
        }
    }
    Ok(())
}

/// Number and tiles of the tensors of each role and codec.
fn by_role(chain: &Chain) -> BTreeMap<String, Vec<(usize, usize)>> {
    let mut roles: BTreeMap<String, Vec<(usize, usize)>> = BTreeMap::new();
    for (number, entry) in chain.leaf().index().tensors.iter().enumerate() {
        let kind = if let Coding::LosslessDelta { .. } = entry.coding { " delta" } else { "" };
        let name = format!("{} ({}{kind})", entry.role.name(), entry.coding.codec());
        roles.entry(name).or_default().push((number, entry.tiles.len()));
    }
    roles
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// About normal, of variance 1: eight uniform numbers of 16 bits.
    fn normal(&mut self) -> f32 {
        let (a, b) = (self.next(), self.next());
        let sum: u64 = (0..4).map(|i| (a >> (16 * i) & 0xffff) + (b >> (16 * i) & 0xffff)).sum();
        (sum as f32 / 65536.0 - 4.0) * 1.2247
    }
}

struct Parameter {
    name: String,
    shape: Vec<usize>,
    /// log2 of the factors of the second moment that rows and columns share.
    row: Vec<f32>,
    column: Vec<f32>,
    /// log2 of an element's own factor; it wanders.
    own: Vec<f32>,
    weight: Vec<f32>,
    first: Vec<f32>,
    second: Vec<f32>,
}

struct Training {
    parameters: Vec<Parameter>,
    random: Random,
}

impl Training {
    /// A GPT of width 1024 with as many layers as make checkpoints of about this many bytes.
    fn new(bytes: usize) -> Training {
        const WIDTH: usize = 1024;
        let mut shapes: Vec<(String, Vec<usize>)> = vec![("wte.weight".to_string(), vec![6 * WIDTH, WIDTH])];
        let mut left = (bytes / 12).saturating_sub(6 * WIDTH * WIDTH);
        for layer in 0.. {
            for (name, shape) in [
                ("ln_1.weight", vec![WIDTH]),
                ("attn.c_attn.weight", vec![3 * WIDTH, WIDTH]),
                ("attn.c_attn.bias", vec![3 * WIDTH]),
                ("attn.c_proj.weight", vec![WIDTH, WIDTH]),
                ("mlp.c_fc.weight", vec![4 * WIDTH, WIDTH]),
                ("mlp.c_proj.weight", vec![WIDTH, 4 * WIDTH]),
            ] {
                left = left.saturating_sub(shape.iter().product());
                shapes.push((format!("h.{layer}.{name}"), shape));
            }
            if left < 6 * WIDTH * WIDTH {
                break;
            }
        }
        let mut random = Random(1);
        let parameters = shapes.into_iter().map(|(name, shape)| Parameter::new(name, shape, &mut random)).collect();
        Training { parameters, random }
    }

    /// As many iterations as lie between two checkpoints.
    fn step(&mut self) {
        for parameter in &mut self.parameters {
            parameter.step(&mut self.random);
        }
    }

    /// Writes weights and optimizer state as torch.distributed flattens them.
    fn save(&self, path: &Path) -> Result<(), Box<dyn Error>> {
        let mut tensors = Vec::new();
        for parameter in &self.parameters {
            let Parameter { name, weight, first, second, .. } = parameter;
            for (name, values) in [
                (format!("model.{name}"), weight),
                (format!("optimizer.state.{name}.exp_avg"), first),
                (format!("optimizer.state.{name}.exp_avg_sq"), second),
            ] {
                let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
                tensors.push((name, parameter.shape.clone(), bytes));
            }
        }
        let views: Result<Vec<_>, _> = tensors
            .iter()
            .map(|(name, shape, bytes)| Ok((name, TensorView::new(Dtype::F32, shape.clone(), bytes)?)))
            .collect();
        Ok(serialize_to_file(views.map_err(|error: safetensors::SafeTensorError| error)?, None, path)?)
    }
}

impl Parameter {
    fn new(name: String, shape: Vec<usize>, random: &mut Random) -> Parameter {
        let count: usize = shape.iter().product();
        let width = shape[shape.len() - 1];
        let mut octaves = |n: usize, sigma: f32| (0..n).map(|_| sigma * random.normal()).collect::<Vec<f32>>();
        let (row, column, own) = (octaves(count / width, 1.5), octaves(width, 1.5), octaves(count, 0.8));
        let weight = octaves(count, 0.02);
        Parameter { name, shape, row, column, own, weight, first: vec![0.0; count], second: vec![0.0; count] }
    }

    /// v = row * column * own factor; m / sqrt(v) is normal; w moves by lr times that.
    fn step(&mut self, random: &mut Random) {
        let width = self.column.len();
        for i in 0..self.weight.len() {
            self.own[i] = 0.9 * self.own[i] + 0.35 * random.normal();
            let v = 1e-9 * (self.row[i / width] + self.column[i % width] + self.own[i]).exp2();
            self.second[i] = v;
            self.first[i] = v.sqrt() * 0.3 * random.normal();
            self.weight[i] += 1e-4 * random.normal();
        }
    }
}
