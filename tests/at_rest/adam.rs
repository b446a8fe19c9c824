//! Invented training with real optimizers: parameters with the state that torch.optim keeps of them, computed in f64
//! and rounded to the type of each.

use super::series::{Dtype, Random, Tensor, safetensors};

/// The value of an element of this type.
pub(crate) fn round(dtype: Dtype, value: f64) -> f64 {
    match dtype {
        Dtype::F32 => f64::from(value as f32),
        // `half` drops bits of an f64 before it rounds.
        Dtype::F16 => half::f16::from_f32(value as f32).to_f64(),
        Dtype::BF16 => half::bf16::from_f32(value as f32).to_f64(),
        _ => value,
    }
}

/// A parameter, and its optimizer's state.
#[derive(Clone)]
pub(crate) struct Parameter {
    pub(crate) weight: Tensor,
    pub(crate) first: Tensor,
    pub(crate) second: Tensor,
    /// Typical gradient of each element: rows and columns have their own, as those of real layers do.
    scale: Vec<f64>,
}

impl Parameter {
    pub(crate) fn new(name: &str, dtype: Dtype, shape: &[usize], random: &mut Random) -> Parameter {
        let width = shape.iter().skip(1).product::<usize>().max(1);
        let mut octaves =
            |count: usize, spread: f64| -> Vec<f64> { (0..count).map(|_| (spread * random.normal()).exp2()).collect() };
        let (rows, columns) = (octaves(shape[0], 1.5), octaves(width, 1.0));
        let scale = rows.iter().flat_map(|row| columns.iter().map(move |column| 1e-3 * row * column)).collect();
        let of = |slot: &str, random: &mut Random| Tensor::new(&format!("{name}{slot}"), dtype, shape, random);
        let mut parameter = Parameter {
            weight: of("", random),
            first: of(".exp_avg", random),
            second: of(".exp_avg_sq", random),
            scale,
        };
        for state in [&mut parameter.first, &mut parameter.second] {
            // As torch.distributed flattens a state dict.
            state.name = format!("state.{}", state.name);
            state.values.fill(0.0);
        }
        parameter.weight.values.iter_mut().for_each(|value| *value = round(dtype, *value));
        parameter
    }

    /// With state of another type than the weights.
    pub(crate) fn with_state(mut self, dtype: Dtype) -> Parameter {
        (self.first.dtype, self.second.dtype) = (dtype, dtype);
        self
    }

    /// With gradients so many times as large.
    pub(crate) fn steeper(mut self, factor: f64) -> Parameter {
        self.scale.iter_mut().for_each(|scale| *scale *= factor);
        self
    }

    pub(crate) fn tensors(&self) -> [&Tensor; 3] {
        [&self.weight, &self.first, &self.second]
    }
}

/// Adam (Kingma and Ba, 2015, algorithm 1).
#[derive(Clone)]
pub(crate) struct Adam {
    pub(crate) beta2: f64,
    pub(crate) parameters: Vec<Parameter>,
    steps: i32,
    random: Random,
}

impl Adam {
    const RATE: f64 = 1e-3;
    const BETA1: f64 = 0.9;
    const EPSILON: f64 = 1e-8;

    pub(crate) fn new(beta2: f64, seed: u64, make: impl FnOnce(&mut Random) -> Vec<Parameter>) -> Adam {
        let mut random = Random(seed);
        let parameters = make(&mut random);
        Adam { beta2, parameters, steps: 0, random }
    }

    /// Matrices of each type and a vector; 370 KB.
    pub(crate) fn model(random: &mut Random) -> Vec<Parameter> {
        vec![
            Parameter::new("a.weight", Dtype::F32, &[96, 128], random),
            Parameter::new("b.weight", Dtype::BF16, &[96, 128], random),
            Parameter::new("c.weight", Dtype::F64, &[40, 128], random),
            Parameter::new("a.bias", Dtype::F32, &[1100], random),
        ]
    }

    pub(crate) fn train(&mut self, steps: usize) {
        for _ in 0..steps {
            self.steps += 1;
            let (first, second) = (1.0 - Self::BETA1.powi(self.steps), 1.0 - self.beta2.powi(self.steps));
            for Parameter { weight, first: m, second: v, scale } in &mut self.parameters {
                let all = weight.values.iter_mut().zip(&mut m.values).zip(&mut v.values).zip(scale);
                for (((w, m_), v_), scale) in all {
                    let gradient = *scale * self.random.normal();
                    *m_ = round(m.dtype, Self::BETA1 * *m_ + (1.0 - Self::BETA1) * gradient);
                    *v_ = round(v.dtype, self.beta2 * *v_ + (1.0 - self.beta2) * gradient * gradient);
                    let update = Self::RATE * (*m_ / first) / ((*v_ / second).sqrt() + Self::EPSILON);
                    *w = round(weight.dtype, *w - update);
                }
            }
        }
    }

    pub(crate) fn tensors(&self) -> Vec<Tensor> {
        let tensors = self.parameters.iter().flat_map(Parameter::tensors).cloned();
        let step = Tensor {
            name: "state.a.weight.step".into(),
            dtype: Dtype::F32,
            shape: vec![],
            values: vec![self.steps.into()],
        };
        tensors.chain([step]).collect()
    }

    pub(crate) fn file(&self) -> Vec<u8> {
        safetensors(&self.tensors())
    }
}
