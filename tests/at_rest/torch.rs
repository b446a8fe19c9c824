//! Files as `torch.save` writes them, made from a description.

use super::series::{Dtype, Tensor};

/// The parts of a checkpoint.
pub(crate) enum Value {
    Dict(Vec<(Value, Value)>),
    List(Vec<Value>),
    Text(String),
    Int(i32),
    Float(f64),
    /// A tuple, as Adam's `betas` are.
    Pair(f64, f64),
    Tensor(Tensor),
}

impl Value {
    pub(crate) fn named(entries: impl IntoIterator<Item = (impl Into<String>, Value)>) -> Value {
        Value::Dict(entries.into_iter().map(|(key, value)| (Value::Text(key.into()), value)).collect())
    }

    pub(crate) fn numbered(entries: impl IntoIterator<Item = Value>) -> Value {
        Value::Dict(entries.into_iter().enumerate().map(|(at, value)| (Value::Int(at as i32), value)).collect())
    }
}

/// A state dict as optimizers of torch make it, from the state of each parameter.
pub(crate) fn optimizer(state: Vec<Value>) -> Value {
    let parameters = (0..state.len()).map(|at| Value::Int(at as i32)).collect();
    let group = Value::named([("lr", Value::Float(0.01)), ("params", Value::List(parameters))]);
    Value::named([("state", Value::numbered(state)), ("param_groups", Value::List(vec![group]))])
}

/// The file, and the offset of each tensor's bytes, in their order.
pub(crate) fn save(value: &Value) -> (Vec<u8>, Vec<std::ops::Range<usize>>) {
    let (mut pickle, mut storages) = (vec![0x80, 2], Vec::new());
    put(value, &mut pickle, &mut storages);
    pickle.push(b'.');
    zip(&pickle, &storages)
}

fn put(value: &Value, out: &mut Vec<u8>, storages: &mut Vec<Vec<u8>>) {
    let text = |out: &mut Vec<u8>, text: &str| {
        out.push(b'X');
        out.extend_from_slice(&(text.len() as u32).to_le_bytes());
        out.extend_from_slice(text.as_bytes());
    };
    let int = |out: &mut Vec<u8>, value: i32| {
        out.push(b'J');
        out.extend_from_slice(&value.to_le_bytes());
    };
    match value {
        Value::Dict(entries) => {
            out.extend_from_slice(b"}(");
            for (key, value) in entries {
                put(key, out, storages);
                put(value, out, storages);
            }
            out.push(b'u');
        }
        Value::List(items) => {
            out.extend_from_slice(b"](");
            items.iter().for_each(|item| put(item, out, storages));
            out.push(b'e');
        }
        Value::Text(value) => text(out, value),
        Value::Int(value) => int(out, *value),
        Value::Float(value) => {
            out.push(b'G');
            out.extend_from_slice(&value.to_be_bytes());
        }
        Value::Pair(first, second) => {
            for value in [first, second] {
                out.push(b'G');
                out.extend_from_slice(&value.to_be_bytes());
            }
            out.push(0x86);
        }
        Value::Tensor(tensor) => {
            let class = match tensor.dtype {
                Dtype::F64 => "DoubleStorage",
                Dtype::F16 => "HalfStorage",
                Dtype::BF16 => "BFloat16Storage",
                Dtype::I64 => "LongStorage",
                _ => "FloatStorage",
            };
            out.extend_from_slice(b"ctorch._utils\n_rebuild_tensor_v2\n((");
            text(out, "storage");
            out.extend_from_slice(format!("ctorch\n{class}\n").as_bytes());
            text(out, &storages.len().to_string());
            text(out, "cpu");
            int(out, tensor.values.len() as i32);
            out.extend_from_slice(b"tQK\0(");
            tensor.shape.iter().for_each(|&length| int(out, length as i32));
            out.extend_from_slice(b"t(");
            for at in 0..tensor.shape.len() {
                int(out, tensor.shape[at + 1..].iter().product::<usize>() as i32);
            }
            out.extend_from_slice(b"t\x89}tR");
            storages.push(tensor.bytes());
        }
    }
}

/// A zip of torch's layout.
fn zip(pickle: &[u8], storages: &[Vec<u8>]) -> (Vec<u8>, Vec<std::ops::Range<usize>>) {
    let (mut out, mut directory, mut places) = (Vec::new(), Vec::new(), Vec::new());
    let storages = storages.iter().enumerate().map(|(at, bytes)| (format!("archive/data/{at}"), bytes.as_slice()));
    let first = [("archive/data.pkl".to_string(), pickle), ("archive/byteorder".to_string(), b"little".as_slice())];
    let mut count = 0u16;
    for (name, payload) in first.into_iter().chain(storages) {
        // Payloads begin at multiples of 64, padded in the extra field.
        let padding = (64 - (out.len() + 30 + name.len() + 4) % 64) % 64;
        let header = out.len() as u32;
        let mut common = vec![0u8; 26];
        common[10..14].copy_from_slice(&crc32fast::hash(payload).to_le_bytes());
        common[14..18].copy_from_slice(&(payload.len() as u32).to_le_bytes());
        common[18..22].copy_from_slice(&(payload.len() as u32).to_le_bytes());
        common[22..24].copy_from_slice(&(name.len() as u16).to_le_bytes());
        out.extend_from_slice(b"PK\x03\x04");
        out.extend_from_slice(&common[..24]);
        out.extend_from_slice(&(padding as u16 + 4).to_le_bytes());
        out.extend_from_slice(name.as_bytes());
        out.extend_from_slice(b"FB");
        out.extend_from_slice(&(padding as u16).to_le_bytes());
        out.resize(out.len() + padding, b'Z');
        if name.contains("/data/") {
            places.push(out.len()..out.len() + payload.len());
        }
        out.extend_from_slice(payload);
        directory.extend_from_slice(b"PK\x01\x02\0\0");
        directory.extend_from_slice(&common);
        directory.extend_from_slice(&[0; 10]);
        directory.extend_from_slice(&header.to_le_bytes());
        directory.extend_from_slice(name.as_bytes());
        count += 1;
    }
    let (at, len) = (out.len() as u32, directory.len() as u32);
    out.extend_from_slice(&directory);
    out.extend_from_slice(b"PK\x05\x06\0\0\0\0");
    out.extend_from_slice(&count.to_le_bytes());
    out.extend_from_slice(&count.to_le_bytes());
    out.extend_from_slice(&len.to_le_bytes());
    out.extend_from_slice(&at.to_le_bytes());
    out.extend_from_slice(&[0, 0]);
    (out, places)
}
