//! Element types of tensors, by the names safetensors and torch use.

/// Type of one tensor element. The discriminant is the byte that objects store (docs/FORMAT.md): never renumber.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Dtype {
    /// Unsigned byte; also the type of a storage of unknown element type.
    U8 = 0,
    /// Signed byte.
    I8 = 1,
    /// Boolean, one byte.
    Bool = 2,
    /// Signed 16-bit integer.
    I16 = 3,
    /// Unsigned 16-bit integer.
    U16 = 4,
    /// Signed 32-bit integer.
    I32 = 5,
    /// Unsigned 32-bit integer.
    U32 = 6,
    /// Signed 64-bit integer.
    I64 = 7,
    /// Unsigned 64-bit integer.
    U64 = 8,
    /// IEEE 754 binary16.
    F16 = 9,
    /// bfloat16.
    Bf16 = 10,
    /// IEEE 754 binary32.
    F32 = 11,
    /// IEEE 754 binary64.
    F64 = 12,
    /// 8-bit float, e4m3.
    F8E4m3 = 13,
    /// 8-bit float, e5m2.
    F8E5m2 = 14,
    /// Complex of two binary32.
    C64 = 15,
    /// Complex of two binary64.
    C128 = 16,
}

/// Of each type, in the order of their codes: bytes per element, and safetensors' name.
const TYPES: [(Dtype, usize, &str); 17] = [
    (Dtype::U8, 1, "U8"),
    (Dtype::I8, 1, "I8"),
    (Dtype::Bool, 1, "BOOL"),
    (Dtype::I16, 2, "I16"),
    (Dtype::U16, 2, "U16"),
    (Dtype::I32, 4, "I32"),
    (Dtype::U32, 4, "U32"),
    (Dtype::I64, 8, "I64"),
    (Dtype::U64, 8, "U64"),
    (Dtype::F16, 2, "F16"),
    (Dtype::Bf16, 2, "BF16"),
    (Dtype::F32, 4, "F32"),
    (Dtype::F64, 8, "F64"),
    (Dtype::F8E4m3, 1, "F8_E4M3"),
    (Dtype::F8E5m2, 1, "F8_E5M2"),
    (Dtype::C64, 8, "C64"),
    (Dtype::C128, 16, "C128"),
];

impl Dtype {
    /// All element types, in the order of their codes.
    pub const ALL: [Dtype; 17] = {
        let (mut all, mut at) = ([Dtype::U8; 17], 0);
        while at < all.len() {
            all[at] = TYPES[at].0;
            at += 1;
        }
        all
    };

    /// Bytes per element.
    pub const fn size(self) -> usize {
        TYPES[self as usize].1
    }

    /// True if the lattice codec can quantize this type: fp16, bf16, fp32 and fp64.
    pub const fn is_lattice_float(self) -> bool {
        matches!(self, Dtype::F16 | Dtype::Bf16 | Dtype::F32 | Dtype::F64)
    }

    /// Number of values of a floating-point type from one power of two to the next; 1 for other types.
    pub const fn steps_of_octave(self) -> f64 {
        match self {
            Dtype::F16 => (1u64 << 10) as f64,
            Dtype::Bf16 => (1u64 << 7) as f64,
            Dtype::F32 => (1u64 << 23) as f64,
            Dtype::F64 => (1u64 << 52) as f64,
            _ => 1.0,
        }
    }

    /// safetensors' name of this type, which messages also use.
    pub const fn name(self) -> &'static str {
        TYPES[self as usize].2
    }

    /// The type with this stored code, if it exists.
    pub fn from_code(code: u8) -> Option<Dtype> {
        Self::ALL.get(code as usize).copied()
    }

    /// The type with this safetensors name, if it exists.
    pub fn from_name(name: &str) -> Option<Dtype> {
        Self::ALL.into_iter().find(|d| d.name() == name)
    }
}
