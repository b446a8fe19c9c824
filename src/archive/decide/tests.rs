//! How long a decision takes.

use std::path::PathBuf;

use super::*;
use crate::archive::FileId;
use crate::archive::entry::Sealed;

/// Files in so many directories, each lineage in each, as a run of many ranks has them.
fn files(directories: usize, files: usize) -> Vec<Arc<File>> {
    let path = |directory: usize, file: usize| match directories {
        1 => PathBuf::from(format!("run/model_rank{}_step_{}.pt", file % 8, file / 8)),
        _ => PathBuf::from(format!("run/checkpoint-{directory}/rank{file}.pt")),
    };
    let all = (0..directories).flat_map(|directory| (0..files).map(move |file| (directory, file)));
    let mut checkpoints: HashMap<Checkpoint, Arc<Checkpoint>> = HashMap::new();
    let file = |(number, (directory, file)): (usize, (usize, usize))| {
        let path = path(directory, file);
        let sealed = Sealed {
            file: FileId { dev: 1, ino: number as u64 },
            len: 1 << 20,
            modified_ns: number as i64 * 1_000_000,
            steps: step_pattern::steps(&path),
            sample: number as u64,
            signature: 1,
            lineage: if directories == 1 { file % 8 } else { file } as u64,
            part: Part::Whole,
            siblings: None,
            copy: false,
            changed_ns: None,
        };
        let entry = Entry::new(State::Sealed(Arc::new(sealed)), number as u64);
        let checkpoint = Checkpoint::of(&path, &entry.state)
            .map(|own| Arc::clone(checkpoints.entry(own.clone()).or_insert_with(|| Arc::new(own))));
        let (run, results) = (step_pattern::run(&path).into(), Results::of(&path).map(Arc::new));
        Arc::new(File { run, path: path.into(), checkpoint, results, entry })
    };
    all.enumerate().map(file).collect()
}

/// cargo test --release --lib decide -- --ignored --nocapture
#[test]
#[ignore = "a measurement"]
fn a_decision_on_20_000_files() {
    for (directories, count) in [(1, 20_000), (2000, 10), (1, 10)] {
        let files = files(directories, count);
        let now = Now { instant: Instant::now(), wall_ns: 0 };
        let times = (0..20).map(|_| {
            let began = Instant::now();
            let answer = decide(&files, &Others::default(), 600_000_000_000, now);
            assert_eq!(answer.files.len(), files.len());
            began.elapsed()
        });
        println!("{} files in {directories} directories: {:?}", files.len(), times.min());
    }
}
