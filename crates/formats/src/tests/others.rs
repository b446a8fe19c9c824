//! Pickles of arrays, joblib, Paddle, Flax, Equinox and zips of torch zips: places and roles as their libraries
//! have them, and nothing worse than opaque where files lie.

use std::time::Duration;

use proptest::prelude::*;

use super::*;

#[test]
fn other_formats_are_described_as_python_sees_them() {
    assert_eq!(described_as_python_sees("others").len(), files("others").len() - 1);
}

#[test]
fn patched_zips_of_zips_are_what_zipfile_writes() {
    assert_eq!(patched_as_written("others_pairs"), 1);
}

fn description(name: &str) -> Description {
    check(&files("others")[name])
}

/// A tensor's role, the paths of its parameter and its other moment, and whether it is proven.
type Told<'a> = (Role, Option<&'a str>, Option<&'a str>, bool);

fn told(d: &Description) -> BTreeMap<&str, Told<'_>> {
    let path = |index: usize| d.tensors[index].path.as_str();
    let told = |t: &Tensor| (t.role, t.of.map(path), t.partner.map(path), t.trained.is_some());
    d.tensors.iter().map(|t| (t.path.as_str(), told(t))).collect()
}

/// Paths of tensors that may be quantized without another state.
fn lossy(d: &Description) -> Vec<&str> {
    let may = |t: &&Tensor| match t.role {
        Role::Weight | Role::Ema => t.trained.is_some(),
        Role::Other | Role::Optimizer => false,
        _ => true,
    };
    d.tensors.iter().filter(may).map(|t| t.path.as_str()).collect()
}

#[test]
fn a_pickle_says_what_a_torch_zip_of_the_same_state_says() {
    for name in ["trained.3.pkl", "trained.4.pkl", "trained.5.pkl"] {
        let d = description(name);
        let told = told(&d);
        let first = (Role::FirstMoment, Some("model/fc.weight"), Some("optimizer/state/0/exp_avg_sq"), false);
        assert_eq!(told["optimizer/state/0/exp_avg"], first, "{name}");
        assert_eq!(told["model/fc.weight"], (Role::Weight, None, None, true), "{name}");
        assert_eq!(lossy(&d).len(), 6, "{name}");
    }
    let d = description("plain.joblib");
    assert_eq!((d.kind, lossy(&d)), (Kind::Joblib, vec![]));
}

#[test]
fn what_no_optimizer_proves_in_a_pickle_stays_exact() {
    // Networks of scikit-learn with their optimizers, statistics, data.
    for name in ["adam.joblib", "adam.pkl", "lbfgs.joblib", "lbfgs.pkl", "statistics.joblib", "shared.pkl", "odd.5.pkl"]
    {
        assert_eq!(lossy(&description(name)), [""; 0], "{name}");
    }
}

#[test]
fn paddles_optimizer_is_told_by_its_accumulators() {
    let adam = description("adam.pdopt");
    let first = (Role::FirstMoment, None, Some("state/linear_0.w_0/moment2"), false);
    assert_eq!(told(&adam)["state/linear_0.w_0/moment1"], first);
    assert_eq!((adam.optimizers().len(), adam.optimizers()[0].count), (1, 6));
    // The optimizer of one file proves weights in the other.
    let mut weights = description("adam.pdparams");
    assert_eq!(lossy(&weights), [""; 0]);
    weights.prove(adam.optimizers());
    assert_eq!(lossy(&weights), ["0.weight", "2.weight", "2.bias"]);
    assert_eq!(lossy(&description("momentum.pdopt")).len(), 6);
    assert_eq!(lossy(&description("adadelta.pdopt")), [""; 0]);
    assert_eq!(lossy(&description("adadelta.pd")), [""; 0]);
    assert!(lossy(&description("adam.pd")).contains(&"model/0.weight"));
}

#[test]
fn data_called_velocity_is_no_optimizers() {
    let file = |key: &str| {
        let key = [&b"X"[..], &(key.len() as u32).to_le_bytes(), key.as_bytes()].concat();
        [&b"\x80\x05}("[..], &key, &array(), b"u."].concat()
    };
    assert_eq!(lossy(&check(&file("arm_velocity_0"))), [""; 0]);
    assert_eq!(lossy(&check(&file("linear_0.w_0_velocity_0"))), ["state/linear_0.w_0/momentum_buffer"]);
}

#[test]
fn optax_is_told_by_its_whole_state() {
    let adam = description("adam.msgpack");
    // Adamax has the same names, and means something else by them.
    assert_eq!(told(&adam)["train/opt_state/0/mu/Dense_1/kernel"], (Role::Optimizer, None, None, false));
    let weights = ["kernel", "bias"].map(|name| [0, 1].map(|layer| format!("train/params/Dense_{layer}/{name}")));
    let mut found = lossy(&adam);
    found.sort_unstable();
    let mut weights: Vec<&String> = weights.iter().flatten().collect();
    weights.sort_unstable();
    assert_eq!(found, weights);
    assert_eq!((adam.optimizers().len(), adam.optimizers()[0].count), (1, 4));
    assert!(adam.tensors.iter().filter(|t| t.trained.is_some()).all(|t| !t.is_trained_by_shape_only()));
    let sgd = description("sgd.msgpack");
    assert_eq!(told(&sgd)["train/opt_state/0/trace/Dense_0/bias"].0, Role::Momentum);
    assert_eq!(lossy(&sgd).len(), 8);
    for name in ["amsgrad.msgpack", "adafactor.msgpack"] {
        assert_eq!(lossy(&description(name)), [""; 0], "{name}");
    }
}

#[test]
fn a_state_of_optax_with_anything_beside_it_is_unknown() {
    let bytes = files("others").remove("adam.msgpack").expect("corpus file");
    let at = bytes.windows(6).position(|bytes| bytes == b"\xa5count").expect("of the state");
    let state = at - 1;
    assert_eq!(bytes[state], 0x83, "a mapping of three");
    for value in [&b"\xc0"[..], b"\x80", b"\x01", b"\xcb\0\0\0\0\0\0\0\0", b"\xa1a", b"\xc4\x01a"] {
        let changed = [&bytes[..state], b"\x84\xa3gnb", value, &bytes[at..]].concat();
        assert_eq!(lossy(&check(&changed)), [""; 0], "{value:?}");
    }
}

#[test]
fn a_layer_with_a_trees_name_is_no_state() {
    let array = b"\xc7\x11\x01\x93\x91\x01\xa7float32\xc4\x04abcd";
    let file = |of: &[u8]| [of, b"\x81\xa5trace\x81\xa1w", array, b"\xa1b\x81\xa1w", array].concat();
    assert_eq!(lossy(&check(&file(b"\x82\xa1a"))), [""; 0]);
    assert_eq!(lossy(&check(&file(b"\x82\xa3opt"))), ["opt/trace/w", "b/w"]);
}

#[test]
fn one_optimizer_in_a_zip_proves_the_weights_of_another_member() {
    let d = description("ppo.zip");
    assert_eq!(d.kind, Kind::Nested);
    let proven = d.tensors.iter().filter(|t| t.trained.is_some()).count();
    let weights = d.tensors.iter().filter(|t| t.is_weight()).count();
    assert_eq!((proven, weights), (8, 8), "{:?}", told(&d));
    let bytes = &files("others")["ppo.zip"];
    assert!(d.is_intact(bytes).expect("in memory"));
    // A wrong CRC of the zip around, too, says that the file is damaged.
    let mut odd = bytes.clone();
    let at = odd.windows(4).position(|w| w == b"data").expect("first member") + 4;
    odd[at] ^= 1;
    assert!(!check(&odd).is_intact(&odd).expect("in memory"));
}

#[test]
fn weights_without_training_are_not_proven() {
    for name in ["tiny.eqx", "objects.eqx"] {
        assert_eq!(lossy(&description(name)), [""; 0], "{name}");
    }
    let d = description("objects.eqx");
    assert_eq!((d.tensors.len(), d.note.is_some()), (2, true));
}

#[test]
fn arrays_that_are_text_are_named() {
    // A pickle of protocol 2 writes bytes as text.
    let text = [
        &b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01K\x01\x85"[..],
        F4,
        b"\x89c_codecs\nencode\nX\x04\0\0\0abcdX\x06\0\0\0latin1\x86Rtb.",
    ];
    let d = check(&text.concat());
    assert!(
        d.kind == Kind::Opaque && d.note.as_deref().is_some_and(|note| note.contains("protocol 4 or 5")),
        "{:?}",
        d.note
    );
}

/// Opcodes that push the type of four bytes.
const F4: &[u8] = b"cnumpy\ndtype\nX\x02\0\0\0f4\x89\x88\x87R(\
    K\x03X\x01\0\0\0<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb";

/// Opcodes that push an array of one element, in a pickle of protocol 5.
pub(super) fn array() -> Vec<u8> {
    [&b"cnumpy.core.numeric\n_frombuffer\n(C\x04abcd"[..], F4, b"K\x01\x85X\x01\0\0\0CtR"].concat()
}

/// Files in which each byte and each length is tried.
const TRIED: [&str; 7] =
    ["trained.5.pkl", "plain.joblib", "statistics.joblib", "adam.pdopt", "sgd.msgpack", "tiny.eqx", "shared.pkl"];

#[test]
fn truncated_other_formats_are_opaque_or_sane() {
    let files = files("others");
    for name in TRIED {
        let bytes = &files[name];
        let whole = check(bytes);
        for len in 0..bytes.len() {
            let d = check(&bytes[..len]);
            // Arrays in a row may end after any of them.
            assert!(d.kind == Kind::Opaque || d.kind == Kind::Npy || d.tensors == whole.tensors, "{name} cut to {len}");
        }
    }
    for (name, bytes) in files.iter().filter(|(name, _)| name.ends_with(".zip")) {
        for len in (0..bytes.len()).step_by(97) {
            assert_eq!(check(&bytes[..len]).kind, Kind::Opaque, "{name} cut to {len}");
        }
    }
}

#[test]
fn no_changed_byte_of_other_formats_does_harm() {
    let files = files("others");
    for name in TRIED {
        for at in 0..files[name].len() {
            for value in [!files[name][at], files[name][at] ^ 1] {
                let mut odd = files[name].clone();
                odd[at] = value;
                check(&odd);
            }
        }
    }
}

#[test]
fn counts_that_lie_end_soon() {
    let wrapper = |shape: &[u8]| {
        let rest = b"X\x05\0\0\0orderX\x01\0\0\0CX\x05\0\0\0dtype";
        let class = b"\x80\x02cjoblib.numpy_pickle\nNumpyArrayWrapper\n)\x81}(X\x05\0\0\0shape";
        [&class[..], shape, rest, F4, b"ub", &[1; 16], b"."].concat()
    };
    let lies: [(&str, Vec<u8>); 6] = [
        ("msgpack: a mapping", b"\xdf\xff\xff\xff\xff\xa1a\xc0".to_vec()),
        ("msgpack: an extension", b"\x81\xa1a\xc9\xff\xff\xff\xff\x01\x93".to_vec()),
        (
            "msgpack: a shape",
            b"\x81\xa1a\xc7\x1c\x01\x93\x92\xcf\x10\0\0\0\0\0\0\0\xcf\x10\0\0\0\0\0\0\0\xa4int8\xc4\x01a".to_vec(),
        ),
        ("joblib: a shape", wrapper(b"\x8a\x08\0\0\0\0\0\0\0\x10\x85")),
        ("joblib: a product", wrapper(b"\x8a\x08\0\0\0\0\0\0\0\x10\x8a\x08\0\0\0\0\0\0\0\x10\x86")),
        ("joblib: no shape", wrapper(b"N")),
    ];
    for (lie, file) in lies {
        let start = of_thread();
        assert_eq!(check(&file).kind, Kind::Opaque, "{lie}");
        assert!(of_thread() - start < Duration::from_secs(2), "{lie}");
    }
    let sound = check(&wrapper(b"K\x04\x85"));
    assert_eq!((sound.kind, sound.tensors[0].shape.as_slice()), (Kind::Joblib, &[4][..]), "{:?}", sound.note);
}

#[test]
fn depth_is_bounded() {
    let deep = [b"\x81\xa1a".repeat(100_000), b"\xc0".to_vec()].concat();
    assert_eq!(check(&deep).kind, Kind::Opaque);
}

#[test]
fn many_arrays_are_read_in_linear_time() {
    let mut file = b"\xdf\x00\x00\xea\x60".to_vec();
    for number in 0..60_000 {
        file.extend(
            [&[0xa5][..], format!("{number:05}").as_bytes(), b"\xc7\x11\x01\x93\x91\x01\xa7float32\xc4\x04abcd"]
                .concat(),
        );
    }
    let start = of_thread();
    let d = check(&file);
    assert!(of_thread() - start < Duration::from_secs(10));
    assert_eq!((d.kind, d.tensors.len()), (Kind::Flax, 60_000));
}

fn mutated() -> impl Strategy<Value = Vec<u8>> {
    let all: Vec<Vec<u8>> = files("others").into_values().filter(|file| file.len() < 20_000).collect();
    let edit = (any::<prop::sample::Index>(), any::<u8>(), 0..5u8);
    (prop::sample::select(all), prop::collection::vec(edit, 1..8)).prop_map(|(mut file, edits)| {
        for (index, value, how) in edits {
            let at = index.index(file.len());
            match how {
                0 => file[at] = value,
                1 => file[at] ^= 1 << (value % 8),
                2 => file[at] = [0, 0xff, 0x7f, 0x80][usize::from(value % 4)],
                3 if file.len() > 1 => {
                    file.remove(at);
                }
                _ => file.insert(at, value),
            }
        }
        file
    })
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

    /// Opcodes that are likely to go far, rather than any byte.
    #[test]
    fn plausible_pickles_of_arrays_never_panic(
        ops in prop::collection::vec(
            prop::sample::select(b"()]}NK01tadeulsRb.2qhoQC\x81\x85\x86\x87\x93\x94\x8f\x90\x91".to_vec()),
            0..300,
        ),
    ) {
        check(&[&b"\x80\x05"[..], &array(), &ops, b"."].concat());
    }
}
