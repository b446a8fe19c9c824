//! Inputs made to break a reader: each ends as opaque or sane, soon, and within bounds.

use std::time::Duration;

use proptest::prelude::*;

use super::*;

/// Hostile files that are still containers, with the paths that must be found in them.
const SANE: [(&str, &[&str]); 17] = [
    ("legacy.pt", &["w"]),
    ("comment-end-record.pt", &["model/emb.weight", "model/base.weight", "model/row.weight", "model/turned.weight"]),
    ("pickle-system.pt", &[]),
    ("pickle-system-kept.pt", &["model/w"]),
    ("pickle-self-list.pt", &[]),
    ("pickle-self-dict.pt", &["w"]),
    ("pickle-cycle-object.pt", &[]),
    ("pickle-storage-lies.pt", &[]),
    ("pickle-shape-lies.pt", &["w"]),
    ("pickle-negative.pt", &[]),
    ("pickle-no-record.pt", &[]),
    ("pickle-two-types.pt", &["w"]),
    ("pickle-unknown-storage.pt", &["w"]),
    ("pickle-duplicate-keys.pt", &["w", "w#2", "w#2#2"]),
    ("pickle-bad-utf8.pt", &["\u{fffd}\u{fffd}\u{fffd}"]),
    ("st-unknown-type.safetensors", &["w"]),
    ("st-deep.safetensors", &[]),
];

#[test]
fn hostile_files_end_as_opaque_or_sane() {
    let sane: BTreeMap<&str, &[&str]> = SANE.into_iter().collect();
    let others = ["pickle-odd-keys.pt", "pickle-ext.pt", "pickle-billion-laughs.pt", "pickle-frame-lies.pt"];
    for (name, bytes) in files("bad") {
        let start = of_thread();
        let d = check(&bytes);
        assert!(of_thread() - start < Duration::from_secs(2), "{name}");
        check_content(&bytes);
        if let Some(paths) = sane.get(name.as_str()) {
            assert_ne!(d.kind, Kind::Opaque, "{name}: {:?}", d.note);
            let found: Vec<_> = d.tensors.iter().map(|t| t.path.as_str()).collect();
            assert_eq!(found, *paths, "{name}");
        } else if !others.contains(&name.as_str()) {
            assert_eq!(d.kind, Kind::Opaque, "{name}");
        }
    }
    assert!(!Path::new("/tmp/stepfs-was-here").exists());
}

#[test]
fn odd_keys_are_safe_to_show() {
    let d = check(&files("bad")["pickle-odd-keys.pt"]);
    let found: Vec<_> = d.tensors.iter().map(|t| t.path.as_str()).collect();
    let smile = "\u{1f600}".repeat(100);
    assert_eq!(found, ["\\u{1b}[2J\\u{a}\\u{0}", "<str of 2000 bytes>", smile.as_str(), "."]);
}

#[test]
fn tensors_of_two_types_and_unknown_types_are_bytes() {
    let files = files("bad");
    for name in ["pickle-two-types.pt", "pickle-unknown-storage.pt"] {
        let d = check(&files[name]);
        assert_eq!((d.tensors[0].dtype, d.tensors[0].role), (Dtype::U8, Role::Other), "{name}");
    }
}

/// A zip of torch's layout around a pickle.
pub(super) fn zip_with(pickle: &[u8], storages: &[&[u8]]) -> Vec<u8> {
    let mut out = Vec::new();
    let mut directory = Vec::new();
    let names = (0..storages.len()).map(|i| format!("a/data/{i}"));
    let all = std::iter::once("a/data.pkl".to_string()).chain(names);
    let payloads = std::iter::once(pickle).chain(storages.iter().copied());
    let mut count = 0u16;
    for (name, payload) in all.zip(payloads) {
        let (crc, len) = (crc32fast::hash(payload), payload.len() as u32);
        let header = out.len() as u32;
        let mut common = vec![0u8; 26];
        common[10..14].copy_from_slice(&crc.to_le_bytes());
        common[14..18].copy_from_slice(&len.to_le_bytes());
        common[18..22].copy_from_slice(&len.to_le_bytes());
        common[22..24].copy_from_slice(&(name.len() as u16).to_le_bytes());
        out.extend_from_slice(b"PK\x03\x04");
        out.extend_from_slice(&common);
        out.extend_from_slice(name.as_bytes());
        out.extend_from_slice(payload);
        directory.extend_from_slice(b"PK\x01\x02\0\0");
        directory.extend_from_slice(&common);
        directory.extend_from_slice(&[0; 10]);
        directory.extend_from_slice(&header.to_le_bytes());
        directory.extend_from_slice(name.as_bytes());
        count += 1;
    }
    let (at, len) = (out.len() as u32, directory.len() as u32);
    out.extend_from_slice(&directory);
    out.extend_from_slice(b"PK\x05\x06\0\0\0\0");
    out.extend_from_slice(&count.to_le_bytes());
    out.extend_from_slice(&count.to_le_bytes());
    out.extend_from_slice(&len.to_le_bytes());
    out.extend_from_slice(&at.to_le_bytes());
    out.extend_from_slice(&[0, 0]);
    out
}

/// Opcodes that push a tensor of four floats in storage `key`.
pub(super) fn tensor_ops(key: usize) -> Vec<u8> {
    let key = key.to_string();
    let mut ops = b"ctorch._utils\n_rebuild_tensor_v2\n((U\x07storagectorch\nFloatStorage\nU".to_vec();
    ops.push(key.len() as u8);
    ops.extend_from_slice(key.as_bytes());
    ops.extend_from_slice(b"U\x03cpuK\x04tQK\x00K\x04\x85K\x01\x85\x89NtR");
    ops
}

fn describe_within(seconds: u64, pickle: &[u8], storages: &[&[u8]]) -> Description {
    let file = zip_with(pickle, storages);
    let start = of_thread();
    let d = check(&file);
    assert!(of_thread() - start < Duration::from_secs(seconds));
    d
}

#[test]
fn deep_nesting_needs_no_stack() {
    const DEPTH: usize = 100_000;
    for (open, close) in [(&b"]"[..], &b"a"[..]), (b"(", b"t"), (b"}K\x01", b"s"), (b"", b"\x85")] {
        let mut pickle = open.repeat(DEPTH);
        pickle.extend(tensor_ops(0));
        pickle.extend(close.repeat(DEPTH));
        if open == b"]" {
            pickle.insert(0, b']');
            pickle.push(b'a');
        }
        pickle.push(b'.');
        let d = describe_within(5, &pickle, &[&[0; 16]]);
        assert_eq!(d.kind, Kind::TorchZip, "{:?}", d.note);
        assert!(d.note.is_some_and(|n| n.contains("too deeply")));
    }
}

#[test]
fn a_hundred_levels_are_named() {
    let pickle = [&b"]".repeat(100)[..], &tensor_ops(0), &b"a".repeat(100), b"."].concat();
    let d = describe_within(5, &pickle, &[&[0; 16]]);
    assert_eq!(d.tensors[0].path, vec!["0"; 100].join("/"));
}

#[test]
fn sharing_is_walked_once_and_aliases_are_few() {
    // Forty levels of lists, each twice in the next: 2^40 paths.
    let mut pickle = [&b"]"[..], &tensor_ops(0), b"aq\x00"].concat();
    for i in 0..40u8 {
        pickle.extend([b'0', b']', b'(', b'h', i, b'h', i, b'e', b'q', i + 1]);
    }
    pickle.push(b'.');
    let d = describe_within(5, &pickle, &[&[0; 16]]);
    assert_eq!((d.tensors.len(), d.tensors[0].aliases.len()), (1, 0));

    let ops = [&tensor_ops(0), &b"q\x000](".to_vec()[..], &b"h\x00".repeat(1000), b"e."].concat();
    let d = describe_within(5, &ops, &[&[0; 16]]);
    assert_eq!((d.tensors.len(), d.tensors[0].aliases.len()), (1, 16));
}

#[test]
fn budgets_end_as_opaque() {
    let long_lists = b"]".repeat(MAX_BUDGET);
    let tuples = b")\x85".repeat(MAX_BUDGET);
    let stack = b"N".repeat(MAX_BUDGET);
    let marks = b"(".repeat(MAX_BUDGET);
    for mut pickle in [long_lists, tuples, stack, marks] {
        pickle.push(b'.');
        let d = describe_within(20, &pickle, &[]);
        assert_eq!(d.kind, Kind::Opaque, "{:?}", d.note);
    }
}

/// More than any budget of the pickle machine in one kind of value.
const MAX_BUDGET: usize = 6 << 20;

#[test]
fn shared_keys_and_mappings_stay_linear() {
    // One long key (512 bytes) shared by two million pairs that all hold one big dict.
    let key = [&b"X\x00\x02\x00\x00"[..], &[b'k'; 512], b"q\x000"].concat();
    let inner = [&b"}("[..], &b"h\x00N".repeat(200_000), b"uq\x010"].concat();
    let outer = [&b"}("[..], &b"h\x00h\x01".repeat(1_000_000), b"u."].concat();
    let d = describe_within(20, &[key, inner, outer].concat(), &[]);
    assert!(d.tensors.is_empty());
}

#[test]
fn long_values_cost_nothing() {
    let blob = vec![0u8; 8 << 20];
    let mut pickle = b"}(U\x01xB".to_vec();
    pickle.extend((blob.len() as u32).to_le_bytes());
    pickle.extend(&blob);
    pickle.extend(b"U\x01yX");
    pickle.extend((blob.len() as u32).to_le_bytes());
    pickle.extend(&blob);
    pickle.extend(b"U\x01w");
    pickle.extend(tensor_ops(0));
    pickle.extend(b"u.");
    let d = describe_within(5, &pickle, &[&[0; 16]]);
    assert_eq!(d.tensors[0].path, "w");
}

#[test]
fn many_records_are_read_in_linear_time() {
    let empty: &[u8] = &[];
    let storages = vec![empty; 60_000];
    let d = describe_within(10, b"N.", &storages);
    assert_eq!((d.kind, d.note), (Kind::TorchZip, None));
}

#[test]
fn a_source_that_fails_is_an_error_not_opaque() {
    struct Failing(Vec<u8>);
    impl ReadAt for Failing {
        fn size(&self) -> u64 {
            self.0.len() as u64
        }
        fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
            if offset >= 2000 {
                return Err(io::Error::other("device"));
            }
            self.0.read_exact_at(buf, offset)
        }
    }
    for name in ["nested.pt", "mixed.safetensors"] {
        let file = files("good").remove(name).expect("corpus file");
        let failing = Failing(file);
        match describe(&failing) {
            Ok(d) => assert_eq!((name, d.kind), ("mixed.safetensors", Kind::Safetensors)),
            Err(e) => assert_eq!((name, e.to_string().as_str()), ("nested.pt", "device")),
        }
    }
}

#[test]
fn every_truncation_is_opaque_or_sane() {
    for (name, bytes) in files("good").into_iter().chain(files("formats")) {
        for len in (0..bytes.len()).step_by(7) {
            let d = check(&bytes[..len]);
            assert_eq!(d.kind, Kind::Opaque, "{name} cut to {len}");
        }
    }
}

fn mutated() -> impl Strategy<Value = Vec<u8>> {
    let all: Vec<Vec<u8>> = files("good").into_values().chain(files("formats").into_values()).collect();
    let edit = (any::<prop::sample::Index>(), any::<u8>(), 0..5u8);
    (prop::sample::select(all), prop::collection::vec(edit, 1..8), any::<bool>()).prop_map(
        |(mut file, edits, in_tail)| {
            for (index, value, how) in edits {
                if file.is_empty() {
                    break;
                }
                // Half of the time only the end of the file: the directory and the end records.
                let half = if in_tail { file.len() / 2 } else { 0 };
                let at = half + index.index(file.len() - half);
                match how {
                    0 => file[at] = value,
                    1 => file[at] ^= 1 << (value % 8),
                    2 => file[at] = [0, 0xff, 0x7f, 0x80][usize::from(value % 4)],
                    3 => {
                        file.remove(at);
                    }
                    _ => file.insert(at, value),
                }
            }
            file
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn mutations_never_panic(file in mutated()) {
        let d = check(&file);
        let changed: Vec<_> = (0..d.tensors.len())
            .map(|index| ChangedTensor { index, crc_before: 0, crc_after: 1 })
            .collect();
        let patches = d.patches(&file, &changed).expect("in memory");
        prop_assert!(patches.iter().all(|p| p.offset + p.bytes.len() as u64 <= file.len() as u64));
    }

    #[test]
    fn random_pickles_never_panic(ops in prop::collection::vec(any::<u8>(), 0..400)) {
        check(&zip_with(&ops, &[&[0; 16]]));
    }

    /// Opcodes that are likely to go far, rather than any byte.
    #[test]
    fn plausible_pickles_never_panic(
        ops in prop::collection::vec(prop::sample::select(b"()]}NK01tadeulsRb.2qhoQ\x81\x85\x86\x87\x93\x94\x8f\x90\x91".to_vec()), 0..300),
        with_tensor in any::<bool>(),
    ) {
        let mut pickle = if with_tensor { tensor_ops(0) } else { Vec::new() };
        pickle.extend(ops);
        pickle.push(b'.');
        check(&zip_with(&pickle, &[&[0; 16]]));
    }
}
