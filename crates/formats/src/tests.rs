//! The corpus of `tests/corpus`: files of real writers, hostile files, and mutations of both.

use super::*;
use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

mod bundle;
mod by_hand;
mod formats;
mod frameworks;
mod hdf5;
mod hostile;
mod others;
mod progress;
mod views;

/// Processor time of the calling thread, which other load does not change.
fn of_thread() -> Duration {
    rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime).try_into().expect("it never falls below 0")
}

fn corpus(folder: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/corpus").join(folder)
}

fn files(folder: &str) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(corpus(folder)).expect("the corpus is in the repository");
    let files: BTreeMap<_, _> = entries
        .map(|e| e.expect("entry").path())
        .filter(|p| p.extension().is_none_or(|e| e != "json"))
        .map(|p| {
            let name = p.file_name().expect("name").to_string_lossy().into_owned();
            (name, fs::read(p).expect("corpus file"))
        })
        .collect();
    assert!(!files.is_empty());
    files
}

/// Checks that the elements of all tensors lie in the file, for any input.
fn check_content(bytes: &[u8]) {
    for (_, Elements { dtype, shape, strides, at }) in
        Content::read(&bytes).map(|content| content.tensors).unwrap_or_default()
    {
        let last: u64 = shape.iter().zip(&strides).map(|(dim, step)| dim.saturating_sub(1) * step).sum();
        let end = if shape.contains(&0) { at } else { at + (last + 1) * dtype.size() as u64 };
        assert!(end <= bytes.len() as u64, "elements of the file");
    }
}

/// Checks the promises of every description, for any input.
pub(crate) fn check(bytes: &[u8]) -> Description {
    let d = describe(&bytes).expect("bytes in memory have no I/O errors");
    let mut end = 0;
    for t in &d.tensors {
        assert!(t.extent.start >= end, "disjoint and ascending");
        assert!(t.extent.end > t.extent.start && t.extent.end <= bytes.len() as u64);
        end = t.extent.end;
        let elements: u64 = t.shape.iter().product();
        assert_eq!(elements * t.dtype.size() as u64, t.bytes());
        assert!(t.path.len() < 5000 && t.aliases.len() <= 16);
        assert!(!t.why.is_empty());
        for other in [t.of, t.partner].into_iter().flatten() {
            assert_eq!(d.tensors[other].shape, t.shape, "{}: {}", t.path, t.why);
        }
        let partner = t.partner.map(|other| &d.tensors[other]);
        assert!(t.role != Role::FirstMoment || partner.is_some_and(|v| v.role == Role::SecondMoment));
        assert!(partner.is_none_or(|other| other.dtype == t.dtype));
    }
    let mut paths: Vec<_> = d.tensors.iter().map(|t| &t.path).collect();
    paths.sort();
    paths.dedup();
    assert_eq!(paths.len(), d.tensors.len(), "paths are unique");
    assert!(d.kind != Kind::Opaque || d.tensors.is_empty() && d.note.is_some());
    assert!(d.kind != Kind::Bundle, "its names stand in another file");
    d
}

#[derive(serde::Deserialize)]
struct Expected {
    kind: String,
    tensors: Vec<ExpectedTensor>,
}

#[derive(serde::Deserialize, Debug, PartialEq)]
struct ExpectedTensor {
    path: String,
    aliases: Vec<String>,
    dtype: String,
    shape: Vec<u64>,
    offset: u64,
    role: String,
}

#[test]
fn real_files_are_described_as_python_sees_them() {
    let described = described_as_python_sees("good");
    assert_eq!(files("good").into_keys().collect::<Vec<_>>(), described);
}

/// Retention goes by it (docs/RETENTION.md).
#[test]
fn a_file_without_its_end_is_cut_short() {
    use Kind::{Hdf5, Keras, Npz, Safetensors, TorchLegacy, TorchZip};
    let mut kinds = HashSet::new();
    for (name, bytes) in ["good", "formats", "hdf5"].into_iter().flat_map(files) {
        let whole = check(&bytes);
        assert!(!whole.cut_short, "{name}");
        if [Hdf5, Keras, Npz, Safetensors, TorchLegacy, TorchZip].contains(&whole.kind) {
            for len in [bytes.len() - 1, bytes.len() * 2 / 3, bytes.len() / 3] {
                let cut = check(&bytes[..len]);
                assert!(cut.cut_short, "{name}, {len} of {}: {:?}", bytes.len(), cut.note);
            }
            kinds.insert(whole.kind);
        }
    }
    assert_eq!(kinds.len(), 6, "{kinds:?}");
}

#[test]
fn a_whole_file_of_another_format_is_not_cut_short() {
    let zip = files("good").remove("module.pth").unwrap();
    // Readers that look for the end record backwards take these.
    for behind in [&[0; 512][..], b"\n"] {
        assert!(!check(&[&zip[..], behind].concat()).cut_short);
    }
    // A brace where safetensors has one.
    for other in [&b"{\"rng\": {\"a\": 1}}"[..], b"\x9f\x03\x11\x80\xff\x00\x12\x99{ and so on"] {
        assert!(!check(other).cut_short, "{other:?}");
    }
}

/// Compares the descriptions of a folder's files with Python's. Returns the files' names.
fn described_as_python_sees(folder: &str) -> Vec<String> {
    let expected = fs::read(corpus(folder).join("expected.json")).expect("expected.json");
    let expected: BTreeMap<String, Expected> = serde_json::from_slice(&expected).expect("json");
    let files = files(folder);
    for (name, want) in &expected {
        let d = check(&files[name]);
        let kind = match d.kind.name() {
            "torch zip" => "torch",
            "legacy torch" => "legacy",
            "distributed checkpoint" => "dcp",
            name => name,
        };
        let note = d.note.as_deref().filter(|note| !note.contains("links in a heap"));
        assert_eq!((kind, note), (want.kind.as_str(), None), "{name}");
        let got: Vec<_> = d
            .tensors
            .iter()
            .map(|t| ExpectedTensor {
                path: t.path.clone(),
                aliases: t.aliases.clone(),
                dtype: t.dtype.name().to_string(),
                shape: t.shape.clone(),
                offset: t.extent.start,
                role: t.role.group().name().to_string(),
            })
            .collect();
        for (got, want) in got.iter().zip(&want.tensors) {
            assert_eq!(got, want, "{name}");
        }
        assert_eq!(got.len(), want.tensors.len(), "{name}");
    }
    expected.into_keys().collect()
}

#[test]
fn an_optimizer_proves_its_parameters_and_no_mask() {
    let d = check(&files("good")["mask.pt"]);
    let told = |path: &str| d.tensors.iter().find(|t| t.path == path).map(|t| t.trained.is_some());
    assert_eq!((told("model/w.weight"), told("model/w.mask")), (Some(true), Some(false)));
}

/// Role, path of the parameter, path of the other moment.
type Told = (String, Option<String>, Option<String>);

#[test]
fn state_is_told_apart_and_paired() {
    let expected = fs::read(corpus("roles").join("expected.json")).expect("expected.json");
    let expected: BTreeMap<String, BTreeMap<String, Told>> = serde_json::from_slice(&expected).expect("json");
    let files = files("roles");
    assert_eq!(files.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
    for (name, bytes) in files {
        let d = check(&bytes);
        let path = |index: Option<usize>| index.map(|index| d.tensors[index].path.clone());
        let found: BTreeMap<String, Told> = d
            .tensors
            .iter()
            .map(|t| (t.path.clone(), (t.role.name().to_string(), path(t.of), path(t.partner))))
            .collect();
        for (path, told) in &found {
            let why = d.tensors.iter().find(|t| t.path == *path).map(|t| t.why);
            assert_eq!(Some(told), expected[&name].get(path), "{name}: {path}: {why:?}");
        }
        assert_eq!(found.keys().collect::<Vec<_>>(), expected[&name].keys().collect::<Vec<_>>(), "{name}");
    }
}

#[test]
fn roles_have_their_codes() {
    for (code, role) in Role::ALL.into_iter().enumerate() {
        assert_eq!(role as usize, code);
        assert_eq!(Role::ALL.iter().filter(|other| other.name() == role.name()).count(), 1);
        assert!(role == Role::Ema || (role.group() == Role::Weight) == (role == Role::Weight));
    }
}

#[test]
fn only_what_stands_where_models_do_counts_as_weight() {
    let files = files("roles");
    let weights = |name: &str| {
        let d = check(&files[name]);
        d.tensors.iter().filter(|t| t.is_weight()).map(|t| t.path.clone()).collect::<Vec<_>>()
    };
    // Averages beside the model were weights before they had a role of their own; those of callbacks were not.
    assert!(weights("swa.pt").iter().any(|path| path.starts_with("swa_model/")));
    assert!(weights("lightning.ckpt").iter().all(|path| path.starts_with("state_dict/")));
    assert!(weights("asgd.pt").iter().all(|path| path.starts_with("model/")));
    assert_eq!(weights("zero2.pt"), [""; 0]);
}

#[test]
fn files_are_read_like_slices() {
    let path = corpus("good").join("nested.pt");
    let file = fs::File::open(&path).expect("corpus file");
    let bytes = fs::read(&path).expect("corpus file");
    let (a, b) = (describe(&file).expect("file"), check(&bytes));
    assert_eq!(a.tensors, b.tensors);
    assert_eq!(file.size(), bytes.len() as u64);
    let mut buf = [0; 4];
    for src in [&file as &dyn ReadAt, &bytes] {
        let end = src.size() - 4;
        src.read_exact_at(&mut buf, end).expect("in bounds");
        let beyond = src.read_exact_at(&mut buf, end + 1).expect_err("too far");
        assert_eq!(beyond.kind(), io::ErrorKind::UnexpectedEof);
        assert!(src.read_exact_at(&mut buf, u64::MAX).is_err());
    }
}

/// Alters payloads as the second file of a pair has them, and applies the patches.
fn patched(before: &[u8], after: &[u8]) -> (Vec<u8>, usize) {
    let d = check(before);
    let mut out = before.to_vec();
    let mut changed = Vec::new();
    for (index, t) in d.tensors.iter().enumerate() {
        let range = t.extent.start as usize..t.extent.end as usize;
        let (old, new) = (&before[range.clone()], &after[range.clone()]);
        if old != new {
            changed.push(ChangedTensor { index, crc_before: crc32fast::hash(old), crc_after: crc32fast::hash(new) });
            out[range].copy_from_slice(new);
        }
    }
    let patches = d.patches(&before, &changed).expect("in memory");
    let mut end = 0;
    for p in patches {
        assert!(p.offset >= end, "ascending, disjoint");
        end = p.offset + p.bytes.len() as u64;
        let outside = |t: &Tensor| end <= t.extent.start || p.offset >= t.extent.end;
        assert!(d.tensors.iter().all(outside));
        out[p.offset as usize..end as usize].copy_from_slice(&p.bytes);
    }
    (out, changed.len())
}

#[test]
fn patched_files_are_what_their_writer_writes() {
    assert!(patched_as_written("pairs") >= 7);
}

/// Compares the pairs of a folder. Returns how many there are.
fn patched_as_written(folder: &str) -> usize {
    let files = files(folder);
    let mut seen = 0;
    for (name, before) in &files {
        let Some(stem) = name.strip_suffix(".before") else {
            continue;
        };
        let after = &files[&format!("{stem}.after")];
        let (out, changed) = patched(before, after);
        assert_eq!(changed, 3, "{stem}");
        // Crafted zips carry the id that torch wrote for its own CRCs, which verifies there too.
        assert!(out == *after, "{stem}: the patched file differs");
        let (back, _) = patched(after, before);
        assert!(back == *before, "{stem}: the way back differs");
        seen += 1;
    }
    seen
}

#[test]
fn what_does_not_verify_is_not_patched() {
    let files = files("pairs");
    let (before, after) = (&files["torch.before"], &files["torch.after"]);
    let d = check(before);
    assert_eq!(d.patches(before, &[]).expect("in memory"), []);
    let extent = d.tensors[0].extent.start as usize..d.tensors[0].extent.end as usize;
    let crc = crc32fast::hash(&before[extent]);
    let changed = [ChangedTensor { index: 0, crc_before: crc, crc_after: 2 }];
    let mut off = before.clone();
    while let Some(at) = off.windows(4).position(|bytes| bytes == crc.to_le_bytes()) {
        off[at..at + 4].fill(0);
    }
    assert_eq!(check(&off).patches(&off, &changed).expect("in memory"), [], "CRCs are switched off");
    let beyond = [ChangedTensor { index: d.tensors.len(), ..changed[0] }];
    let error = d.patches(before, &beyond).expect_err("no such tensor");
    assert_eq!(error.kind(), io::ErrorKind::InvalidInput);

    // An id that torch did not compute stays; the CRCs are still right.
    let mut other = before.clone();
    let name = other.windows(28).position(|w| w == b"archive/.data/serialization_").expect("id");
    let digits = other[name..].windows(40).position(|w| w.iter().all(u8::is_ascii_digit)).expect("id");
    let id = name + digits..name + digits + 40;
    other[id.end - 1] ^= 1;
    let (out, _) = patched(&other, after);
    assert_eq!(out[id.clone()], other[id]);
    assert!(out != other);

    let st = &self::files("good")["mixed.safetensors"];
    let d = check(st);
    assert_eq!(d.patches(st, &changed).expect("in memory"), []);
}

#[test]
fn signatures_name_lineages() {
    let files = files("pairs");
    let sig = |name: &str| check(&files[name]).signature();
    assert_eq!(sig("torch.before"), sig("torch.after"));
    let tensor =
        |path: &str, n: u64| Tensor::found(path.to_string(), (Dtype::F32, vec![n]), (Role::Weight, "test"), 0..4 * n);
    let of = |tensors: Vec<Tensor>| {
        let mut d = Description::opaque("test");
        d.tensors = tensors;
        d.signature()
    };
    let (a, b) = (tensor("a", 2048), tensor("b", 4096));
    assert_eq!(of(vec![a.clone(), b.clone()]), of(vec![b.clone(), a.clone()]));
    assert_eq!(of(vec![a.clone(), tensor("small", 1023)]), of(vec![a.clone()]));
    assert_ne!(of(vec![a.clone(), tensor("large", 1024)]), of(vec![a.clone()]));
    assert_ne!(of(vec![a.clone()]), of(vec![b]));
    assert_ne!(of(vec![Tensor { dtype: Dtype::I32, ..a.clone() }]), of(vec![a]));
}
