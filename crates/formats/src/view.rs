//! Tensors as torch pickles them: a call of a rebuild function on a persistent id that names a storage.

use super::pickle::{Graph, Item, Node};
use super::slots::Window;
use codec::Dtype;

/// A storage, as a persistent id names it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Storage<'a> {
    /// Its record is `data/KEY`.
    pub(super) key: &'a str,
    /// Element type of the storage class; `None` for an untyped storage.
    pub(super) dtype: Option<Dtype>,
    /// Number of elements; of bytes if untyped.
    pub(super) len: u64,
    /// Whether the class is one that stepfs knows, or an untyped one.
    pub(super) known: bool,
    /// Whether a part of it is meant, as torch before 0.4 wrote views.
    pub(super) part: bool,
}

impl Storage<'_> {
    /// Bytes of one of its elements, if the class is known.
    pub(super) fn unit(&self) -> Option<u64> {
        match (self.dtype, self.known) {
            (Some(dtype), _) => Some(dtype.size() as u64),
            (None, true) => Some(1),
            (None, false) => None,
        }
    }
}

/// A tensor, which is a view of a storage.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct View<'a> {
    pub(super) storage: Storage<'a>,
    /// Element type; `None` if stepfs does not know it.
    pub(super) dtype: Option<Dtype>,
    /// Its shape if it lies without gaps from the storage's start, with the dimensions in the storage's order: a transposed
    /// matrix of rows and columns is one of columns and rows.
    pub(super) shape: Option<Vec<u64>>,
    /// Where it lies in the storage, if that is known.
    pub(super) window: Option<Window>,
    /// Whether it is an `nn.Parameter`.
    pub(super) parameter: bool,
    /// Of a rank's part of a distributed tensor: the shape of the whole.
    pub(super) whole: Option<Vec<u64>>,
}

impl<'a> View<'a> {
    /// A storage that no tensor is known of.
    pub(super) fn of_all(storage: Storage<'a>) -> Option<View<'a>> {
        let (dtype, parameter) = (storage.dtype, false);
        Some(View { storage, dtype, shape: None, window: None, parameter, whole: None })
    }
}

/// Most dimensions of a tensor, as in torch.
const MAX_DIMS: usize = 64;

/// Rebuild functions around rebuild functions that are looked through; torch nests two.
const MAX_WRAPPERS: usize = 4;

/// The storage that a persistent id names: `('storage', class, key, location, numel)`. Legacy files have a sixth
/// field: `None`, or the part of the storage that is meant.
pub(super) fn storage(graph: &Graph, item: Item) -> Option<Storage<'_>> {
    let Item::Node(n) = item else { return None };
    let Node::Persid(id) = *graph.node(n) else { return None };
    let (tag, class, key, len, part) = match *graph.tuple(id)? {
        [tag, class, key, _, Item::Int(len)] => (tag, class, key, len, false),
        [tag, class, key, _, Item::Int(len), view] => (tag, class, key, len, view != Item::None),
        _ => return None,
    };
    if graph.str(tag) != Some("storage") {
        return None;
    }
    let (_, class) = graph.global(class)?;
    let dtype = storage_dtype(class);
    Some(Storage {
        key: graph.str(key)?,
        dtype,
        len: u64::try_from(len).ok()?,
        known: dtype.is_some() || class == "UntypedStorage",
        part,
    })
}

/// A call of the function that rebuilds a tensor from a storage.
struct Rebuilt<'a> {
    func: &'a str,
    args: &'a [Item],
    parameter: bool,
    /// Of a rank's part of a distributed tensor: the size of the whole.
    whole: Option<Item>,
}

/// The call without those around it, of parameters and subclasses. A distributed tensor (FSDP2, tensor parallelism)
/// is the rank's part of it, which is all of it that is in the file.
fn unwrapped(graph: &Graph, item: Item) -> Option<Rebuilt<'_>> {
    let call = |item| graph.object(item).map(|object| (object.func, object.args));
    let (mut func, mut args) = call(item)?;
    let (mut parameter, mut whole) = (false, None);
    for _ in 0..MAX_WRAPPERS {
        let (module, name) = graph.global(func)?;
        let list = graph.tuple(args)?;
        match (module, name, list) {
            ("torch._utils", "_rebuild_parameter" | "_rebuild_parameter_with_state", [data, ..]) => {
                parameter = true;
                (func, args) = call(*data)?;
            }
            ("torch._tensor", "_rebuild_from_type_v2", &[inner, class, inner_args, state])
                if is_distributed(graph, inner, class) =>
            {
                whole = whole.or(graph.tuple(inner_args)?.get(2).copied());
                parameter |= attribute(graph, state, "_is_param") == Some(Item::Bool(true));
                (func, args) = call(attribute(graph, state, "_local_tensor")?)?;
            }
            ("torch._tensor", "_rebuild_from_type_v2", &[inner, class, inner_args, _]) => {
                parameter |= graph.global(class).is_some_and(|(_, c)| c == "Parameter");
                (func, args) = (inner, inner_args);
            }
            ("torch._utils", "_rebuild_tensor" | "_rebuild_tensor_v2" | "_rebuild_tensor_v3", list) => {
                return Some(Rebuilt { func: name, args: list, parameter, whole });
            }
            _ => return None,
        }
    }
    None
}

/// Whether a subclass of tensors is torch's `DTensor`. Its module has had several names.
fn is_distributed(graph: &Graph, inner: Item, class: Item) -> bool {
    graph.global(inner) == Some(("torch._utils", "_rebuild_wrapper_subclass"))
        && graph
            .global(class)
            .is_some_and(|(module, name)| name == "DTensor" && module.starts_with("torch.distributed."))
}

/// An attribute that a rebuilt object gets. Its state is a dict, or a pair of one and another for slots.
fn attribute(graph: &Graph, state: Item, name: &str) -> Option<Item> {
    let one = [state];
    graph.tuple(state).unwrap_or(&one).iter().take(2).find_map(|&dict| graph.get(dict, name))
}

/// Whether the item is a tensor, without looking at its details.
pub(super) fn is_tensor(graph: &Graph, item: Item) -> bool {
    unwrapped(graph, item).is_some()
}

/// The tensor that the item is; `None` for anything else, and for a tensor that makes no sense.
pub(super) fn view(graph: &Graph, item: Item) -> Option<View<'_>> {
    let Rebuilt { func: name, args, parameter, whole } = unwrapped(graph, item)?;
    let [persid, Item::Int(offset), shape, stride, rest @ ..] = args else {
        return None;
    };
    let storage = storage(graph, *persid)?;
    let dtype = match (name, rest) {
        ("_rebuild_tensor_v3", [_, _, dtype, ..]) => {
            let (module, name) = graph.global(*dtype)?;
            (module == "torch").then(|| dtype_named(name)).flatten()
        }
        ("_rebuild_tensor_v3", _) => return None,
        _ => storage.dtype,
    };
    let (shape, stride) = (sizes(graph, *shape)?, sizes(graph, *stride)?);
    let offset = u64::try_from(*offset).ok()?;
    if shape.len() != stride.len() {
        return None;
    }
    let is_contiguous = is_contiguous(&shape, &stride);
    let whole = whole.and_then(|whole| sizes(graph, whole));
    let dense = if is_contiguous { Some(shape.clone()) } else { in_order(&shape, &stride) };
    let window = Window { offset, is_dense: dense.is_some(), shape: dense.clone().unwrap_or(shape) };
    let shape = dense.filter(|_| offset == 0 && !storage.part);
    Some(View { storage, dtype, shape, window: (!storage.part).then_some(window), parameter, whole })
}

/// Where the elements of a tensor lie in its storage, in elements.
pub(super) struct Strided {
    pub(super) offset: u64,
    pub(super) shape: Vec<u64>,
    pub(super) strides: Vec<u64>,
}

/// The tensor that the item is, with its dimensions as programs see them. `None` for one that makes no sense, and for one whose
/// values are not those of its elements: a conjugate, a negative.
pub(super) fn strided(graph: &Graph, item: Item) -> Option<Strided> {
    let [_, Item::Int(offset), shape, strides, rest @ ..] = unwrapped(graph, item)?.args else { return None };
    let (shape, strides) = (sizes(graph, *shape)?, sizes(graph, *strides)?);
    let is_plain = shape.len() == strides.len() && rest.iter().all(|about| graph.pairs(*about).is_empty());
    is_plain.then_some(Strided { offset: u64::try_from(*offset).ok()?, shape, strides })
}

/// The shape of the tensor that the item is, wherever in its storage it lies.
pub(super) fn shape(graph: &Graph, item: Item) -> Option<Vec<u64>> {
    unwrapped(graph, item)?.args.get(2).and_then(|&shape| sizes(graph, shape))
}

/// The numbers of a size, of at most [`MAX_DIMS`] dimensions.
pub(super) fn sizes(graph: &Graph, item: Item) -> Option<Vec<u64>> {
    let items = graph.tuple(size_args(graph, item))?;
    (items.len() <= MAX_DIMS).then(|| items.iter().map(|item| item.natural()).collect()).flatten()
}

/// A size is a tuple, or `torch.Size(tuple)`.
fn size_args(graph: &Graph, item: Item) -> Item {
    let call = graph.object(item).filter(|call| graph.global(call.func) == Some(("torch", "Size")));
    match call.and_then(|call| graph.tuple(call.args)) {
        Some(&[sizes]) => sizes,
        _ => item,
    }
}

/// The dimensions of a tensor whose elements lie without gaps, but in another order: by descending stride.
fn in_order(shape: &[u64], stride: &[u64]) -> Option<Vec<u64>> {
    let mut dims: Vec<(u64, u64)> =
        stride.iter().copied().zip(shape.iter().copied()).filter(|dim| dim.1 != 1).collect();
    dims.sort_unstable_by(|a, b| b.cmp(a));
    let (stride, shape): (Vec<u64>, Vec<u64>) = dims.into_iter().unzip();
    is_contiguous(&shape, &stride).then_some(shape)
}

fn is_contiguous(shape: &[u64], stride: &[u64]) -> bool {
    let mut expected = Some(1u64);
    for (&dim, &step) in shape.iter().zip(stride).rev() {
        // The stride of a dimension of size 1 is never used.
        if dim != 1 && expected != Some(step) {
            return false;
        }
        expected = expected.and_then(|e| e.checked_mul(dim));
    }
    true
}

fn storage_dtype(class: &str) -> Option<Dtype> {
    match class {
        "QInt32Storage" => Some(Dtype::I32),
        "QInt8Storage" => Some(Dtype::I8),
        "QUInt8Storage" | "QUInt4x2Storage" | "QUInt2x4Storage" => Some(Dtype::U8),
        class => TYPES.iter().find(|known| known.class == Some(class)).map(|known| known.dtype),
    }
}

/// What torch calls an element type.
struct Type {
    dtype: Dtype,
    name: &'static str,
    /// Another name.
    alias: Option<&'static str>,
    /// Its storages' class. New types have none.
    class: Option<&'static str>,
}

const fn of(dtype: Dtype, name: &'static str, alias: Option<&'static str>, class: Option<&'static str>) -> Type {
    Type { dtype, name, alias, class }
}

const TYPES: [Type; 17] = [
    of(Dtype::F32, "float32", Some("float"), Some("FloatStorage")),
    of(Dtype::F64, "float64", Some("double"), Some("DoubleStorage")),
    of(Dtype::F16, "float16", Some("half"), Some("HalfStorage")),
    of(Dtype::Bf16, "bfloat16", None, Some("BFloat16Storage")),
    of(Dtype::F8E4m3, "float8_e4m3fn", None, None),
    of(Dtype::F8E5m2, "float8_e5m2", None, None),
    of(Dtype::C64, "complex64", Some("cfloat"), Some("ComplexFloatStorage")),
    of(Dtype::C128, "complex128", Some("cdouble"), Some("ComplexDoubleStorage")),
    of(Dtype::I8, "int8", None, Some("CharStorage")),
    of(Dtype::I16, "int16", Some("short"), Some("ShortStorage")),
    of(Dtype::I32, "int32", Some("int"), Some("IntStorage")),
    of(Dtype::I64, "int64", Some("long"), Some("LongStorage")),
    of(Dtype::U8, "uint8", None, Some("ByteStorage")),
    of(Dtype::U16, "uint16", None, None),
    of(Dtype::U32, "uint32", None, None),
    of(Dtype::U64, "uint64", None, None),
    of(Dtype::Bool, "bool", None, Some("BoolStorage")),
];

/// The element type that torch calls so.
pub(super) fn dtype_named(name: &str) -> Option<Dtype> {
    TYPES.iter().find(|known| known.name == name || known.alias == Some(name)).map(|known| known.dtype)
}

/// The name that torch gives an element type.
pub fn type_name(dtype: Dtype) -> &'static str {
    TYPES.iter().find(|known| known.dtype == dtype).map_or("unknown", |known| known.name)
}

/// The class of torch's storages of an element type, if it has one.
pub fn storage_class(dtype: Dtype) -> Option<&'static str> {
    TYPES.iter().find(|known| known.dtype == dtype).and_then(|known| known.class)
}
