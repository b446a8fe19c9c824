//! Reads the numbers in a path: which ones count training, and which ones name a rank or a shard.
//!
//! Only one component of a path may vary, the one that counts training steps. In it only the numbers vary that do not
//! name a rank or shard. Everything else is taken literally. Works on bytes: two names that differ in bytes that are
//! not UTF-8 must never become one.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use formats::numbers_ranks;

/// Words before a number that counts training.
const STEP_WORDS: [&str; 12] =
    ["checkpoint", "ckpt", "chkpt", "cp", "step", "steps", "iter", "iteration", "it", "epoch", "ep", "update"];
/// The words with the finest count: in `epoch=3-step=120` the number 120 counts.
const FINE_WORDS: [&str; 6] = ["step", "steps", "iter", "iteration", "it", "update"];
/// Before the iterations in the names of transformers' Trainer and of those who follow it.
const TRAINERS: &str = "checkpoint-";
/// Words before a number that names a file's writer, not its time.
const PLACE_WORDS: [&str; 27] = [
    "rank", "shard", "part", "of", "mp", "pp", "tp", "dp", "ep_rank", "worker", "node", "gpu", "replica", "expert",
    "layer", "stage", "process", "seed", "fold", "run", "job", "zero", "client", "member", "device", "host", "cuda",
];
/// Of these, the words before the number of a process or a part: all of them write one state together.
const RANK_WORDS: [&str; 16] = [
    "rank", "shard", "part", "mp", "pp", "tp", "dp", "worker", "node", "gpu", "stage", "process", "expert", "device",
    "host", "cuda",
];
/// Words before a result that a name shows beside the step: of these the lowest is the best,
const LOSSES: [&str; 12] =
    ["loss", "error", "err", "nll", "mse", "mae", "rmse", "ppl", "perplexity", "wer", "cer", "fid"];
/// and of these the highest.
const SCORES: [&str; 14] =
    ["acc", "accuracy", "score", "auc", "ap", "map", "iou", "miou", "dice", "psnr", "ssim", "bleu", "reward", "return"];
/// Results that may be either.
const OTHER_RESULTS: [&str; 5] = ["metric", "val", "valid", "test", "kl"];
/// Words before a setting of the run.
const SETTING_WORDS: [&str; 20] = [
    "lr", "wd", "decay", "rate", "lambda", "alpha", "beta", "gamma", "eps", "dropout", "tau", "temp", "temperature",
    "momentum", "sigma", "noise", "scale", "ratio", "clip", "dim",
];
/// Words that count training alone, and name a rank beside another such word: `tp0_pp1_ep3` is an expert-parallel rank.
const EITHER: [&str; 2] = ["ep", "cp"];
/// Ends of names of files that are being written.
const TEMPORARY: [&str; 7] = [".tmp", ".temp", ".part", ".partial", ".incomplete", ".swp", "~"];
/// Stands between the index of a shard and the number of shards.
const OF: &str = "-of-";

/// The numbers in a path that count training.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counted {
    /// The path with each of them replaced by `#`. Case matters: `run` and `Run` differ.
    pub series: Vec<u8>,
    /// All of them, in order. A number above 64 bits is `u64::MAX`.
    pub steps: Vec<u64>,
    /// The finest count: the last after a word such as `step`, else the last after any such word, else the first.
    pub step: Option<u64>,
    /// A word for training stands before one of them. Otherwise they count training only if the files prove it.
    pub is_worded: bool,
    /// They count iterations, by such a word.
    pub is_fine: bool,
}

/// The numbers in a file's path that count training.
pub fn of_file(path: &Path) -> Counted {
    counted(path, varying)
}

/// The numbers in the path of a directory that is one state: those of its own name, if it has any.
pub fn of_directory(path: &Path) -> Counted {
    counted(path, |components| numbered_last(components).or_else(|| varying(components)))
}

/// The path of a file in lower case, with each number that counts training replaced by `#`. It is the same for all
/// states of one file.
pub fn pattern(path: &Path) -> Vec<u8> {
    let mut pattern = of_file(path).series;
    pattern.make_ascii_lowercase();
    pattern
}

/// The numbers in a file's path that count training.
pub fn steps(path: &Path) -> Vec<u64> {
    of_file(path).steps
}

/// Iterations between two states of a file, as their names count them.
pub fn iterations(before: &Path, after: &Path) -> Option<f64> {
    let counted = [before, after].map(|path| Some(of_file(path)).filter(|counted| counted.is_fine)?.step);
    let [Some(before), Some(after)] = counted else { return None };
    after.checked_sub(before).filter(|count| *count > 0).map(|count| count as f64)
}

/// A result in a file's name.
#[derive(Clone, Debug, PartialEq)]
pub struct NamedResult {
    /// The word before it; empty if there is none (Keras' `weights.03-0.08.h5`).
    pub word: String,
    /// Its value.
    pub value: f64,
    /// Whether the lowest is the best. `None`: the word does not say.
    pub lowest: Option<bool>,
}

/// The results that a file's name shows beside its step: `epoch=3-val_loss=0.08.ckpt`.
pub fn results(path: &Path) -> Vec<NamedResult> {
    let folded: Vec<String> = components(path).map(fold).collect();
    let Some(name) = varying(&folded).and_then(|at| folded.get(at)) else { return Vec::new() };
    let numbers = numbers(name);
    let mut found = Vec::new();
    for (number, next) in numbers.iter().zip(numbers.iter().skip(1).map(Some).chain([None])) {
        let fraction = next.filter(|next| &name[number.end..next.start] == ".");
        let is_fraction =
            name[..number.start].ends_with('.') && name[..number.start - 1].ends_with(|c: char| c.is_ascii_digit());
        let is_value = is_result(number.word) || number.word.is_empty() && fraction.is_some();
        if !number.varies || is_fraction || !is_value {
            continue;
        }
        let is_negative = ["=-", "_-", "--"].iter().any(|sign| name[..number.start].ends_with(sign));
        let sign = if is_negative { -1.0 } else { 1.0 };
        let Ok(value) = name[number.start..fraction.unwrap_or(number).end].parse::<f64>() else { continue };
        let lowest = match number.word {
            word if LOSSES.contains(&word) => Some(true),
            word if SCORES.contains(&word) => Some(false),
            _ => None,
        };
        found.push(NamedResult { word: number.word.to_string(), value: sign * value, lowest });
    }
    found
}

fn is_result(word: &str) -> bool {
    LOSSES.contains(&word) || SCORES.contains(&word) || OTHER_RESULTS.contains(&word)
}

/// What names the files of one checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Group {
    /// The directory that holds them.
    pub directory: PathBuf,
    /// If the directory holds other checkpoints beside them: the numbers that count training in their own names.
    pub steps: Option<Vec<u64>>,
    /// If each of them is a whole state, or a rank's part of one: their name without its step and rank.
    pub name: Option<String>,
}

impl Group {
    /// The group of a file. Files that no number counts have none. `is_whole`: a run can go on from the file alone, or
    /// from it and those of other ranks.
    pub fn of(path: &Path, is_whole: bool) -> Option<Group> {
        if let Some(directory) = group(path) {
            return Some(Group { directory, steps: None, name: None });
        }
        let own = fold(path.file_name()?.as_bytes());
        let numbers = numbers(&own);
        let counts = |number: &&Number<'_>| number.varies && STEP_WORDS.contains(&number.word);
        let value = |number: &Number<'_>| own[number.start..number.end].parse().unwrap_or(u64::MAX);
        let steps = match numbers.iter().any(|number| counts(&number)) {
            true => numbers.iter().filter(counts).map(value).collect(),
            false => steps(path),
        };
        let is_fraction = |number: &Number<'_>| own[..number.start].ends_with('.');
        let is_left_out = |number: &&Number<'_>| {
            number.varies || RANK_WORDS.contains(&number.word) || number.word.is_empty() && !is_fraction(number)
        };
        let name = is_whole.then(|| {
            let (mut name, mut done) = (String::new(), 0);
            for number in numbers.iter().filter(is_left_out) {
                name.push_str(&own[done..number.start]);
                name.push('#');
                done = number.end;
            }
            name + &own[done..]
        });
        let directory = path.parent()?.to_path_buf();
        Some(steps).filter(|steps| !steps.is_empty()).map(|steps| Group { directory, steps: Some(steps), name })
    }
}

/// The directory that holds all files of a checkpoint, if the component that counts training is a directory.
pub fn group(path: &Path) -> Option<PathBuf> {
    let folded: Vec<String> = components(path).map(fold).collect();
    let step = varying(&folded).filter(|step| step + 1 < folded.len())?;
    let outermost = (0..=step).find(|at| varies_with(&folded, *at, step)).unwrap_or(step);
    Some(path.iter().take(outermost + 1).collect())
}

/// The directory of a file's run: all states of the file, and all files of their checkpoints, have the same. It lies above
/// the first component that may count training, so it may hold other runs as well.
pub fn run(path: &Path) -> PathBuf {
    let folded: Vec<String> = components(path).map(fold).collect();
    let above = folded.len().saturating_sub(1);
    let first = (0..above).find(|at| counts(&folded[*at]) || is_version(&folded, *at));
    path.iter().take(first.unwrap_or(above)).collect()
}

/// Whether a file's name says that it is being written, or is left of a file that was: it goes, or gets another name.
pub fn is_temporary(path: &Path) -> bool {
    let name = fold(path.file_name().unwrap_or_default().as_bytes());
    name.starts_with('.') || TEMPORARY.iter().any(|end| name.ends_with(end))
}

/// The name that a file gets once it is written, as far as a temporary name shows it.
pub fn finished(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().as_bytes();
    let folded = fold(name);
    let end = TEMPORARY.iter().find(|end| folded.ends_with(**end)).map_or(0, |end| end.len());
    let name = &name[..name.len().saturating_sub(end)];
    path.with_file_name(OsStr::from_bytes(name.strip_prefix(b".").unwrap_or(name)))
}

/// True if the last name of a path shows by itself that its number counts training: `checkpoint-10`, `global_step5` or
/// a bare `100`, but not `exp1`.
pub fn counts_training(path: &Path) -> bool {
    components(path).last().is_some_and(|name| counts(&fold(name)))
}

/// One of several files that form one state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    /// Its index.
    pub index: u64,
    /// The number of shards.
    pub total: u64,
    /// The name without the index; all shards share it.
    pub of: Vec<u8>,
}

/// The shard that a name shows: `variables-0-of-2.ckpt`, `model-00001-of-00003.safetensors`.
pub fn shard(name: &[u8]) -> Option<Shard> {
    let folded = fold(name);
    let numbers = numbers(&folded);
    let at = numbers.iter().position(|number| folded[number.end..].starts_with(OF))?;
    let total = numbers.get(at + 1).filter(|total| total.start == numbers[at].end + OF.len())?;
    let value = |number: &Number<'_>| folded[number.start..number.end].parse().ok();
    let of = [&name[..numbers[at].start], b"*", &name[numbers[at].end..]].concat();
    Some(Shard { index: value(&numbers[at])?, total: value(total)?, of })
}

fn components(path: &Path) -> impl Iterator<Item = &[u8]> {
    path.iter().map(|name| name.as_bytes())
}

/// The name in lower case, with the same length. Bytes outside ASCII are neither letters, digits nor separators.
fn fold(name: &[u8]) -> String {
    name.iter().map(|byte| if byte.is_ascii() { byte.to_ascii_lowercase() as char } else { '\u{1}' }).collect()
}

/// Reads the numbers of the component that `varying` chooses.
fn counted(path: &Path, varying: impl Fn(&[String]) -> Option<usize>) -> Counted {
    let names: Vec<&[u8]> = components(path).collect();
    let folded_names: Vec<String> = names.iter().map(|name| fold(name)).collect();
    let varies = varying(&folded_names);
    let mut series = Vec::with_capacity(path.as_os_str().len());
    let mut counts: Vec<(&str, u64)> = Vec::new();
    for (at, (name, folded)) in names.iter().zip(&folded_names).enumerate() {
        if at > 0 {
            series.push(b'/');
        }
        let mut done = 0;
        let is_varying = varies.is_some_and(|varies| varies_with(&folded_names, at, varies));
        for number in numbers(folded).into_iter().filter(|number| is_varying && number.varies) {
            series.extend_from_slice(&name[done..number.start]);
            series.push(b'#');
            let is_trainers = folded[..number.start].ends_with(TRAINERS);
            let word = if is_trainers { TRAINERS } else { number.word };
            counts.push((word, folded[number.start..number.end].parse().unwrap_or(u64::MAX)));
            done = number.end;
        }
        series.extend_from_slice(&name[done..]);
    }
    let after = |words: &[&str]| counts.iter().rev().find(|(word, _)| words.contains(word));
    let fine = after(&FINE_WORDS).or_else(|| after(&[TRAINERS]));
    let worded = fine.or_else(|| after(&STEP_WORDS));
    // Versions of shards are the only others.
    let is_version = varies.is_some_and(|at| is_version(&folded_names, at));
    let (is_worded, is_fine) = (worded.is_some() || is_version, fine.is_some());
    let step = worded.or(counts.first()).map(|(_, step)| *step);
    Counted { series, steps: counts.iter().map(|(_, step)| *step).collect(), step, is_worded, is_fine }
}

/// True if a name shows that a number in it counts training.
fn counts(name: &str) -> bool {
    let stem = name.split('.').next().unwrap_or_default();
    let bare = !stem.is_empty() && stem.bytes().all(|b| b.is_ascii_digit());
    bare || has_step(name)
}

/// True if a number in a name stands behind a word that counts training.
fn has_step(name: &str) -> bool {
    step_of(name).is_some()
}

/// The last number in a name that stands behind a word that counts training.
fn step_of(name: &str) -> Option<&str> {
    let numbers = numbers(name);
    let step = numbers.iter().rev().find(|number| number.varies && STEP_WORDS.contains(&number.word))?;
    Some(&name[step.start..step.end])
}

/// Whether the component at `at` varies, if the one at `varying` does: it is that one, or it has the same step, as
/// `checkpoint-20` in `checkpoint-20/global_step20`.
fn varies_with(components: &[String], at: usize, varying: usize) -> bool {
    let step = |at: usize| components.get(at).and_then(|name| step_of(name));
    at == varying || at < varying && step(at).is_some() && step(at) == step(varying)
}

/// The component that may vary: the deepest that counts training, else the last if it has a number at all. A name of
/// numbers with points between them is a setting or a place in a grid, as `0.1`.
fn varying(components: &[String]) -> Option<usize> {
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    if let [above @ .., name] = components
        && name.contains('.')
        && name.split('.').all(is_number)
    {
        return above.iter().rposition(|name| has_step(name)).or_else(|| above.iter().position(|name| counts(name)));
    }
    let counts_steps = |at: usize, name: &str| has_step(name) || is_version(components, at);
    let step = components.iter().enumerate().rev().find(|(at, name)| counts_steps(*at, name));
    if let Some((at, _)) = step {
        return Some(at);
    }
    // Of `10/0.pt` nobody knows which number is the step.
    let mut bare = components.iter().enumerate().filter(|(_, name)| counts(name)).map(|(at, _)| at);
    match (bare.next(), bare.next()) {
        (Some(at), None) => Some(at),
        (None, _) => numbered_last(components),
        (Some(_), Some(_)) => None,
    }
}

/// Whether a component names a version with shards in it. Elsewhere a version is a run.
fn is_version(components: &[String], at: usize) -> bool {
    let sharded = components.last().is_some_and(|name| name.contains(OF));
    sharded && at + 2 == components.len() && numbers(&components[at]).iter().any(|number| number.word == "version")
}

/// The last component, if it has a number that may vary.
fn numbered_last(components: &[String]) -> Option<usize> {
    let name = components.last()?;
    numbers(name).iter().any(|number| number.varies).then_some(components.len() - 1)
}

struct Number<'a> {
    start: usize,
    end: usize,
    /// The letters before it, without separators.
    word: &'a str,
    /// It counts training, or changes with it. Other numbers name a rank, a part or a run.
    varies: bool,
}

/// The runs of digits in a name, with the word before each.
fn numbers(name: &str) -> Vec<Number<'_>> {
    let bytes = name.as_bytes();
    let of_rank = numbers_ranks(name);
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
        let is_place = PLACE_WORDS.contains(&word) || name[at..].starts_with(OF) || of_rank;
        let word = if is_place || STEP_WORDS.contains(&word) { word } else { word_behind(&name[at..]).unwrap_or(word) };
        numbers.push(Number { start, end: at, word, varies: !is_place });
    }
    let is_of_ranks = numbers.iter().any(|number| ["tp", "pp"].contains(&number.word));
    // Accelerate numbers the optimizers of one state: optimizer.bin, optimizer_1.bin.
    let is_accelerates = name.starts_with("optimizer_") && name.ends_with(".bin");
    for number in &mut numbers {
        let is_one_of_few = is_accelerates && number.word == "optimizer" && number.end - number.start == 1;
        number.varies &= !(is_of_ranks && EITHER.contains(&number.word) || is_one_of_few);
    }
    keep_others(name, &mut numbers);
    numbers
}

/// The word for training behind a number: `rl_model_1000_steps.zip`. Before another number it is that one's.
fn word_behind(rest: &str) -> Option<&str> {
    let rest = rest.strip_prefix(['-', '_']).unwrap_or(rest);
    let word = &rest[..rest.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(rest.len())];
    let next = rest[word.len()..].trim_start_matches(['-', '_', '=']);
    Some(word).filter(|word| STEP_WORDS.contains(word) && !next.starts_with(|c: char| c.is_ascii_digit()))
}

/// Takes the numbers for places that may name another run or model. Those behind a word for training vary, and results
/// such as `val_mrr=0.43`. Without such a word one number may vary, if it is the only one that stands by itself:
/// `exp1-5`, but not `5_0`. So `model_lr0.1_step5` and `model_lr0.01_step5` are no states of one run.
fn keep_others(name: &str, numbers: &mut [Number<'_>]) {
    let bytes = name.as_bytes();
    let letter = |at: Option<usize>| at.and_then(|at| bytes.get(at)).is_some_and(u8::is_ascii_alphabetic);
    let is_apart = |number: &Number<'_>| !letter(number.start.checked_sub(1)) && !letter(Some(number.end));
    let has_step = numbers.iter().any(|number| number.varies && STEP_WORDS.contains(&number.word));
    // Numbers that may be a step: neither a place nor a part of a fraction.
    let mut open = Vec::new();
    for at in 0..numbers.len() {
        let (before, rest) = numbers.split_at_mut(at);
        let Some((number, after)) = rest.split_first_mut() else { return };
        let is_fraction = |whole: &Number<'_>, part: &Number<'_>| &bytes[whole.end..part.start] == b".";
        if let Some(whole) = before.last().filter(|whole| is_fraction(whole, number)) {
            number.varies = whole.varies;
            continue;
        }
        let is_result = is_result(number.word);
        let is_value = is_apart(number) && after.first().is_some_and(|part| is_fraction(number, part));
        if is_value || is_result {
            number.varies &= is_result || !SETTING_WORDS.contains(&number.word);
        } else if has_step {
            number.varies &= STEP_WORDS.contains(&number.word);
        } else if number.varies {
            open.push(at);
        }
    }
    if open.len() > 1 {
        let mut apart = open.iter().copied().filter(|at| is_apart(&numbers[*at]));
        let step = apart.next().filter(|_| apart.next().is_none());
        open.into_iter().filter(|at| Some(*at) != step).for_each(|at| numbers[at].varies = false);
    }
}

#[cfg(test)]
mod tests;
