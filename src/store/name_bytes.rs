//! Names of files in JSON, which holds only UTF-8.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use codec::hash::hex;
use serde::ser::{Serialize, SerializeMap, Serializer};

/// A name in an answer: text under its key, and the bytes under `KEY_bytes` if the name is not UTF-8. A struct flattens it.
#[derive(Clone, Debug, Default)]
pub struct Named(pub &'static str, pub PathBuf);

impl Serialize for Named {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let mut map = to.serialize_map(None)?;
        map.serialize_entry(self.0, &self.1.to_string_lossy())?;
        if let Some(bytes) = name_bytes(&self.1) {
            map.serialize_entry(&format!("{}_bytes", self.0), &bytes)?;
        }
        map.end()
    }
}

impl std::ops::Deref for Named {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.1
    }
}

/// The bytes of a name that is not UTF-8, in hexadecimal. Two such names may look the same as text.
pub fn name_bytes(name: &Path) -> Option<String> {
    name.to_str().is_none().then(|| hex(name.as_os_str().as_bytes()))
}

/// The bytes of all names in a list, in its order, if one is not UTF-8; otherwise nothing.
pub fn names_bytes<'a>(names: impl IntoIterator<Item = &'a Path> + Clone) -> Vec<String> {
    match names.clone().into_iter().all(|name| name.to_str().is_some()) {
        true => Vec::new(),
        false => names.into_iter().map(|name| hex(name.as_os_str().as_bytes())).collect(),
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    use super::*;

    #[test]
    fn only_other_names_have_bytes() {
        let (plain, odd) = (Path::new("é"), Path::new(OsStr::from_bytes(b"a\xff")));
        assert_eq!((name_bytes(plain), name_bytes(odd).as_deref()), (None, Some("61ff")));
        assert!(names_bytes([plain]).is_empty());
        assert_eq!(names_bytes([plain, odd]), ["c3a9", "61ff"]);
    }
}
