//! Checks the documents: the tests that they name in brackets exist, and so do the targets of their links.
//!
//! A bracket names files and, after a colon, tests in them: `[mount/posix: a, b...; real/life/test_groups;
//! src/archive/lineage.rs]`. Three dots stand for the rest of a name.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Sections of `docs/SEMANTICS.md` that list things not promised, or shown by others.
const WITHOUT_TESTS: [&str; 1] = ["Proven, and not proven"];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The files that a word before the colon means.
fn sources(word: &str) -> Vec<PathBuf> {
    let alone = ["", ".rs", ".py"].map(|ending| format!("{word}{ending}"));
    let tests = alone.iter().map(|name| format!("tests/{name}"));
    let candidates: Vec<PathBuf> = alone.iter().cloned().chain(tests).map(|path| root().join(path)).collect();
    let mut found = Vec::new();
    let mut rest: Vec<PathBuf> = candidates.into_iter().filter(|path| path.exists()).collect();
    while let Some(path) = rest.pop() {
        match path.is_dir() {
            true => rest.extend(fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path())),
            false => found.push(path),
        }
    }
    found
}

/// Names of the tests in a file: of Rust, Python, and cases that are functions of a macro.
fn tests(path: &Path) -> Vec<String> {
    let Ok(text) = fs::read_to_string(path) else { return Vec::new() };
    let name = |line: &str| {
        let rest = line.trim_start().strip_prefix("fn ").or(line.trim_start().strip_prefix("def "))?;
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_')?;
        Some(rest[..end].strip_prefix("test_").unwrap_or(&rest[..end]).to_string())
    };
    text.lines().filter_map(name).collect()
}

fn is_word(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"_./-".contains(&b))
}

/// The false claims of one bracket.
fn wrong(bracket: &str) -> Vec<String> {
    let mut wrong = Vec::new();
    for part in bracket.split(';').map(str::trim) {
        let (words, names) = part.split_once(':').unwrap_or((part, ""));
        let words: Vec<&str> = words.split(',').map(str::trim).collect();
        for word in &words {
            if !is_word(word) || sources(word).is_empty() {
                wrong.push(format!("no file {word:?}"));
            }
        }
        let there: Vec<String> = words.iter().flat_map(|word| sources(word)).flat_map(|path| tests(&path)).collect();
        for name in names.split(',').map(str::trim).filter(|name| !name.is_empty()) {
            let known = match name.strip_suffix("...") {
                Some(start) => there.iter().any(|test| test.starts_with(start)),
                None => there.iter().any(|test| test == name),
            };
            if !known {
                wrong.push(format!("no test {name:?} in {words:?}"));
            }
        }
    }
    wrong
}

/// The text without code between backticks, and without links.
fn plain(text: &str) -> String {
    let prose: String = text.split('`').step_by(2).collect::<Vec<_>>().join("'");
    let mut out = String::new();
    let mut rest = prose.as_str();
    while let Some(at) = rest.find('[') {
        out.push_str(&rest[..at]);
        let Some(end) = rest[at..].find(']').map(|end| at + end) else { break };
        if !rest[end + 1..].starts_with('(') {
            out.push_str(&rest[at..=end]);
        }
        rest = &rest[end + 1..];
    }
    out + rest
}

fn brackets(text: &str) -> Vec<String> {
    let joined = text.split_whitespace().collect::<Vec<_>>().join(" ");
    joined.split('[').skip(1).filter_map(|rest| Some(rest.split_once(']')?.0.to_string())).collect()
}

#[test]
fn tests_in_brackets_exist() {
    let mut found = 0;
    let mut all = BTreeMap::new();
    for document in ["docs/SEMANTICS.md", "docs/MACHINES.md", "docs/THREATS.md"] {
        let text = plain(&fs::read_to_string(root().join(document)).unwrap());
        for bracket in brackets(&text) {
            found += 1;
            let wrong = wrong(&bracket);
            if !wrong.is_empty() {
                all.insert(format!("{document}: [{bracket}]"), wrong);
            }
        }
    }
    assert!(all.is_empty(), "{all:#?}");
    assert!(found > 50, "{found}: brackets are not found any more");
}

/// Blocks of a document: paragraphs, and items of lists, with their section. A table belongs to the paragraph after it.
fn blocks(text: &str) -> Vec<(String, String)> {
    let (mut section, mut blocks, mut open) = (String::new(), Vec::new(), String::new());
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        if let Some(title) = line.strip_prefix("## ") {
            section = title.to_string();
        }
        if !line.starts_with('#') {
            open.push_str(line);
            open.push('\n');
        }
        let is_item =
            |line: &str| line.starts_with("- ") || line.split_once(". ").is_some_and(|(n, _)| n.parse::<u32>().is_ok());
        let next = lines.peek().copied().unwrap_or_default();
        // A list belongs to the sentence before it if that ends in a colon. A paragraph after a table belongs to the
        // table.
        let ends = next.is_empty() || is_item(next);
        let goes_on = open.trim_end().ends_with(':') || open.trim_end().ends_with('|');
        if ends && !goes_on && !open.trim().is_empty() {
            blocks.push((section.clone(), std::mem::take(&mut open)));
        }
    }
    blocks
}

#[test]
fn every_paragraph_of_what_may_be_relied_on_has_a_test() {
    let text = plain(&fs::read_to_string(root().join("docs/SEMANTICS.md")).unwrap());
    let blocks = blocks(&text);
    assert!(blocks.len() > 50, "{}", blocks.len());
    let bare = |(section, block): &&(String, String)| {
        !section.is_empty() && !WITHOUT_TESTS.contains(&section.as_str()) && brackets(block).is_empty()
    };
    let bare: Vec<_> = blocks.iter().filter(bare).collect();
    assert!(bare.is_empty(), "{} without a test: {bare:#?}", bare.len());
}

#[test]
fn a_name_that_is_wrong_is_found() {
    assert_eq!(wrong("docs: a_name_that_is_wrong_is_found, tests_in_...; src/fs"), Vec::<String>::new());
    assert_eq!(wrong("docs: no_such_test").len(), 1);
    assert_eq!(wrong("docs: no_such_...; mount_nothing; some words").len(), 3);
}

/// All documents: those at the root, and those below `docs/` and `.github/`.
fn documents() -> Vec<PathBuf> {
    let (mut found, mut rest) = (Vec::new(), vec![root().join("docs"), root().join(".github")]);
    let at_root = fs::read_dir(root()).unwrap().map(|entry| entry.unwrap().path());
    found.extend(at_root.filter(|path| path.is_file()));
    while let Some(directory) = rest.pop() {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { rest.push(path) } else { found.push(path) }
        }
    }
    found.retain(|path| path.extension().is_some_and(|ending| ending == "md"));
    found
}

/// The text without fenced code.
fn unfenced(text: &str) -> String {
    text.split("```").step_by(2).collect()
}

/// The targets of a document's links.
fn links(text: &str) -> Vec<String> {
    let prose: String = unfenced(text).split('`').step_by(2).collect::<Vec<_>>().join("code");
    prose.split("](").skip(1).filter_map(|rest| Some(rest.split_once(')')?.0.to_string())).collect()
}

/// The anchors of a document: its headings in small letters, with hyphens for blanks and without other signs.
fn anchors(text: &str) -> Vec<String> {
    let headings = unfenced(text);
    let headings =
        headings.lines().filter(|line| line.starts_with('#')).map(|line| line.trim_start_matches('#').trim());
    let anchor = |heading: &str| -> String {
        let signs = heading.to_lowercase().replace(' ', "-");
        signs.chars().filter(|c| c.is_alphanumeric() || "-_".contains(*c)).collect()
    };
    headings.map(anchor).collect()
}

/// The links of a document that lead nowhere.
fn dead_links(document: &Path, text: &str) -> Vec<String> {
    let is_dead = |link: &String| {
        let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
        let target = match path.is_empty() {
            true => document.to_path_buf(),
            false => document.parent().unwrap().join(path),
        };
        let has_anchor =
            || fs::read_to_string(&target).is_ok_and(|text| anchors(&text).iter().any(|own| own == anchor));
        !target.exists() || !anchor.is_empty() && !has_anchor()
    };
    links(text).into_iter().filter(|link| !link.contains("://")).filter(is_dead).collect()
}

#[test]
fn links_lead_to_files_and_headings() {
    let mut found = 0;
    for document in documents() {
        let text = fs::read_to_string(&document).unwrap();
        found += links(&text).len();
        let dead = dead_links(&document, &text);
        assert!(dead.is_empty(), "{}: {dead:?}", document.display());
    }
    assert!(found > 100, "{found}: links are not found any more");
}

#[test]
fn a_dead_link_is_found() {
    let document = root().join("docs/START.md");
    let text = "[a](RETENTION.md) [b](RETENTION.md#rules) [c](#3-train) [d](https://rust-lang.org) `[e](code)`";
    assert_eq!(dead_links(&document, &format!("{text}\n## 3. Train")), ["#3-train"; 0]);
    let text = "[a](NOTHING.md) [b](RETENTION.md#no-such-rules) [c](../docs/)";
    assert_eq!(dead_links(&document, text), ["NOTHING.md", "RETENTION.md#no-such-rules"]);
}

#[test]
fn the_index_lists_every_page() {
    let index = root().join("docs/README.md");
    let listed = links(&fs::read_to_string(&index).unwrap());
    let pages = fs::read_dir(root().join("docs")).unwrap().map(|entry| entry.unwrap().path());
    for page in pages.filter(|path| path.extension().is_some_and(|ending| ending == "md") && *path != index) {
        let name = page.file_name().unwrap().to_str().unwrap();
        assert!(listed.iter().any(|link| link == name), "docs/README.md does not list {name}");
    }
}
