//! Writes safetensors: one file, or several with an index, as transformers does.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::path::Path;

use anyhow::{Result, bail};
use codec::Dtype;
use formats::dotted;
use indicatif::ProgressBar;
use serde_json::{Map, Value, json};

use crate::terminal::format::name;
use crate::tools::output::{NewFile, Output};

use super::source::{self, Source};

/// Names of a model's only file, and of the index of several.
const WHOLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Writes a file; with `most`, a directory of files of at most so many bytes of tensors. As `save_model` of safetensors does, a
/// tensor with several names is written once, under the first one: the metadata of its file tells the others.
pub(super) fn write(
    output: &mut Output,
    mode: u32,
    sources: &[Source],
    most: Option<u64>,
    bar: &ProgressBar,
) -> Result<()> {
    let mut named: Vec<(String, &Source)> = sources.iter().map(|source| (dotted(&source.keys), source)).collect();
    named.sort_by(|a, b| a.0.cmp(&b.0));
    let (mut first, mut tied) = (HashMap::new(), Vec::new());
    named.retain(|(of, source)| {
        let Some(identity) = source.identity() else { return true };
        let kept = first.entry(identity).or_insert_with(|| of.clone());
        let is_first = kept == of;
        if !is_first {
            say!("{} is {}: written once, as its metadata tells", name(of), name(&*kept));
            tied.push((of.clone(), kept.clone()));
        }
        is_first
    });
    if let Some((of, source)) = named.iter().find(|(_, source)| source.dtype == Dtype::C128) {
        bail!("{}: safetensors has no {}; convert to a file of torch", name(of), source.dtype.name());
    }
    let is_taken = |of: &&String| *of == "__metadata__";
    if let Some(of) =
        named.iter().map(|(of, _)| of).find(is_taken).or(tied.iter().map(|(of, _)| of).find(|of| *of == "format"))
    {
        bail!("safetensors has {} for itself; give the tensors other names with --prefix", name(of));
    }
    // As safetensors itself: the largest elements first, so that each lies at a multiple of its size.
    named.sort_by_key(|(_, source)| Reverse(source.dtype.size()));
    let mut files: Vec<&[(String, &Source)]> = Vec::new();
    let mut rest = &named[..];
    while !rest.is_empty() {
        let mut bytes = 0;
        let fits = |(_, source): &&(String, &Source)| {
            bytes += source.bytes();
            most.is_none_or(|most| bytes <= most)
        };
        let (file, after) = rest.split_at(rest.iter().take_while(fits).count().max(1));
        files.push(file);
        rest = after;
    }
    let mut index = Map::new();
    for (at, file) in files.iter().enumerate() {
        let path = match files.len() {
            1 => WHOLE.to_string(),
            count => format!("model-{:05}-of-{count:05}.safetensors", at + 1),
        };
        index.extend(file.iter().map(|(of, _)| (of.clone(), Value::from(path.as_str()))));
        let tied = tied.iter().filter(|(_, kept)| file.iter().any(|(of, _)| of == kept));
        let metadata: Map<String, Value> = tied.map(|(of, kept)| (of.clone(), Value::from(kept.as_str()))).collect();
        write_file(&output.create(Path::new(&path), mode)?, file, metadata, bar)?;
    }
    if files.len() > 1 {
        let total: u64 = named.iter().map(|(_, source)| source.bytes()).sum();
        let text = serde_json::to_vec_pretty(&json!({"metadata": {"total_size": total}, "weight_map": index}))?;
        let file = output.create(Path::new(INDEX), mode)?;
        file.write_all_at(&text, 0)?;
        file.sync()?;
    }
    Ok(())
}

fn write_file(
    file: &NewFile,
    sources: &[(String, &Source)],
    mut metadata: Map<String, Value>,
    bar: &ProgressBar,
) -> Result<()> {
    metadata.insert("format".into(), "pt".into());
    let mut header = Map::from_iter([("__metadata__".to_string(), Value::from(metadata))]);
    let mut end = 0;
    for (of, source) in sources {
        let start = end;
        end += source.bytes();
        let about = json!({"dtype": source.dtype.name(), "shape": source.shape, "data_offsets": [start, end]});
        header.insert(of.clone(), about);
    }
    let mut header = serde_json::to_vec(&header)?;
    header.resize(header.len().next_multiple_of(8), b' ');
    file.write_all_at(&(header.len() as u64).to_le_bytes(), 0)?;
    file.write_all_at(&header, 8)?;
    let mut end = 8 + header.len() as u64;
    let places = sources.iter().map(|(_, source)| {
        end += source.bytes();
        (*source, end - source.bytes())
    });
    source::write(file, &places.collect::<Vec<_>>(), bar)?;
    file.sync()
}
