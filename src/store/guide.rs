//! What a store holds for people who find it without stepfs: a README, and a program that reads the store.

use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use super::beneath;

/// The files, each with the words before the number of its format, and its text.
const GUIDES: [(&str, &str, &str); 2] = [
    ("README", "This directory is a store of stepfs, of format ", include_str!("guide/README")),
    (
        "read_store.py",
        "#!/usr/bin/env python3\n\"\"\"Reads a store of stepfs, of format ",
        include_str!("../../tools/read_store.py"),
    ),
];

/// Their names.
pub(super) const NAMES: [&str; 2] = [GUIDES[0].0, GUIDES[1].0];

/// True if the file is one of these, of any format. A user's own README is not.
pub(super) fn is_guide(root: &Path, name: &std::ffi::OsStr) -> bool {
    GUIDES.iter().any(|(own, words, _)| {
        name == *own && matches!(beginning(&root.join(own)), Ok(text) if text.starts_with(words.as_bytes()))
    })
}

/// Writes the files that are missing, or are of an older format. `tmp` is on the same file system.
///
/// They are not synced: after a crash they may be empty, and the next call writes them again. Nothing depends on them,
/// so no error matters: on a full device there is a store without them.
pub(super) fn leave(root: &Path, tmp: &Path) {
    for (name, words, text) in GUIDES {
        let path = root.join(name);
        let stale = match beginning(&path) {
            Ok(old) => old.is_empty() || old.starts_with(words.as_bytes()) && !text.as_bytes().starts_with(&old),
            Err(error) => error.kind() == io::ErrorKind::NotFound,
        };
        let new = tmp.join(name);
        if stale && let Err(error) = write(&new, text).and_then(|()| fs::rename(&new, &path)) {
            log::debug!("{}: cannot be written: {error}", path.display());
            let _ = fs::remove_file(new);
        }
    }
}

/// The first bytes of a file, as many as hold its format.
fn beginning(path: &Path) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    beneath::open_plain(path)?.take(90).read_to_end(&mut text)?;
    Ok(text)
}

fn write(path: &Path, text: &str) -> io::Result<()> {
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?.write_all(text.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::super::FORMAT;
    use super::*;

    #[test]
    fn each_text_names_the_format_of_the_program() {
        for (name, words, text) in GUIDES {
            let rest = text.strip_prefix(&format!("{words}{FORMAT}")).unwrap_or("");
            assert!(rest.starts_with(['.', ',']), "{name}");
        }
        assert!(GUIDES[1].2.contains(&format!("\nFORMAT = {FORMAT}\n")));
        assert_eq!(GUIDES[0].2.lines().count(), 10);
    }

    #[test]
    fn only_missing_empty_and_older_files_are_written() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        fs::create_dir(path("tmp")).unwrap();
        let older = format!("{}1, and an old text", GUIDES[1].1);
        for (readme, reader) in [(None, None), (Some(""), Some(older.as_str())), (Some("my own notes"), None)] {
            for (name, text) in [("README", readme), ("read_store.py", reader)] {
                let _ = fs::remove_file(path(name));
                text.inspect(|text| fs::write(path(name), text).unwrap());
            }
            leave(dir.path(), &path("tmp"));
            let own = readme.is_some_and(|text| !text.is_empty());
            assert_eq!(fs::read_to_string(path("README")).unwrap(), if own { readme.unwrap() } else { GUIDES[0].2 });
            assert_eq!(is_guide(dir.path(), "README".as_ref()), !own);
            assert_eq!(fs::read_to_string(path("read_store.py")).unwrap(), GUIDES[1].2);
            assert_eq!(fs::read_dir(path("tmp")).unwrap().count(), 0);
        }
        // What is there stays, and a link is not followed.
        fs::write(path("read_store.py"), format!("{}\n# mine\n", GUIDES[1].2)).unwrap();
        fs::remove_file(path("README")).unwrap();
        std::os::unix::fs::symlink(path("elsewhere"), path("README")).unwrap();
        leave(dir.path(), &path("tmp"));
        assert!(fs::read_to_string(path("read_store.py")).unwrap().ends_with("# mine\n"));
        assert!(!path("elsewhere").exists());
    }
}
