//! The checkpoint that a file names as the best so far: Lightning's `ModelCheckpoint` writes it into each `.ckpt`,
//! transformers' Trainer into `trainer_state.json`.
//!
//! Of Lightning's, `callbacks` maps a callback's name to its state. A state with `best_model_path` names one. That path is also the
//! best of its `best_k_models`, which are not read.

use std::io;
use std::path::Path;

use serde::Deserializer;
use serde_json::value::RawValue;

use super::ReadAt;
use super::pickle::{Graph, Item};

const TRAINER_STATE: &str = "trainer_state.json";
/// A larger state of Trainer is not read. Each logged step takes some 150 bytes, so this is enough for 400,000.
pub const MAX_TRAINER_STATE: u64 = 64 << 20;
/// Endings of the names of Lightning's checkpoints.
const LIGHTNING: [&str; 3] = ["ckpt", "pt", "pth"];

/// Callbacks looked at: a job has some dozens.
const MAX_CALLBACKS: usize = 1 << 10;
/// Losses handed out. The largest log has half a million entries, and few of them two losses.
const MAX_LOSSES: usize = 1 << 20;
/// Names handed out: a job has a few callbacks that save checkpoints.
const MAX_NAMES: usize = 64;

/// Whether a file has the name of Trainer's state.
pub fn is_trainer_state(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name == TRAINER_STATE)
}

/// Whether a file of this name may name the best checkpoint of its run, however small it is.
pub fn may_name_best(path: &Path) -> bool {
    is_trainer_state(path) || path.extension().is_some_and(|ending| LIGHTNING.iter().any(|known| ending == *known))
}

/// The paths that a pickle's callbacks name; `None` if no callback of it speaks of the best.
pub(super) fn named(graph: &Graph) -> Option<Vec<String>> {
    let callbacks = graph.pairs(graph.get(graph.root, "callbacks")?).iter().take(MAX_CALLBACKS);
    let named = callbacks.filter_map(|&(_, state)| graph.get(state, "best_model_path"));
    let named: Vec<Item> = named.take(MAX_NAMES).collect();
    let words = named.iter().filter_map(|&item| graph.str(item)).filter(|name| !name.is_empty());
    (!named.is_empty()).then(|| words.map(String::from).collect())
}

/// The name of the best checkpoint in Trainer's state, or none. All of the file is read.
///
/// # Errors
/// Those of `src`; `InvalidData` if the file is no such state, or truncated.
pub fn best_of_trainer(src: &dyn ReadAt) -> io::Result<Option<String>> {
    #[derive(serde::Deserialize)]
    struct State {
        best_model_checkpoint: Option<String>,
    }
    let state: State = serde_json::from_slice(&json(src)?).map_err(invalid)?;
    Ok(state.best_model_checkpoint)
}

/// A loss that Trainer has logged: its word, the step, and the value.
pub type Logged = (&'static str, u64, f64);

/// The losses in the log of Trainer's state, in its order, at most about a million. An entry of another form is left out. All of
/// the file is read.
///
/// # Errors
/// As of [`best_of_trainer`].
pub fn losses_of_trainer(src: &dyn ReadAt) -> io::Result<Vec<Logged>> {
    #[derive(serde::Deserialize)]
    struct State<'a> {
        #[serde(borrow)]
        log_history: Option<&'a RawValue>,
    }
    let json = json(src)?;
    let state: State = serde_json::from_slice(&json).map_err(invalid)?;
    let log = state.log_history.map_or("[]", RawValue::get);
    // The log is valid JSON, so an error says that it is no array.
    Ok(serde_json::Deserializer::from_str(log).deserialize_seq(Log { most: MAX_LOSSES }).unwrap_or_default())
}

/// Reads entry by entry, and values as their text: a value in memory takes many times the room of its text.
struct Log {
    most: usize,
}

impl<'de> serde::de::Visitor<'de> for Log {
    type Value = Vec<Logged>;

    fn expecting(&self, out: &mut std::fmt::Formatter) -> std::fmt::Result {
        out.write_str("a log")
    }

    fn visit_seq<A: serde::de::SeqAccess<'de>>(self, mut entries: A) -> Result<Vec<Logged>, A::Error> {
        let mut losses = Vec::new();
        while let Some(entry) = entries.next_element::<&RawValue>()? {
            losses.extend(logged(entry.get()).into_iter().flatten().take(self.most - losses.len()));
        }
        Ok(losses)
    }
}

/// The losses of an entry of the log.
fn logged(entry: &str) -> Option<impl Iterator<Item = Logged>> {
    #[derive(serde::Deserialize)]
    struct Entry<'a> {
        #[serde(borrow)]
        step: Option<&'a RawValue>,
        #[serde(borrow)]
        loss: Option<&'a RawValue>,
        #[serde(borrow)]
        eval_loss: Option<&'a RawValue>,
    }
    // serde reads an array as an entry too.
    let entry: Entry = entry.starts_with('{').then(|| serde_json::from_str(entry).ok())??;
    let number = |value: Option<&RawValue>| value?.get().parse::<f64>().ok().filter(|number| number.is_finite());
    let step = number(entry.step).filter(|step| *step >= 0.0)? as u64;
    let of = |word, value| number(value).map(|value| (word, step, value));
    Some([of("loss", entry.loss), of("eval_loss", entry.eval_loss)].into_iter().flatten())
}

/// The bytes of a state of Trainer, as JSON.
fn json(src: &dyn ReadAt) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; src.size() as usize];
    src.read_exact_at(&mut bytes, 0)?;
    Ok(with_plain_values(bytes))
}

fn invalid(error: serde_json::Error) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

/// The same JSON, with plain values in place of `NaN`, `Infinity` and `-Infinity`. Python writes these for a loss or a
/// norm that overflowed, and JSON has no such numbers.
fn with_plain_values(mut json: Vec<u8>) -> Vec<u8> {
    const OTHERS: [(&[u8], &[u8]); 3] = [(b"-Infinity", b"     null"), (b"Infinity", b"    null"), (b"NaN", b"\"\" ")];
    let (mut at, mut in_text) = (0, false);
    while at < json.len() {
        match json[at] {
            b'"' => in_text = !in_text,
            b'\\' if in_text => at += 1,
            b'-' | b'I' | b'N' if !in_text => {
                if let Some((word, plain)) = OTHERS.iter().find(|(word, _)| json[at..].starts_with(word)) {
                    json[at..at + word.len()].copy_from_slice(plain);
                }
            }
            _ => {}
        }
        at += 1;
    }
    json
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loss_that_overflowed_hides_no_best_checkpoint() {
        let state = br#"{"log_history": [{"grad_norm": NaN, "a \" NaN": -Infinity}, {"x": Infinity}],
            "best_model_checkpoint": "out/NaN-run/checkpoint-40"}"#;
        let best = best_of_trainer(&state.to_vec()).unwrap();
        assert_eq!(best, Some("out/NaN-run/checkpoint-40".into()));
        assert_eq!(losses_of_trainer(&state.to_vec()).unwrap(), []);
        let cut = best_of_trainer(&state[..40].to_vec()).unwrap_err();
        assert_eq!(cut.kind(), io::ErrorKind::InvalidData);
    }
    #[test]
    fn the_losses_of_a_log_are_its_finite_numbers() {
        let state = br#"{"log_history": [{"loss": 2.5, "step": 10}, {"eval_loss": 2, "step": 10, "epoch": 1.0},
            {"loss": NaN, "step": 20}, {"loss": "2.0", "step": 20}, {"loss": 1.0, "step": -1}, {"step": 30}]}"#;
        assert_eq!(losses_of_trainer(&state.to_vec()).unwrap(), [("loss", 10, 2.5), ("eval_loss", 10, 2.0)]);
        assert_eq!(losses_of_trainer(&b"{}".to_vec()).unwrap(), []);
    }

    #[test]
    fn an_entry_of_another_form_hides_no_other() {
        let log = |log: String| losses_of_trainer(&format!("{{\"log_history\": {log}}}").into_bytes()).unwrap();
        for other in ["null", "{}", "7", "\"[]\"", "[]"] {
            assert_eq!(log(other.into()), [], "{other}");
            let both = format!("[{other}, [1, 2.0], {{\"loss\": 1e999, \"step\": 1}}, {{\"loss\": 2, \"step\": 10}}]");
            assert_eq!(log(both), [("loss", 10, 2.0)], "{other}");
        }
        let many = "[],".repeat(100_000);
        let deep =
            format!("[{{\"loss\": [{many}[]], \"step\": 1}}, {{\"x\": [{many}[]], \"eval_loss\": 3, \"step\": 2}}]");
        assert_eq!(log(deep), [("eval_loss", 2, 3.0)]);
        let entries =
            "[{\"loss\": 1, \"eval_loss\": 2, \"step\": 1}, {\"loss\": 3, \"step\": 4}, {\"loss\": 5, \"step\": 6}]";
        let kept = serde_json::Deserializer::from_str(entries).deserialize_seq(Log { most: 3 }).unwrap();
        assert_eq!(kept, [("loss", 1, 1.0), ("eval_loss", 1, 2.0), ("loss", 4, 3.0)]);
    }
}
