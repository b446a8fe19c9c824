//! Pickles made by hand, of opcodes of protocol 2.

/// A short text.
pub(super) fn text(text: &str) -> Vec<u8> {
    [&b"X"[..], &(text.len() as u32).to_le_bytes(), text.as_bytes()].concat()
}

/// A number of 32 bits.
pub(super) fn int(n: i32) -> Vec<u8> {
    [&b"J"[..], &n.to_le_bytes()].concat()
}

pub(super) fn float(x: f64) -> Vec<u8> {
    [&b"G"[..], &x.to_be_bytes()].concat()
}

pub(super) fn tuple(items: &[Vec<u8>]) -> Vec<u8> {
    [&b"("[..], &items.concat(), b"t"].concat()
}

pub(super) fn list(items: &[Vec<u8>]) -> Vec<u8> {
    [&b"]("[..], &items.concat(), b"e"].concat()
}

pub(super) fn dict(pairs: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let pairs: Vec<u8> = pairs.iter().flat_map(|(key, value)| [text(key), value.clone()].concat()).collect();
    [&b"}("[..], &pairs, b"u"].concat()
}

/// A mapping of numbers.
pub(super) fn numbered(values: &[Vec<u8>]) -> Vec<u8> {
    let pairs: Vec<u8> = (0..).zip(values).flat_map(|(n, value)| [int(n), value.clone()].concat()).collect();
    [&b"}("[..], &pairs, b"u"].concat()
}

fn sizes(sizes: &[i32]) -> Vec<u8> {
    tuple(&sizes.iter().map(|&n| int(n)).collect::<Vec<_>>())
}

/// A contiguous tensor of f32, at `offset` of a storage of `len` elements.
pub(super) fn view(key: usize, len: i32, offset: i32, shape: &[i32]) -> Vec<u8> {
    let strides: Vec<i32> = (1..=shape.len()).map(|at| shape[at..].iter().product()).collect();
    strided(key, len, offset, shape, &strides)
}

pub(super) fn strided(key: usize, len: i32, offset: i32, shape: &[i32], strides: &[i32]) -> Vec<u8> {
    let storage = [text("storage"), b"ctorch\nFloatStorage\n".to_vec(), text(&key.to_string()), text("cpu"), int(len)];
    let id = [tuple(&storage), b"Q".to_vec()].concat();
    let args = tuple(&[id, int(offset), sizes(shape), sizes(strides), b"\x89N".to_vec()]);
    [&b"ctorch._utils\n_rebuild_tensor_v2\n"[..], &args, b"R"].concat()
}

/// A tensor of f32 with a storage of its own.
pub(super) fn tensor(key: usize, shape: &[i32]) -> Vec<u8> {
    view(key, shape.iter().product(), 0, shape)
}

/// A tensor of a subclass without a storage, with these attributes.
pub(super) fn subclass(class: &str, whole: &[i32], attributes: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let class = format!("c{}\n", class.replacen(' ', "\n", 1)).into_bytes();
    let about =
        tuple(&[class.clone(), b"ctorch\nfloat32\n".to_vec(), sizes(whole), sizes(whole), b"K\0NN\x89".to_vec()]);
    let state = tuple(&[b"N".to_vec(), dict(attributes)]);
    let args = tuple(&[b"ctorch._utils\n_rebuild_wrapper_subclass\n".to_vec(), class, about, state]);
    [&b"ctorch._tensor\n_rebuild_from_type_v2\n"[..], &args, b"R"].concat()
}

/// `param_groups` with one group of so many parameters.
pub(super) fn one_group(parameters: i32) -> Vec<u8> {
    let params: Vec<Vec<u8>> = (0..parameters).map(int).collect();
    list(&[dict(&[("lr", float(1e-3)), ("params", list(&params))])])
}

/// An optimizer's state dict with Adam's moments of parameters of these shapes, in storages from `key` on.
pub(super) fn adam(key: usize, shapes: &[&[i32]]) -> Vec<u8> {
    let state = |(n, shape): (usize, &&[i32])| {
        dict(&[("exp_avg", tensor(key + 2 * n, shape)), ("exp_avg_sq", tensor(key + 2 * n + 1, shape))])
    };
    let states: Vec<Vec<u8>> = shapes.iter().enumerate().map(state).collect();
    dict(&[("state", numbered(&states)), ("param_groups", one_group(shapes.len() as i32))])
}
