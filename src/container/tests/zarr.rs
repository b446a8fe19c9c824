//! Chunks of zarr (tests/corpus/zarr, made by make_zarr.py): a chunk is a tensor only if it is nothing but elements.

use std::fs;
use std::io;
use std::path::Path;

use super::{Description, Kind, Role, corpus};
use crate::codec::Dtype;
use crate::container::{describe_at, is_named_elsewhere};

/// Describes `chunk` at `path`, whose array is described by the file that the corpus has of `array`.
fn described(array: &str, directory: &str, chunk: &str) -> Description {
    let folder = corpus("zarr").join(array);
    let open = |path: &Path| {
        assert!(path.starts_with("run"), "{}", path.display());
        match path.parent() == Some(Path::new(directory)) {
            true => fs::read(folder.join(path.file_name().expect("a file"))),
            false => Err(io::ErrorKind::NotFound.into()),
        }
    };
    let path = Path::new(directory).join(chunk);
    assert!(is_named_elsewhere(&path), "{chunk}");
    describe_at(&path, &fs::read(folder.join("chunk")).expect("corpus file"), open).expect("in memory")
}

#[test]
fn plain_chunks_are_tensors() {
    for (array, chunk, dtype) in [
        ("two", "0.0", Dtype::F32),
        ("three", "c/0/0", Dtype::F32),
        ("three", "c.0.0", Dtype::F32),
        ("three_half", "c/0/0", Dtype::F16),
    ] {
        // The name of an array may be a number.
        for directory in ["run/step_5/params.dense_1.kernel", "run/5/kernel", "run/5/7"] {
            let d = described(array, directory, chunk);
            let [tensor] = &d.tensors[..] else { panic!("{array}: {d:?}") };
            let name = Path::new(directory).file_name().and_then(|name| name.to_str()).expect("a name");
            let is = (d.kind, tensor.path.strip_prefix("./"), tensor.role);
            assert_eq!(is, (Kind::Zarr, Some(name), Role::Other), "{array}");
            assert_eq!((tensor.dtype, &tensor.shape[..], tensor.trained), (dtype, &[6, 5][..], None), "{array}");
            assert_eq!(tensor.extent, 0..30 * dtype.size() as u64);
        }
    }
    let part = described("two_parts", "run/w/kernel", "1.0");
    assert_eq!((part.tensors[0].path.as_str(), &part.tensors[0].shape[..]), ("./kernel[1, 0]", &[4, 5][..]));
}

#[test]
fn other_chunks_are_opaque() {
    for array in ["two_by_column", "two_compressed", "three_big", "three_compressed", "three_checked", "three_sharded"]
    {
        let chunk = if array.starts_with("two") { "0.0" } else { "c/0/0" };
        assert_eq!(described(array, "run/kernel", chunk).kind, Kind::Opaque, "{array}");
    }
    // Beyond the array, of another length, or of another number of dimensions.
    for chunk in ["2.0", "0.1", "0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0"] {
        assert_eq!(described("two_parts", "run/kernel", chunk).kind, Kind::Opaque, "{chunk}");
    }
    for path in ["run/0", "run/c/0", "run/w.0", "run/model.pt", "run/0.x", "run/+1.2", "run/.0", "run/0.", "0", "w/0/0"]
    {
        assert!(!is_named_elsewhere(Path::new(path)), "{path}");
    }
}

#[test]
fn a_damaged_description_is_none_of_a_chunk() {
    for (array, name) in [("two", ".zarray"), ("three", "zarr.json")] {
        let (json, chunk) = (fs::read(corpus("zarr").join(array).join(name)).expect("corpus file"), vec![0; 120]);
        let kind = |json: &[u8]| {
            let d = describe_at(Path::new("run/w/0.0"), &chunk, |_| Ok(json)).expect("in memory");
            assert!(d.kind == Kind::Opaque || d.tensors[0].extent == (0..120));
            d.kind
        };
        assert_eq!(kind(&json), Kind::Zarr);
        // Blanks may stand behind it.
        let end = json.iter().rposition(|byte| *byte == b'}').expect("an object");
        for len in 0..=end {
            assert_eq!(kind(&json[..len]), Kind::Opaque, "{array} cut at {len}");
        }
        for at in 0..json.len() {
            for bits in [1, 2, 8, 16] {
                let mut changed = json.clone();
                changed[at] ^= bits;
                kind(&changed);
            }
        }
        let huge = String::from_utf8(json).expect("text").replace('6', "4611686018427387904");
        assert_eq!(kind(huge.as_bytes()), Kind::Opaque);
    }
}
