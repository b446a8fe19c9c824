//! Tiles of published systems.

use std::sync::Arc;

use codec::Dtype;
use papers::registry::{FAMILIES, decoder};
use papers::tile::{self, Before, Decoded};
use papers::{State, Tensor, Tile};

use super::input::{Input, elements};

const TYPES: [Dtype; 3] = [Dtype::F16, Dtype::Bf16, Dtype::F32];

/// Any payload as a tile, with a state before it and without.
pub(crate) fn decode(data: &[u8]) {
    let mut input = Input::new(data);
    let dtype = input.pick(&TYPES);
    let n = input.upto(600);
    let bytes = Arc::new(elements(dtype, &(0..n).map(|at| (at as f64).sin()).collect::<Vec<f64>>()));
    let bins: Vec<u16> = (0..n).map(|at| (at % 11) as u16).collect();
    let before = match input.upto(2) {
        0 => None,
        1 => Some(Before { bytes: &bytes, bins: None }),
        _ => Some(Before { bytes: &bytes, bins: Some(&bins) }),
    };
    let payload = input.rest();
    if let Ok(decoded) = tile::decode(dtype, payload, before, n * dtype.size()) {
        as_it_is(dtype, &decoded, before);
        // Decoding is deterministic.
        assert!(tile::decode(dtype, payload, before, n * dtype.size()) == Ok(decoded));
    }
}

/// A state that lost its base is encoded as it is.
fn as_it_is(dtype: Dtype, decoded: &Decoded, before: Option<Before>) {
    let bytes = Arc::new(decoded.bytes.clone());
    let own = Before { bytes: &bytes, bins: decoded.bins.as_deref() };
    let mut payload = Vec::new();
    tile::encode_as_it_is(dtype, own, before.map(|before| before.bytes.as_slice()), &mut payload);
    let back = tile::decode(dtype, &payload, before, decoded.bytes.len()).expect("written bytes can be read");
    assert!(back.bytes == decoded.bytes);
    // Bins of no elements take no bytes.
    assert!(decoded.bytes.is_empty() || back.bins == decoded.bins);
}

struct Small {
    width: u64,
    tile: Tile,
}

impl Tensor for Small {
    fn name(&self) -> &str {
        "layer.weight"
    }

    fn rows(&self) -> (u64, u64) {
        (self.tile.values.len() as u64 / self.width, self.width)
    }

    fn tiles(&self) -> usize {
        1
    }

    fn tile(&self, _: usize) -> std::io::Result<Tile> {
        Ok(self.tile.clone())
    }
}

/// A tile of any finite values through each system, and back.
pub(crate) fn round_trip(data: &[u8]) {
    let mut input = Input::new(data);
    let dtype = input.pick(&TYPES);
    let family = &FAMILIES[input.upto(FAMILIES.len() - 1)];
    let number = input.pick(family.usual);
    let word = if number == 0 { family.word.to_string() } else { format!("{}-{number}", family.word) };
    let id: papers::registry::SystemId = word.parse().expect("a usual one");
    let system = id.system();
    let width = 1 + input.upto(20) as u64;
    let n = width as usize * input.upto(12);
    let calm = input.flag();
    let values = |input: &mut Input| {
        let each = |input: &mut Input| if calm { f64::from(input.byte()) / 64.0 - 2.0 } else { input.value() };
        let raw: Vec<f64> = (0..n).map(|_| each(input)).collect();
        tile::widen(dtype, &Arc::new(elements(dtype, &raw))).expect("whole elements")
    };
    let mut previous: Option<State> = None;
    for position in 0..1 + input.upto(2) as u32 {
        let tile = Tile { first: 0, values: values(&mut input), previous: previous.clone(), gradient: None };
        let tensor = Small { width, tile: tile.clone() };
        let finite = tile.values.iter().all(|value| value.is_finite());
        let Ok(fits) = system.fit(&[&tensor], position) else { return };
        let mut payload = Vec::new();
        let encoded = tile::encode(id, fits[0].as_ref(), dtype, &tile, &mut payload);
        assert!(finite || encoded.is_none(), "{word}: such a tensor stays lossless");
        let Some(decoded) = encoded else { return };
        assert!(decoder(payload[0]).is_ok());
        let wide = |state: &State| state.values.iter().map(|value| f64::from(*value)).collect::<Vec<f64>>();
        let bytes = previous.as_ref().map(|state| Arc::new(elements(dtype, &wide(state))));
        let before = bytes
            .as_ref()
            .map(|bytes| Before { bytes, bins: previous.as_ref().and_then(|state| state.bins.as_deref()) });
        let back = tile::decode(dtype, &payload, before, n * dtype.size()).expect("written bytes can be read");
        assert!(back == decoded, "{word}: the tile decodes as promised");
        previous = Before { bytes: &Arc::new(back.bytes), bins: back.bins.as_deref() }.state(dtype);
        let sound = previous.as_ref().is_some_and(|state| state.values.iter().all(|value| value.is_finite()));
        if !sound {
            return;
        }
    }
}
