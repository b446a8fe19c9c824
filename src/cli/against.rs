//! `stepfs verify --against`: compares files with a manifest that `sha256sum` made when they were written.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde::Serialize;

use crate::store::{Named, beneath};
use codec::hash::hex;

use super::format::{name, progress};
use super::source::{Local, Tree, digest};
use super::{DAMAGED, exit_if, say_answer};

/// Hexadecimal digits of a SHA-256.
const DIGITS: usize = 64;

/// How a file compares with the manifest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
enum Verdict {
    /// Its bytes have the manifest's hash.
    Same,
    /// It is lossy now, and was archived from bytes that have the manifest's hash.
    Lossy,
    /// Its bytes have another hash, and nothing shows that it was archived from the manifest's bytes.
    Differs,
    /// The file does not exist.
    Missing,
    /// The file cannot be read.
    Damaged,
}

impl Verdict {
    fn words(self) -> &'static str {
        match self {
            Verdict::Same => "the same bytes",
            Verdict::Lossy => "lossy now, made from exactly those bytes",
            Verdict::Differs => "DIFFERS",
            Verdict::Missing => "MISSING",
            Verdict::Damaged => "DAMAGED",
        }
    }

    fn is_good(self) -> bool {
        matches!(self, Verdict::Same | Verdict::Lossy)
    }
}

#[derive(Debug, Serialize)]
struct Row {
    /// As written in the manifest.
    #[serde(flatten)]
    name: Named,
    verdict: Verdict,
    /// Set if the file is damaged or cannot be compared.
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<String>,
}

#[derive(Debug, Serialize)]
struct Report {
    files: Vec<Row>,
    counts: BTreeMap<Verdict, usize>,
}

/// A line of a manifest: a name and a hash.
#[derive(Debug, PartialEq, Eq)]
struct Line {
    name: PathBuf,
    /// In lower-case hexadecimal.
    digest: String,
}

pub(super) fn run(manifest: &Path, place: &Path, json: bool) -> Result<()> {
    let mut text = Vec::new();
    let read = match manifest.as_os_str() == "-" {
        true => std::io::stdin().read_to_end(&mut text),
        false => File::open(manifest).and_then(|mut file| file.read_to_end(&mut text)),
    };
    read.with_context(|| format!("{}", manifest.display()))?;
    let lines = parse(&text).with_context(|| format!("{}", manifest.display()))?;
    let local = Local::of(place)?;
    let tree = local.tree()?;
    tree.objects()?;
    let bar = progress(lines.len() as u64, false);
    let mut report = Report { files: Vec::new(), counts: BTreeMap::new() };
    for line in lines {
        bar.set_message(name(&line.name));
        let (verdict, why) = match compare(&tree, &local, &line) {
            Ok(verdict) => verdict,
            Err(error) => (Verdict::Damaged, Some(format!("{error:#}"))),
        };
        *report.counts.entry(verdict).or_default() += 1;
        report.files.push(Row { name: Named("name", line.name), verdict, why });
        bar.inc(1);
    }
    bar.finish_and_clear();
    say_answer(json, &report, print)?;
    exit_if(!report.files.iter().all(|row| row.verdict.is_good()), DAMAGED)
}

fn print(report: &Report) {
    for row in &report.files {
        let why = row.why.as_ref().map(|why| format!(" ({})", name(why))).unwrap_or_default();
        say!("{}: {}{why}", name(&*row.name), row.verdict.words());
    }
    let counts: Vec<String> =
        report.counts.iter().map(|(verdict, count)| format!("{count} {}", verdict.words())).collect();
    say!("{} files: {}", report.files.len(), counts.join("; "));
}

/// Compares one file with its line.
fn compare(tree: &Tree, local: &Local, line: &Line) -> Result<(Verdict, Option<String>)> {
    let Some(path) = local.inside(&line.name) else {
        return Ok((Verdict::Missing, Some("it is not in this store".into())));
    };
    match beneath::metadata(&tree.store.tree(), &path) {
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            return Ok((Verdict::Missing, None));
        }
        found => found?,
    };
    let is_same = |digest: [u8; 32]| hex(&digest) == line.digest;
    Ok(match is_same(digest(|sink| tree.read(&path, sink))?) {
        true => (Verdict::Same, None),
        false if tree.original(&path)?.is_some_and(is_same) => (Verdict::Lossy, None),
        false => (Verdict::Differs, None),
    })
}

/// Parses a manifest.
fn parse(text: &[u8]) -> Result<Vec<Line>> {
    let lines = text.split(|byte| *byte == b'\n').enumerate().filter(|(_, line)| !line.is_empty());
    let parsed = lines.map(|(number, line)| match parse_line(line) {
        Some(line) => Ok(line),
        None => bail!("line {} is not in sha256sum's format: 64 hexadecimal digits, two blanks, a name", number + 1),
    });
    let parsed = parsed.collect::<Result<Vec<_>>>()?;
    match parsed.is_empty() {
        true => bail!("it names no file; make a manifest with sha256sum"),
        false => Ok(parsed),
    }
}

/// Reads `DIGEST  NAME` or `DIGEST *NAME`. A leading backslash means that the name has escaped characters.
fn parse_line(line: &[u8]) -> Option<Line> {
    let (escaped, line) = match line.strip_prefix(b"\\") {
        Some(line) => (true, line),
        None => (false, line),
    };
    let (digest, rest) = line.split_at_checked(DIGITS)?;
    let name = rest.strip_prefix(b"  ").or(rest.strip_prefix(b" *"))?;
    let name = if escaped { unescape(name)? } else { name.to_vec() };
    let is_sound = !name.is_empty() && digest.iter().all(u8::is_ascii_hexdigit);
    let digest = String::from_utf8_lossy(digest).to_ascii_lowercase();
    is_sound.then(|| Line { name: PathBuf::from(OsString::from_vec(name)), digest })
}

fn unescape(name: &[u8]) -> Option<Vec<u8>> {
    let mut plain = Vec::with_capacity(name.len());
    let mut bytes = name.iter();
    while let Some(byte) = bytes.next() {
        plain.push(match byte {
            b'\\' => match bytes.next()? {
                b'n' => b'\n',
                b'r' => b'\r',
                b'\\' => b'\\',
                _ => return None,
            },
            byte => *byte,
        });
    }
    Some(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIGEST: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

    fn names(text: String) -> Vec<PathBuf> {
        parse(text.as_bytes()).unwrap().into_iter().map(|line| line.name).collect()
    }

    #[test]
    fn manifests_are_those_of_sha256sum() {
        let upper = DIGEST.to_uppercase();
        let text = format!("{DIGEST}  run/a b.pt\n{upper} *b.pt\n\\{DIGEST}  new\\nline\\\\.pt\n");
        assert_eq!(names(text), ["run/a b.pt", "b.pt", "new\nline\\.pt"].map(PathBuf::from));
        let line = parse_line(format!("{DIGEST}  x").as_bytes()).unwrap();
        assert_eq!(line.digest, hex(&codec::hash::sha256(b"")));
        for wrong in
            ["", "\n", "x", DIGEST, &format!("{DIGEST} x"), &format!("{DIGEST}  "), &format!("g{}  x", &DIGEST[1..])]
        {
            parse(wrong.as_bytes()).unwrap_err();
        }
        assert!(parse_line(format!("\\{DIGEST}  a\\x").as_bytes()).is_none());
    }
}
