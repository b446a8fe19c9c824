//! Ids of objects and stores.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A random id of an object or a store, 128 bits. It is random so that nobody can guess the id of an object.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Id(pub [u8; 16]);

impl Id {
    /// All zeros: "none", never the id of an object.
    pub const NONE: Id = Id([0; 16]);

    /// A new id.
    pub fn random() -> std::io::Result<Id> {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes).map_err(std::io::Error::other)?;
        Ok(Id(bytes))
    }
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Id {
    type Err = ();

    /// Parses 32 lower-case hexadecimal digits.
    fn from_str(text: &str) -> Result<Id, ()> {
        if text.len() != 32 || !text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')) {
            return Err(());
        }
        let mut bytes = [0; 16];
        for (i, byte) in bytes.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&text[2 * i..2 * i + 2], 16).map_err(|_| ())?;
        }
        Ok(Id(bytes))
    }
}
