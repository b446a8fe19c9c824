//! Which files are states of one thing in training: its lineage.
//!
//! A file is quantized only when a newer one of its lineage is durable, so files of different runs, ranks or shards
//! must never share one. In a path, therefore, only one component may vary, the one that counts training steps, and in
//! it only numbers that do not name a rank or shard. What is not recognised is taken literally: such a file is the
//! newest of its own lineage and stays exact.

use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::Xxh3;

use crate::container::{Description, Role};

/// Words before a number that counts training.
const STEP_WORDS: [&str; 13] =
    ["checkpoint", "ckpt", "chkpt", "cp", "step", "steps", "iter", "iteration", "it", "epoch", "ep", "update", "batch"];
/// Words before a number that says who wrote a file, not when.
const PLACE_WORDS: [&str; 22] = [
    "rank", "shard", "part", "of", "mp", "pp", "tp", "dp", "ep_rank", "worker", "node", "gpu", "replica", "expert",
    "layer", "stage", "process", "seed", "fold", "run", "job", "zero",
];
/// Tensors smaller than this many elements do not count: they come and go with schedulers and counters.
const SIGNATURE_ELEMENTS: u64 = 1024;

/// Names of a file's tensors: those of the model, or all when it has none (an optimizer's file).
pub(super) fn signature(description: &Description) -> u64 {
    let large = |t: &&crate::container::Tensor| t.shape.iter().product::<u64>() >= SIGNATURE_ELEMENTS;
    let mut tensors: Vec<_> =
        description.tensors.iter().filter(large).filter(|tensor| tensor.role == Role::Weight).collect();
    if tensors.is_empty() {
        tensors = description.tensors.iter().filter(large).collect();
    }
    tensors.sort_by(|a, b| a.path.cmp(&b.path));
    let mut hash = Xxh3::new();
    for tensor in tensors {
        hash.update(tensor.path.as_bytes());
        hash.update(&[0, tensor.dtype as u8]);
        tensor.shape.iter().for_each(|dim| hash.update(&dim.to_le_bytes()));
    }
    hash.digest()
}

/// The lineage of a file with this path and signature.
pub(super) fn lineage(path: &Path, signature: u64) -> u64 {
    let mut hash = Xxh3::new();
    hash.update(pattern(path).as_bytes());
    hash.update(&signature.to_le_bytes());
    hash.digest()
}

/// The numbers in a path that count training: decide between files of one modification time.
pub(super) fn steps(path: &Path) -> Vec<u64> {
    split(path).1
}

/// The path with the numbers that count training replaced by `#`.
fn pattern(path: &Path) -> String {
    split(path).0
}

/// The directory that holds all files of a checkpoint, if the component that counts training is a directory.
pub(super) fn group(path: &Path) -> Option<PathBuf> {
    let components = lowercase(path);
    let step = step_component(&components).filter(|step| step + 1 < components.len())?;
    Some(path.iter().take(step + 1).collect())
}

fn lowercase(path: &Path) -> Vec<String> {
    path.iter().map(|c| c.to_string_lossy().to_ascii_lowercase()).collect()
}

/// Which component counts training.
fn step_component(components: &[String]) -> Option<usize> {
    let last = components.len().saturating_sub(1);
    let sharded = components.last().is_some_and(|name| name.contains("-of-"));
    let counts = |(at, name): &(usize, &String)| {
        let numbers = numbers(name);
        let stem = name.split('.').next().unwrap_or_default();
        let bare = !stem.is_empty() && stem.bytes().all(|b| b.is_ascii_digit());
        let version = sharded && *at + 1 == last && numbers.iter().any(|n| n.word == "version");
        bare || version || numbers.iter().any(|n| STEP_WORDS.contains(&n.word) && !n.is_place)
    };
    let step = components.iter().enumerate().rev().find(counts).map(|(at, _)| at);
    step.or_else(|| {
        let name = components.last()?;
        numbers(name).iter().any(|number| !number.is_place).then_some(last)
    })
}

fn split(path: &Path) -> (String, Vec<u64>) {
    let components = lowercase(path);
    let step = step_component(&components);
    let mut steps = Vec::new();
    let mut wild = Vec::with_capacity(components.len());
    for (at, name) in components.iter().enumerate() {
        wild.push(if Some(at) == step { with_steps_wild(name, &mut steps) } else { name.clone() });
    }
    (wild.join("/"), steps)
}

struct Number<'a> {
    start: usize,
    end: usize,
    /// The letters before it, separators left out.
    word: &'a str,
    is_place: bool,
}

/// The runs of digits in a name, with the word before each.
fn numbers(name: &str) -> Vec<Number<'_>> {
    let bytes = name.as_bytes();
    let mut numbers = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        if !bytes[at].is_ascii_digit() {
            at += 1;
            continue;
        }
        let start = at;
        while at < bytes.len() && bytes[at].is_ascii_digit() {
            at += 1;
        }
        let letters_end = name[..start].trim_end_matches(|c: char| "-_=.".contains(c)).len();
        let letters = &name[..letters_end];
        let word = &letters[letters.trim_end_matches(|c: char| c.is_ascii_alphabetic()).len()..];
        let is_place = PLACE_WORDS.contains(&word) || name[at..].starts_with("-of-");
        numbers.push(Number { start, end: at, word, is_place });
    }
    numbers
}

fn with_steps_wild(name: &str, steps: &mut Vec<u64>) -> String {
    let mut out = String::new();
    let mut at = 0;
    for number in numbers(name).into_iter().filter(|number| !number.is_place) {
        out.push_str(&name[at..number.start]);
        out.push('#');
        steps.push(name[number.start..number.end].parse().unwrap_or(u64::MAX));
        at = number.end;
    }
    out + &name[at..]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn is(path: &str, expected: &str) {
        assert_eq!(pattern(Path::new(path)), expected);
    }

    #[test]
    fn the_step_varies_whatever_the_framework_calls_it() {
        is("step_00100.pt", "step_#.pt");
        is("run1/ckpt_5.pt", "run1/ckpt_#.pt");
        is("seed3/500.pt", "seed3/#.pt");
        is("epoch=0-step=8.ckpt", "epoch=#-step=#.ckpt");
        is(
            "lightning_logs/version_0/checkpoints/epoch=1-step=16.ckpt",
            "lightning_logs/version_0/checkpoints/epoch=#-step=#.ckpt",
        );
        is("out/checkpoint-20/model.safetensors", "out/checkpoint-#/model.safetensors");
        is("weights7.pt", "weights#.pt");
        is("iter_0000100/__0_1.distcp", "iter_#/__0_1.distcp");
        is("10/default/d/abc", "#/default/d/abc");
    }

    #[test]
    fn steps_are_the_numbers_that_vary() {
        assert_eq!(steps(Path::new("run7/epoch=3-step=0120.ckpt")), [3, 120]);
        assert_eq!(steps(Path::new("checkpoint-20/model-00001-of-00002.safetensors")), [20]);
        assert!(steps(Path::new("last.ckpt")).is_empty());
    }

    #[test]
    fn a_checkpoint_that_is_a_directory_is_a_group() {
        let group = |path: &str| group(Path::new(path)).map(|directory| directory.to_string_lossy().into_owned());
        assert_eq!(group("Out/Checkpoint-20/model.safetensors").as_deref(), Some("Out/Checkpoint-20"));
        assert_eq!(group("iter_0000100/sub/__0_1.distcp").as_deref(), Some("iter_0000100"));
        assert_eq!(group("checkpoint-9/model-00001-of-00003.safetensors").as_deref(), Some("checkpoint-9"));
        for single in ["step_100.pt", "run/epoch=0-step=8.ckpt", "checkpoint-5/step_7.pt", "run2/last.ckpt", "a/b/c"] {
            assert_eq!(group(single), None, "{single}");
        }
    }

    #[test]
    fn ranks_shards_and_runs_do_not() {
        is(
            "global_step9/zero_pp_rank_0_mp_rank_01_optim_states.pt",
            "global_step#/zero_pp_rank_0_mp_rank_01_optim_states.pt",
        );
        is("checkpoint-9/model-00001-of-00003.safetensors", "checkpoint-#/model-00001-of-00003.safetensors");
        is("version-100/variables-0-of-2.ckpt", "version-#/variables-0-of-2.ckpt");
        is("checkpoint-9/rng_state_1.pth", "checkpoint-#/rng_state_1.pth");
        is("ckpt_step5_rank3.pt", "ckpt_step#_rank3.pt");
        is("seed1/ckpt.pt", "seed1/ckpt.pt");
        is("run2/last.ckpt", "run2/last.ckpt");
        is("lightning_logs/version_3/checkpoints/last.ckpt", "lightning_logs/version_3/checkpoints/last.ckpt");
    }
}
