//! Writes a distributed checkpoint of torch, as one rank does: a file with a zip for each tensor, and `.metadata`.

use std::path::Path;

use anyhow::Result;
use formats::{Key, dotted, type_name};
use indicatif::ProgressBar;

use crate::tools::output::Output;

use super::pickle::Value::{self, Dict, False, Global, Int, List, None, Object, Text, Tuple};
use super::pickle::{call, size, tensor, text};
use super::source::Source;
use super::torch::{Zip, write_zips};

const FILE: &str = "__0_0.distcp";
const INDEX: &str = ".metadata";
const METADATA: &str = "torch.distributed.checkpoint.metadata";

/// Writes both files. Tied tensors are written once for each name, as torch does it.
pub(super) fn write(output: &mut Output, mode: u32, sources: &[Source], bar: &ProgressBar) -> Result<()> {
    let file = output.create(Path::new(FILE), mode)?;
    let (mut zips, mut places, mut end) = (Vec::new(), Vec::new(), 0);
    for source in sources {
        let zip = Zip::new(end, tensor(source, 0).pickle(), &[source]);
        places.push((source, end, zip.end() - end));
        end = zip.end();
        zips.push(zip);
    }
    write_zips(&file, zips, bar)?;
    file.sync()?;
    let index = output.create(Path::new(INDEX), mode)?;
    index.write_all_at(&metadata(&places).pickle(), 0)?;
    index.sync()
}

/// The index of tensors, each with the place and length of its zip in the file.
fn metadata(places: &[(&Source, u64, u64)]) -> Value {
    let object = |class, fields: Vec<(&str, Value)>| {
        let fields = fields.into_iter().map(|(name, value)| (text(name), value));
        Object(Box::new(class), Box::new(Dict(fields.collect())))
    };
    let zeros = |source: &Source| size(&vec![0; source.shape.len()]);
    let (mut tensors, mut paths, mut storage) = (Vec::new(), Vec::new(), Vec::new());
    for (source, start, len) in places {
        let name = dotted(&source.keys);
        let layout = call("torch.serialization", "_get_layout", vec![text("torch.strided")]);
        let memory = call(METADATA, "_MEM_FORMAT_ENCODING", vec![Int(0)]);
        let properties = Tuple(vec![Global("torch", type_name(source.dtype)), layout, False, memory, False]);
        let properties = Object(Box::new(Global(METADATA, "TensorProperties")), Box::new(properties));
        let chunk = vec![("offsets", zeros(source)), ("sizes", size(&source.shape))];
        let chunks = List(vec![object(Global(METADATA, "ChunkStorageMetadata"), chunk)]);
        let about = vec![("properties", properties), ("size", size(&source.shape)), ("chunks", chunks)];
        tensors.push((text(&name), object(Global(METADATA, "TensorStorageMetadata"), about)));
        // torch keeps numbers of lists alone as numbers.
        let path = source.keys.iter().map(|key| match key {
            Key::Index(index) => Int(*index as i64),
            key => Text(key.to_string()),
        });
        paths.push((text(&name), Tuple(path.collect())));
        let index = vec![("fqn", text(&name)), ("offset", zeros(source)), ("index", Int(0))];
        let place = vec![("relative_path", text(FILE)), ("offset", Int(*start as i64)), ("length", Int(*len as i64))];
        let class = Global("torch.distributed.checkpoint.filesystem", "_StorageInfo");
        storage.push((object(Global(METADATA, "MetadataIndex"), index), object(class, place)));
    }
    let tables = [("state_dict_metadata", tensors), ("planner_data", paths), ("storage_data", storage)];
    let mut fields: Vec<_> = tables.into_iter().map(|(name, table)| (name, Dict(table))).collect();
    fields.extend([("storage_meta", None), ("version", None)]);
    object(Global(METADATA, "Metadata"), fields)
}
