//! A synthetic training with AdamW.

use std::error::Error;
use std::path::Path;

use safetensors::tensor::{Dtype, TensorView, serialize_to_file};

/// The nearest bf16 of a finite number, ties to even.
fn bf16(value: f32) -> [u8; 2] {
    let bits = value.to_bits();
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16).to_le_bytes()[..2].try_into().unwrap_or_default()
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// About normal, of variance 1: eight uniform numbers of 16 bits.
    fn normal(&mut self) -> f32 {
        let (a, b) = (self.next(), self.next());
        let sum: u64 = (0..4).map(|i| (a >> (16 * i) & 0xffff) + (b >> (16 * i) & 0xffff)).sum();
        (sum as f32 / 65536.0 - 4.0) * 1.2247
    }
}

pub(crate) struct Parameter {
    name: String,
    shape: Vec<usize>,
    /// log2 of the factors of the second moment that rows and columns share.
    row: Vec<f32>,
    column: Vec<f32>,
    /// log2 of an element's own factor; it wanders.
    own: Vec<f32>,
    weight: Vec<f32>,
    first: Vec<f32>,
    second: Vec<f32>,
}

/// A training whose states look like AdamW's.
pub(crate) struct Training {
    pub(crate) parameters: Vec<Parameter>,
    dtype: Dtype,
    random: Random,
}

impl Training {
    /// A GPT of width 1024 with as many layers as make checkpoints of about this many bytes in fp32. Other types have as many elements.
    pub(crate) fn new(bytes: usize, dtype: Dtype) -> Training {
        const WIDTH: usize = 1024;
        let mut shapes: Vec<(String, Vec<usize>)> = vec![("wte.weight".to_string(), vec![6 * WIDTH, WIDTH])];
        let mut left = (bytes / 12).saturating_sub(6 * WIDTH * WIDTH);
        for layer in 0.. {
            for (name, shape) in [
                ("ln_1.weight", vec![WIDTH]),
                ("attn.c_attn.weight", vec![3 * WIDTH, WIDTH]),
                ("attn.c_attn.bias", vec![3 * WIDTH]),
                ("attn.c_proj.weight", vec![WIDTH, WIDTH]),
                ("mlp.c_fc.weight", vec![4 * WIDTH, WIDTH]),
                ("mlp.c_proj.weight", vec![WIDTH, 4 * WIDTH]),
            ] {
                left = left.saturating_sub(shape.iter().product());
                shapes.push((format!("h.{layer}.{name}"), shape));
            }
            if left < 6 * WIDTH * WIDTH {
                break;
            }
        }
        let mut random = Random(1);
        let parameters = shapes.into_iter().map(|(name, shape)| Parameter::new(name, shape, &mut random)).collect();
        Training { parameters, dtype, random }
    }

    /// As many iterations as lie between two checkpoints.
    pub(crate) fn step(&mut self) {
        for parameter in &mut self.parameters {
            parameter.step(&mut self.random);
        }
    }

    /// Writes weights and optimizer state as torch.distributed flattens them.
    pub(crate) fn save(&self, path: &Path) -> Result<(), Box<dyn Error>> {
        let mut tensors = Vec::new();
        for parameter in &self.parameters {
            let Parameter { name, weight, first, second, .. } = parameter;
            for (name, values) in [
                (format!("model.{name}"), weight),
                (format!("optimizer.state.{name}.exp_avg"), first),
                (format!("optimizer.state.{name}.exp_avg_sq"), second),
            ] {
                let bytes: Vec<u8> = match self.dtype {
                    Dtype::BF16 => values.iter().flat_map(|value| bf16(*value)).collect(),
                    _ => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
                };
                tensors.push((name, parameter.shape.clone(), bytes));
            }
        }
        let views: Result<Vec<_>, _> = tensors
            .iter()
            .map(|(name, shape, bytes)| Ok((name, TensorView::new(self.dtype, shape.clone(), bytes)?)))
            .collect();
        Ok(serialize_to_file(views.map_err(|error: safetensors::SafeTensorError| error)?, None, path)?)
    }
}

impl Parameter {
    fn new(name: String, shape: Vec<usize>, random: &mut Random) -> Parameter {
        let count: usize = shape.iter().product();
        let width = shape[shape.len() - 1];
        let mut octaves = |n: usize, sigma: f32| (0..n).map(|_| sigma * random.normal()).collect::<Vec<f32>>();
        let (row, column, own) = (octaves(count / width, 1.5), octaves(width, 1.5), octaves(count, 0.8));
        let weight = octaves(count, 0.02);
        Parameter { name, shape, row, column, own, weight, first: vec![0.0; count], second: vec![0.0; count] }
    }

    /// v = row * column * own factor; m / sqrt(v) is normal; w moves by lr times that.
    fn step(&mut self, random: &mut Random) {
        let width = self.column.len();
        for i in 0..self.weight.len() {
            self.own[i] = 0.9 * self.own[i] + 0.35 * random.normal();
            let v = 1e-9 * (self.row[i / width] + self.column[i % width] + self.own[i]).exp2();
            self.second[i] = v;
            self.first[i] = v.sqrt() * 0.3 * random.normal();
            self.weight[i] += 1e-4 * random.normal();
        }
    }
}
