//! Finds the type of a tensor's layer by its name and shape. Embeddings have bins of their own (section 5), and pruning
//! takes the same fraction from all layers of a type (section 4.2).

use super::super::Tensor;

/// Type of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Layer {
    /// A table that is looked up by row.
    Embedding,
    /// Query, key, value and output projections.
    Attention,
    /// Kernels.
    Convolution,
    /// All other matrices.
    Linear,
    /// Biases and gains of norms, which the paper does not mention. They are not pruned: a norm's gains are all alike,
    /// and a third of them cannot be zero.
    Vector,
}

const EMBEDDING: [&str; 5] = ["emb", "wte", "wpe", "lookup", "relative_position"];
const ATTENTION: [&str; 11] =
    ["attn", "attention", "qkv", "q_proj", "k_proj", "v_proj", "o_proj", "query", "key", "value", "in_proj"];
const CONVOLUTION: [&str; 4] = ["conv", "downsample", "patch_embed", "stem"];

/// A table whose name does not show it: at least this many rows, and this many times more rows than columns.
const TABLE_ROWS: u64 = 4096;
const TABLE_RATIO: u64 = 16;

impl Layer {
    /// The type of a tensor.
    pub fn of(tensor: &dyn Tensor) -> Layer {
        Layer::of_shape(tensor.name(), tensor.rows())
    }

    /// The same by name, and by rows and their width.
    pub fn of_shape(name: &str, (rows, width): (u64, u64)) -> Layer {
        if rows <= 1 || width <= 1 {
            return Layer::Vector;
        }
        let name = name.to_ascii_lowercase();
        let says = |words: &[&str]| words.iter().any(|word| name.contains(word));
        // An embedding of image patches is a convolution.
        if says(&CONVOLUTION) {
            Layer::Convolution
        } else if says(&EMBEDDING) || rows >= TABLE_ROWS && rows / TABLE_RATIO >= width {
            Layer::Embedding
        } else if says(&ATTENTION) {
            Layer::Attention
        } else {
            Layer::Linear
        }
    }
}

/// The kind of state: weights, or a word for an optimizer state. Their magnitudes are unrelated, so each kind has
/// quantiles of its own.
pub(super) fn slot(name: &str) -> &str {
    const SLOTS: [&str; 8] =
        ["exp_avg_sq", "exp_avg", "max_exp_avg_sq", "momentum_buffer", "square_avg", "sum", "ema", "master"];
    let parts = || name.split(['.', '/', ':']);
    SLOTS.into_iter().find(|slot| parts().any(|part| part == *slot)).unwrap_or("")
}
