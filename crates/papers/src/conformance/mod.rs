//! Requirements for every published system. [`conforms`] is the suite. `table` runs it over every entry of the table,
//! together with the requirements for a tile in its tensor's own type.

mod table;

use super::*;

/// A generator of numbers that are the same on every machine.
pub(crate) struct Noise(pub(crate) u64);

impl Noise {
    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// From 0 to `n` - 1.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.bits() % n.max(1) as u64) as usize
    }

    /// Bell-shaped, of variance 1: the sum of twelve uniform numbers.
    pub(crate) fn normal(&mut self) -> f32 {
        (0..12).map(|_| (self.bits() >> 40) as f32 / 16_777_216.0 - 0.5).sum()
    }
}

/// A tensor in memory.
#[derive(Clone, Debug)]
pub(crate) struct Made {
    pub(crate) name: &'static str,
    pub(crate) rows: u64,
    pub(crate) values: Vec<f32>,
    pub(crate) gradient: Option<Vec<f32>>,
    /// One for each tile.
    pub(crate) previous: Option<Vec<State>>,
    /// Elements of a tile.
    pub(crate) tile: usize,
}

impl Made {
    pub(crate) fn new(name: &'static str, rows: u64, values: Vec<f32>) -> Made {
        Made { name, rows, values, gradient: None, previous: None, tile: 200 }
    }

    /// Weights of a layer.
    pub(crate) fn layer(name: &'static str, rows: u64, width: usize, noise: &mut Noise) -> Made {
        Made::new(name, rows, (0..rows as usize * width).map(|_| 0.02 * noise.normal()).collect())
    }

    /// A few training steps later: half of the rows have moved.
    fn train(&mut self, noise: &mut Noise) {
        let width = self.rows().1.max(1) as usize;
        for row in self.values.chunks_mut(width) {
            if width == row.len() && noise.below(2) == 0 {
                row.iter_mut().for_each(|x| *x += 0.001 * noise.normal());
            }
        }
    }
}

impl Tensor for Made {
    fn name(&self) -> &str {
        self.name
    }

    fn rows(&self) -> (u64, u64) {
        (self.rows, (self.values.len() as u64).checked_div(self.rows).unwrap_or(0))
    }

    fn tiles(&self) -> usize {
        self.values.len().div_ceil(self.tile)
    }

    fn tile(&self, number: usize) -> std::io::Result<Tile> {
        let range = number * self.tile..self.values.len().min((number + 1) * self.tile);
        Ok(Tile {
            first: range.start as u64,
            values: self.values[range.clone()].to_vec().into(),
            previous: self.previous.as_ref().map(|states| states[number].clone()),
            gradient: self.gradient.as_ref().map(|gradient| gradient[range].to_vec().into()),
        })
    }
}

fn same(a: &State, b: &State) -> bool {
    let bits = |state: &State| state.values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    bits(a) == bits(b) && a.bins == b.bins
}

/// Encodes a whole checkpoint, checks the requirements for each tile, and returns each tensor's states and bytes.
pub(crate) fn checkpoint(system: &dyn System, tensors: &[Made], position: u32) -> Vec<(Vec<State>, usize)> {
    let all: Vec<&dyn Tensor> = tensors.iter().map(|tensor| tensor as &dyn Tensor).collect();
    let fits = system.fit(&all, position).unwrap();
    let again = format!("{:?}", system.fit(&all, position).unwrap());
    assert_eq!(format!("{fits:?}"), again, "{system:?}: a fit is not deterministic");
    assert_eq!(fits.len(), tensors.len());
    let one = |(tensor, fit): (&Made, &Arc<dyn Fit>)| {
        let mut bytes = 0;
        let state = |number| {
            let tile = tensor.tile(number).unwrap();
            let (mut payload, mut again) = (vec![7; 3], vec![]);
            let Some(state) = encode(fit.as_ref(), &tile, &mut payload) else {
                // Such a system keeps a tensor without a previous state as it is.
                let alone = tile.previous.as_ref().is_none_or(|state| state.values.len() != tile.values.len());
                assert!(alone && !system.stands_alone(), "{system:?}: {}", tensor.name);
                return State { values: tile.values, bins: None };
            };
            let repeated = encode(fit.as_ref(), &tile, &mut again).unwrap();
            assert!(payload[..3] == [7; 3] && payload[3..] == again, "{system:?}");
            let decoded = decode(system, &again, tile.previous.as_ref(), tile.values.len()).unwrap();
            assert!(same(&state, &decoded) && same(&state, &repeated), "{system:?}: {}", tensor.name);
            assert_eq!(state.values.len(), tile.values.len());
            assert!(state.values.iter().all(|x| x.is_finite()));
            bytes += again.len();
            state
        };
        let states = (0..tensor.tiles()).map(state).collect();
        (states, bytes)
    };
    tensors.iter().zip(&fits).map(one).collect()
}

/// A small model: all kinds of layers, vectors, and tensors of one element and of none.
pub(crate) fn model(noise: &mut Noise) -> Vec<Made> {
    let mut tensors = vec![
        Made::layer("model.embed_tokens.weight", 64, 16, noise),
        Made::layer("blocks.0.attn.qkv.weight", 37, 24, noise),
        Made::layer("blocks.0.mlp.fc.weight", 11, 96, noise),
        Made::layer("stem.conv1.weight", 8, 27, noise),
        Made::layer("blocks.0.mlp.fc.bias", 1, 300, noise),
        Made::new("ln.weight", 1, vec![1.0; 48]),
        Made::new("zeros.weight", 6, vec![0.0; 48]),
        Made::new("scale", 1, vec![0.125]),
        Made::new("none", 0, vec![]),
        Made::new("extreme", 2, vec![f32::MAX, f32::MIN, 1e-45, 0.0, -1e-45, f32::MIN_POSITIVE]),
    ];
    for tensor in &mut tensors[..3] {
        tensor.gradient = Some(tensor.values.iter().map(|_| noise.normal()).collect());
    }
    tensors
}

/// All requirements for a system on any tensors.
pub(crate) fn conforms(system: &dyn System) {
    chains(system, |_| {});
    chains(system, |x| *x = half::bf16::from_f32(*x).to_f32().clamp(-1e30, 1e30));
    chains(system, |x| *x = half::f16::from_f32(x.clamp(-6e4, 6e4)).to_f32());
    unfit(system);
    reshaped(system);
    hostile(system);
}

/// A previous state of another length, as after a change of shape, is not used.
fn reshaped(system: &dyn System) {
    let mut tensor = Made::layer("mlp.weight", 9, 40, &mut Noise(1));
    tensor.previous = Some(vec![State { values: vec![0.5; 7].into(), bins: Some(vec![1; 7]) }; tensor.tiles()]);
    let with = checkpoint(system, std::slice::from_ref(&tensor), 1).remove(0);
    tensor.previous = None;
    let without = checkpoint(system, std::slice::from_ref(&tensor), 1).remove(0);
    assert_eq!(with.1, without.1, "{system:?}");
    assert!(with.0.iter().zip(&without.0).all(|(a, b)| same(a, b)), "{system:?}");
}

/// Four states of a training; `round` rounds to the tensors' type.
fn chains(system: &dyn System, round: impl Fn(&mut f32)) {
    let mut noise = Noise(5);
    let mut tensors = model(&mut noise);
    for position in 0..4 {
        tensors.iter_mut().for_each(|tensor| tensor.values.iter_mut().for_each(&round));
        let states = checkpoint(system, &tensors, position);
        for (tensor, (mut states, _)) in tensors.iter_mut().zip(states) {
            states.iter_mut().for_each(|state| state.values.iter_mut().for_each(&round));
            tensor.previous = Some(states);
            tensor.train(&mut noise);
        }
    }
    // A checkpoint whose earlier states have no bins, because another system made them.
    for tensor in &mut tensors {
        tensor.previous.iter_mut().flatten().for_each(|state| state.bins = None);
    }
    checkpoint(system, &tensors, 4);
}

/// Values that are not finite are refused, and leave nothing behind.
fn unfit(system: &dyn System) {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut tensor = Made::layer("w", 5, 40, &mut Noise(1));
        tensor.values[73] = bad;
        let fits = system.fit(&[&tensor], 0).unwrap();
        let mut out = vec![1, 2];
        assert!(encode(fits[0].as_ref(), &tensor.tile(0).unwrap(), &mut out).is_none(), "{system:?}");
        assert_eq!(out, [1, 2]);
    }
}

/// Damaged payloads give an error or a state of the right length.
fn hostile(system: &dyn System) {
    let mut noise = Noise(9);
    let mut tensors = model(&mut noise);
    for position in 0..2 {
        let states = checkpoint(system, &tensors, position);
        let all: Vec<&dyn Tensor> = tensors.iter().map(|tensor| tensor as &dyn Tensor).collect();
        let fits = system.fit(&all, position).unwrap();
        for (tensor, fit) in tensors.iter().zip(&fits) {
            for number in 0..tensor.tiles().min(2) {
                let tile = tensor.tile(number).unwrap();
                let mut payload = Vec::new();
                if encode(fit.as_ref(), &tile, &mut payload).is_none() {
                    continue;
                }
                damage(system, &payload, &tile, &mut noise);
            }
        }
        for (tensor, (states, _)) in tensors.iter_mut().zip(states) {
            tensor.previous = Some(states);
            tensor.train(&mut noise);
        }
    }
}

fn damage(system: &dyn System, payload: &[u8], tile: &Tile, noise: &mut Noise) {
    let previous = tile.previous.as_ref();
    let try_one = |payload: &[u8], previous: Option<&State>, len: usize| {
        if let Ok(state) = decode(system, payload, previous, len) {
            assert_eq!(state.values.len(), len, "{system:?}");
            assert!(state.bins.is_none_or(|bins| bins.len() == len), "{system:?}");
        }
    };
    for end in (0..payload.len()).step_by(1 + payload.len() / 50) {
        try_one(&payload[..end], previous, tile.values.len());
    }
    for _ in 0..60 {
        let mut damaged = payload.to_vec();
        // Mostly near the front, where the lengths and counts are.
        let reach = if noise.below(2) == 0 { 24 } else { usize::MAX }.min(damaged.len());
        for _ in 0..=noise.below(3) {
            let place = noise.below(reach);
            if let Some(byte) = damaged.get_mut(place) {
                *byte = noise.bits() as u8;
            }
        }
        try_one(&damaged, previous, tile.values.len());
        try_one(&damaged, previous, noise.below(400));
    }
    // Sound bytes for another tile.
    try_one(payload, None, tile.values.len());
    try_one(payload, Some(&State::default()), tile.values.len());
    let wild = State { values: vec![1.0; tile.values.len()].into(), bins: Some(vec![u16::MAX; tile.values.len()]) };
    try_one(payload, Some(&wild), tile.values.len());
    try_one(payload, previous, usize::MAX >> 8 & 0xffff);
}
