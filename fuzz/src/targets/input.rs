//! Splits an input into the values that a target needs.

use arbitrary::Unstructured;
use codec::Dtype;

/// The types that are quantized.
pub(crate) const FLOATS: [Dtype; 4] = [Dtype::F16, Dtype::Bf16, Dtype::F32, Dtype::F64];

/// Values drawn from an input. After its end all values are 0, so that every input is valid.
pub(crate) struct Input<'a>(Unstructured<'a>);

impl<'a> Input<'a> {
    pub(crate) fn new(data: &'a [u8]) -> Input<'a> {
        Input(Unstructured::new(data))
    }

    pub(crate) fn byte(&mut self) -> u8 {
        self.0.arbitrary().unwrap_or(0)
    }

    pub(crate) fn flag(&mut self) -> bool {
        self.byte() & 1 == 1
    }

    pub(crate) fn u32(&mut self) -> u32 {
        self.0.arbitrary().unwrap_or(0)
    }

    pub(crate) fn u64(&mut self) -> u64 {
        self.0.arbitrary().unwrap_or(0)
    }

    /// At most `most`.
    pub(crate) fn upto(&mut self, most: usize) -> usize {
        self.0.int_in_range(0..=most).unwrap_or(0)
    }

    pub(crate) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.upto(from.len() - 1)]
    }

    /// Up to `most` bytes; the input gives the number.
    pub(crate) fn bytes(&mut self, most: usize) -> &'a [u8] {
        let length = self.upto(most).min(self.0.len());
        self.0.bytes(length).unwrap_or(&[])
    }

    /// Exactly so many bytes: the input's, then others derived from them. So a short input can describe a long tile.
    pub(crate) fn filled(&mut self, length: usize) -> Vec<u8> {
        let own = self.bytes(length.min(u16::MAX.into()));
        let mut state = own.iter().fold(0x9e37_79b9_7f4a_7c15u64, |state, byte| mix(state ^ u64::from(*byte)));
        let constant = self.flag();
        let mut out = own.to_vec();
        while out.len() < length {
            state = mix(state);
            match constant {
                true => out.extend_from_slice(&[(state & 3) as u8; 8]),
                false => out.extend_from_slice(&state.to_le_bytes()),
            }
        }
        out.truncate(length);
        out
    }

    pub(crate) fn float(&mut self) -> Dtype {
        self.pick(&FLOATS)
    }

    /// A step of a lattice, usually a valid one.
    pub(crate) fn step(&mut self) -> f64 {
        match self.byte() {
            0 => f64::from_bits(self.u64()),
            1 => 0.0,
            byte => f64::from(byte | 1) * 2f64.powi(self.upto(60) as i32 - 50),
        }
    }

    /// A finite number of a usual size, or any number.
    pub(crate) fn value(&mut self) -> f64 {
        match self.byte() {
            0 => f64::from_bits(self.u64()),
            1 => 0.0,
            2 => -0.0,
            byte => {
                let sign = if byte & 1 == 0 { 1.0 } else { -1.0 };
                sign * f64::from(self.u32()) * 2f64.powi(-32 - i32::from(byte >> 3))
            }
        }
    }

    /// All remaining bytes.
    pub(crate) fn rest(self) -> &'a [u8] {
        self.0.take_rest()
    }
}

fn mix(state: u64) -> u64 {
    let mut z = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Values as elements of a type.
pub(crate) fn elements(dtype: Dtype, values: &[f64]) -> Vec<u8> {
    let each = |value: &f64| match dtype {
        Dtype::F16 => half::f16::from_f64(*value).to_le_bytes().to_vec(),
        Dtype::Bf16 => half::bf16::from_f64(*value).to_le_bytes().to_vec(),
        Dtype::F32 => (*value as f32).to_le_bytes().to_vec(),
        _ => value.to_le_bytes().to_vec(),
    };
    values.iter().flat_map(each).collect()
}

/// The elements of a type as values.
pub(crate) fn values(dtype: Dtype, bytes: &[u8]) -> Vec<f64> {
    let value = |bytes: &[u8]| match dtype {
        Dtype::F16 => half::f16::from_le_bytes([bytes[0], bytes[1]]).to_f64(),
        Dtype::Bf16 => half::bf16::from_le_bytes([bytes[0], bytes[1]]).to_f64(),
        Dtype::F32 => f64::from(f32::from_le_bytes(bytes.try_into().expect("four bytes"))),
        _ => f64::from_le_bytes(bytes.try_into().expect("eight bytes")),
    };
    bytes.chunks_exact(dtype.size()).map(value).collect()
}
