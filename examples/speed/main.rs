//! The cost of a whole AdamW checkpoint: planned, encoded, read back and compared, and decoded again.
//!
//!     cargo run --release --example speed -- [--profile balanced] [--mib 384] [--states 4] [--dtype f32] [--cores 1]
//!
//! Makes a store in a temporary directory and puts some states of a synthetic training into it: weights, first and
//! second moments, some vectors. Archives and decodes them. On one core it prints GB of checkpoint per second of
//! processor time, and its ratio to a memcpy of the same bytes. So other load costs cache but not turns. On several
//! cores it prints only the rows of wall clock.

use std::collections::BTreeMap;
use std::error::Error;
use std::fs::{self, File};
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use clap::Parser;
use safetensors::tensor::Dtype;
use stepfs::archive::{Archive, AtRest};
use stepfs::recall::{Chain, Layout, Memory, ReadError, stream, walk};
use stepfs::store::object::Object;
use stepfs::store::{Objects, Store, Stub};

use clock::{CLOCK, processor_time};
use report::Report;
use training::Training;

#[cfg(feature = "jemalloc")]
#[path = "../../src/allocator.rs"]
mod allocator;
mod clock;
mod report;
mod training;

/// Bytes of decoded states: all that this needs.
const MEMORY: u64 = 2 << 30;
/// Each decoding is done this often, and the best counts.
const ROUNDS: usize = 5;

#[derive(Parser)]
struct Arguments {
    /// The profile: balanced, compact or exact.
    #[arg(long, default_value = "balanced")]
    profile: String,
    /// Size of a checkpoint in fp32, MiB. Other types have as many elements.
    #[arg(long, default_value_t = 384)]
    mib: usize,
    /// Number of checkpoints. The newest stays as it was written.
    #[arg(long, default_value_t = 4)]
    states: usize,
    /// Type of all tensors: f32 or bf16.
    #[arg(long, default_value = "f32", value_parser = ["f32", "bf16"])]
    dtype: String,
    /// Number of cores.
    #[arg(long, default_value_t = 1)]
    cores: usize,
    /// Write all ratios to this file as JSON.
    #[arg(long)]
    json: Option<PathBuf>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments = Arguments::parse();
    on_cores(arguments.cores)?;
    log::set_logger(&CLOCK)?;
    log::set_max_level(log::LevelFilter::Trace);
    let dir = tempfile::tempdir()?;
    let root = dir.path().join("store");
    let tree = Store::open(&root)?.tree();
    let settings = root.join("stepfs.toml");
    let (text, profile) = (fs::read_to_string(&settings)?, &arguments.profile);
    let usual = "\ndefault_profile = \"balanced\"";
    fs::write(&settings, text.replace(usual, &format!("\ndefault_profile = \"{profile}\"")))?;
    let dtype = if arguments.dtype == "bf16" { Dtype::BF16 } else { Dtype::F32 };
    let mut training = Training::new(arguments.mib << 20, dtype);
    let paths: Vec<PathBuf> = (0..arguments.states).map(|at| tree.join(format!("step_{at:03}.safetensors"))).collect();
    for (at, path) in paths.iter().enumerate() {
        training.step();
        training.save(path)?;
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000 + 60 * at as u64);
        let file = File::options().write(true).open(path)?;
        file.set_modified(time)?;
        // The device's time for the original is no part of archiving.
        file.sync_all()?;
    }
    drop(training);
    let bytes = paths.first().map_or(Ok(0), |path| fs::metadata(path).map(|metadata| metadata.len()))?;
    let copied = memcpy(bytes as usize);
    let mut report = Report::new((profile, &arguments.dtype), arguments.cores, bytes, copied);

    // A virtual machine may have given free pages back to its host, and fetching them takes longer than all else.
    black_box(vec![1u8; (bytes as usize) * paths.len()]);
    let archive = Archive::open_with(Store::open(&root)?, MEMORY)?;
    let begin = Instant::now();
    archive.start(Arc::new(AtRest::of(archive.store())));
    while archive.queue().queued > 0 {
        std::thread::sleep(Duration::from_millis(5));
    }
    let archiving = begin.elapsed().as_secs_f64();
    let failed = archive.status().failed;
    archive.stop();
    drop(archive);
    if !failed.is_empty() {
        return Err(failed.join("; ").into());
    }
    if arguments.cores == 1 {
        stages(bytes, &mut report);
        decode(&root, &paths, &mut report)?;
    }
    report.heading("all states, wall clock", "");
    let all = bytes as f64 * paths.len().saturating_sub(1) as f64;
    report.row("archive", all, archiving);
    decode_all(&root, &paths, arguments.cores, &mut report)?;
    if let Some(file) = arguments.json {
        fs::write(file, serde_json::to_string_pretty(&report)? + "\n")?;
    }
    Ok(())
}

/// The rest of this process has so many processors, and so as many threads in each of its pools.
fn on_cores(cores: usize) -> Result<(), Box<dyn Error>> {
    // SAFETY: a set of processors is plain bits, and the calls read and write no more than its size says.
    let status = unsafe {
        let size = size_of::<libc::cpu_set_t>();
        let (mut allowed, mut set): (libc::cpu_set_t, libc::cpu_set_t) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sched_getaffinity(0, size, &mut allowed);
        let known = (0..libc::CPU_SETSIZE as usize).filter(|&cpu| libc::CPU_ISSET(cpu, &allowed));
        known.take(cores).for_each(|cpu| libc::CPU_SET(cpu, &mut set));
        libc::sched_setaffinity(0, size, &set)
    };
    if status == 0 { Ok(()) } else { Err(std::io::Error::last_os_error().into()) }
}

/// The least of some rounds, in seconds of this clock.
fn best<E>(clock: impl Fn() -> f64, mut run: impl FnMut() -> Result<(), E>) -> Result<f64, E> {
    let mut least = f64::MAX;
    for _ in 0..ROUNDS {
        let start = clock();
        run()?;
        least = least.min(clock() - start);
    }
    Ok(least)
}

/// Copies tile after tile into one buffer, as decoding does; GB/s.
fn memcpy(bytes: usize) -> f64 {
    let from = vec![1u8; bytes];
    let mut to = vec![0u8; codec::TILE_BYTES];
    let copied: Result<f64, ReadError> = best(processor_time, || {
        for tile in from.chunks_exact(to.len()) {
            to.copy_from_slice(tile);
            black_box(&to);
        }
        Ok(())
    });
    bytes as f64 / copied.unwrap_or(f64::MAX) / 1e9
}

/// The speed of each file's stages: of roles in bytes of theirs, else in bytes of the file.
fn stages(bytes: u64, report: &mut Report) {
    for (at, file) in CLOCK.files().iter().enumerate() {
        report.heading(&format!("state {at}"), "");
        let third = bytes as f64 / 3.0;
        for (stage, &seconds) in &file.stages {
            let of = match stage.as_str() {
                // Quantized moments are written together.
                "encode second_moment" if !file.stages.contains_key("encode first_moment") => 2.0 * third,
                stage if stage.starts_with("encode ") => third,
                _ => bytes as f64,
            };
            report.row(stage, of, seconds);
        }
        let encode: f64 = file.stages.iter().filter(|(stage, _)| stage.starts_with("encode ")).map(|(_, s)| s).sum();
        report.row("encode, all roles", bytes as f64, encode);
        report.row("all stages", bytes as f64, file.stages.values().sum());
        report.row("all stages with SHA-256", bytes as f64, file.process);
    }
}

/// The released states of a store: number, chain, and bytes.
struct Released {
    at: usize,
    chain: Chain,
    /// The same, with the states of its base in memory, if it has a base.
    in_memory: Option<Chain>,
    bytes: u64,
    stored: u64,
}

/// Opens each released state. Only the archive keeps states in memory: those of an object that it just wrote.
fn released(root: &Path, paths: &[PathBuf]) -> Result<Vec<Released>, Box<dyn Error>> {
    let store = Store::look(root)?;
    let objects = Arc::new(Objects::load(&store.objects(), |id, error| eprintln!("object {id}: {error}"))?);
    let mut released = Vec::new();
    for (at, path) in paths.iter().enumerate() {
        let Some(stub) = Stub::read(&File::open(path)?, store.id())? else { continue };
        let stored = objects.get(stub.object).map_or(0, |(_, stored)| stored);
        let chain = Chain::open(&objects, stub.object)?;
        let mut in_memory = None;
        if let Some(base) = chain.leaf().header().parent {
            let memory = Arc::new(Memory::new(MEMORY));
            let bases =
                chain.from_ancestor(base).and_then(|chain| chain.from_ancestor(chain.objects().get(1)?.header().id));
            whole(&Chain::of_new(Object::open(&store.objects(), base)?, bases.as_ref(), &memory, false))?;
            in_memory = Some(chain.clone().with_memory(&memory));
        }
        released.push(Released { at, chain, in_memory, bytes: stub.logical_len, stored });
    }
    Ok(released)
}

/// Decodes a whole file.
fn whole(chain: &Chain) -> Result<(), ReadError> {
    stream(chain, &Layout::of(chain.leaf()), |_, _, bytes| {
        black_box(bytes);
        Ok(())
    })
}

/// Decodes each released state: whole and by role, from the page cache, and on top of its base in memory.
fn decode(root: &Path, paths: &[PathBuf], report: &mut Report) -> Result<(), Box<dyn Error>> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build()?;
    for Released { at, chain, in_memory, bytes, stored } in released(root, paths)? {
        let share = 100.0 * stored as f64 / bytes as f64;
        let objects = chain.objects().len();
        report.heading(&format!("state {at}, decoded"), &format!(" {share:.2}% stored, objects: {objects}"));
        let chains = [Some(("from the page cache", chain)), in_memory.map(|chain| ("with its base in memory", chain))];
        for (name, chain) in chains.iter().flatten() {
            // The clock is the thread's, so it must be read in the pool.
            let seconds = pool.install(|| whole(chain).and_then(|()| best(processor_time, || whole(chain))))?;
            report.row(&format!("{name}, whole file"), bytes as f64, seconds);
            for (role, tensors) in by_role(chain) {
                let entries = &chain.leaf().index().tensors;
                let bytes: u64 = tensors.iter().map(|&(n, _)| entries[n].extent.end - entries[n].extent.start).sum();
                let seconds = best(processor_time, || {
                    for &(tensor, tiles) in &tensors {
                        for number in 0..tiles {
                            black_box(walk::decode(chain, tensor, number)?);
                        }
                    }
                    Ok::<(), ReadError>(())
                })?;
                report.row(&format!("{name}, {role}"), bytes as f64, seconds);
            }
        }
    }
    Ok(())
}

/// Decodes all released states one after the other, by wall clock.
fn decode_all(root: &Path, paths: &[PathBuf], cores: usize, report: &mut Report) -> Result<(), Box<dyn Error>> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(cores).build()?;
    let begin = Instant::now();
    let clock = || begin.elapsed().as_secs_f64();
    let released = released(root, paths)?;
    let plain: Vec<(&Chain, u64)> = released.iter().map(|released| (&released.chain, released.bytes)).collect();
    let in_memory: Vec<(&Chain, u64)> =
        released.iter().filter_map(|released| Some((released.in_memory.as_ref()?, released.bytes))).collect();
    for (name, chains) in [("decode from the page cache", plain), ("decode with its base in memory", in_memory)] {
        let bytes: u64 = chains.iter().map(|(_, bytes)| bytes).sum();
        let seconds = best(clock, || pool.install(|| chains.iter().try_for_each(|(chain, _)| whole(chain))))?;
        report.row(name, bytes as f64, seconds);
    }
    Ok(())
}

/// Number and tiles of the tensors of each role and codec.
fn by_role(chain: &Chain) -> BTreeMap<String, Vec<(usize, usize)>> {
    let mut roles: BTreeMap<String, Vec<(usize, usize)>> = BTreeMap::new();
    for (number, entry) in chain.leaf().index().tensors.iter().enumerate() {
        let kind = if !entry.coding.is_lossy() && entry.coding.parent.is_some() { " delta" } else { "" };
        let name = format!("{} ({}{kind})", entry.role.name(), entry.coding.codec.name());
        roles.entry(name).or_default().push((number, entry.tiles.len()));
    }
    roles
}
