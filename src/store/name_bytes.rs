//! Names of files in JSON, which holds only UTF-8.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use codec::hash::hex;

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
