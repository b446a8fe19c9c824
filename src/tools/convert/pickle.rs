//! Pickles as torch writes them, of protocol 2.

use formats::{Elements, storage_class, type_name};

use super::source::Source;

/// A value of a pickle.
pub(super) enum Value {
    None,
    False,
    Int(i64),
    Text(String),
    /// A class or function, by its module and name.
    Global(&'static str, &'static str),
    Tuple(Vec<Value>),
    List(Vec<Value>),
    Dict(Vec<(Value, Value)>),
    /// The result of a call, with these arguments.
    Call(Box<Value>, Vec<Value>),
    /// An object of a class with this state, which no constructor sees.
    Object(Box<Value>, Box<Value>),
    /// A storage, by the tuple that names it.
    Storage(Vec<Value>),
}

use Value::{Call, Dict, False, Global, Int, List, None, Object, Storage, Text, Tuple};

impl Value {
    /// The pickle of this value.
    pub(super) fn pickle(&self) -> Vec<u8> {
        let mut out = vec![0x80, 2];
        self.write(&mut out);
        out.push(b'.');
        out
    }

    fn write(&self, out: &mut Vec<u8>) {
        let mut around = |before: &[u8], values: &mut dyn Iterator<Item = &Value>, after: &[u8]| {
            out.extend(before);
            values.for_each(|value| value.write(out));
            out.extend(after);
        };
        match self {
            None => out.push(b'N'),
            False => out.push(0x89),
            Int(number) => out.extend([b"\x8a\x08", &number.to_le_bytes()[..]].concat()),
            Text(text) => out.extend([&b"X"[..], &(text.len() as u32).to_le_bytes(), text.as_bytes()].concat()),
            Global(module, name) => out.extend(format!("c{module}\n{name}\n").bytes()),
            Tuple(values) => around(b"(", &mut values.iter(), b"t"),
            List(values) => around(b"](", &mut values.iter(), b"e"),
            Dict(pairs) => around(b"}(", &mut pairs.iter().flat_map(|(key, value)| [key, value]), b"u"),
            Storage(name) => around(b"(", &mut name.iter(), b"tQ"),
            Call(function, arguments) => {
                function.write(out);
                out.push(b'(');
                arguments.iter().for_each(|value| value.write(out));
                out.extend(b"tR");
            }
            Object(class, state) => {
                class.write(out);
                out.extend(b")\x81");
                state.write(out);
                out.push(b'b');
            }
        }
    }
}

pub(super) fn text(text: &str) -> Value {
    Text(text.to_string())
}

pub(super) fn call(module: &'static str, name: &'static str, arguments: Vec<Value>) -> Value {
    Call(Box::new(Global(module, name)), arguments)
}

fn numbers(numbers: &[u64]) -> Value {
    Tuple(numbers.iter().map(|number| Int(*number as i64)).collect())
}

pub(super) fn size(shape: &[u64]) -> Value {
    call("torch", "Size", vec![numbers(shape)])
}

/// A tensor without gaps, which is all of the storage of this number.
pub(super) fn tensor(source: &Source, storage: usize) -> Value {
    let (dtype, bytes) = (source.dtype, source.bytes());
    let class = storage_class(dtype);
    let (of, count) = match class {
        Some(class) => (Global("torch", class), bytes / dtype.size() as u64),
        Option::None => (Global("torch.storage", "UntypedStorage"), bytes),
    };
    let strides = Elements::contiguous(dtype, source.shape.clone(), 0).strides;
    let storage = vec![text("storage"), of, Text(storage.to_string()), text("cpu"), Int(count as i64)];
    let hooks = call("collections", "OrderedDict", Vec::new());
    let mut arguments = vec![Storage(storage), Int(0), numbers(&source.shape), numbers(&strides), False, hooks];
    if class.is_some() {
        return call("torch._utils", "_rebuild_tensor_v2", arguments);
    }
    arguments.push(Global("torch", type_name(dtype)));
    call("torch._utils", "_rebuild_tensor_v3", arguments)
}
