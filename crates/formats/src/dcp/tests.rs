//! A checkpoint that two ranks wrote (tests/corpus/dcp, made by make_dcp.py), and what may become of it.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::super::{ChangedTensor, Description, Kind, Role, Tensor, describe};
use super::Model;
use crate::{Siblings, siblings};

const METADATA: &str = ".metadata";
const RANKS: [&str; 2] = ["__0_0.distcp", "__1_0.distcp"];

fn file(name: &str) -> Vec<u8> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/corpus/dcp");
    fs::read(folder.join(name)).expect(name)
}

fn model() -> Model {
    Model::read(&file(METADATA)).unwrap()
}

fn named(rank: &str) -> Description {
    let mut description = describe(&file(rank)).unwrap();
    assert_eq!(description.kind, Kind::Dcp);
    description.name_chunks(Path::new(rank), &model());
    assert_eq!(description.note, None);
    description
}

#[test]
fn it_has_the_tensors_and_roles_of_the_same_state_saved_whole() {
    type Facts = (Role, Option<&'static str>, Vec<u64>, Option<String>, Option<String>);
    fn facts(tensors: &[Tensor]) -> BTreeMap<&str, Facts> {
        let path = |index: Option<usize>| index.map(|index: usize| tensors[index].path.clone());
        let of = |t: &Tensor| (t.role, t.trained, t.shape.clone(), path(t.of), path(t.partner));
        tensors.iter().map(|t| (t.path.as_str(), of(t))).collect()
    }
    let whole = describe(&file("tiny.pt")).unwrap();
    let model = model();
    assert!(model.tensors().len() > 20);
    assert_eq!(facts(model.tensors()), facts(&whole.tensors));
    let mut files: Vec<_> = model.files().collect();
    files.sort_unstable();
    assert_eq!(files, RANKS.map(|rank| (rank, file(rank).len() as u64)));
}

#[test]
fn chunks_are_cut_from_their_tensors() {
    let (model, bytes) = (model(), file("tiny.pt"));
    let whole = describe(&bytes).unwrap();
    let mut rows = BTreeMap::new();
    for rank in RANKS {
        let data = file(rank);
        for tensor in named(rank).tensors {
            let path = tensor.path.split('[').next().unwrap().to_string();
            let at = tensor.extent.start as usize..tensor.extent.end as usize;
            // Ranks cut along the first dimension, the first rank's rows first.
            rows.entry(path).or_insert_with(Vec::new).extend_from_slice(&data[at]);
            for other in [tensor.of, tensor.partner].into_iter().flatten() {
                assert_eq!(named(rank).tensors[other].shape, tensor.shape);
            }
        }
    }
    assert_eq!(rows.len(), model.tensors().len());
    for tensor in whole.tensors {
        let at = tensor.extent.start as usize..tensor.extent.end as usize;
        assert!(rows[&tensor.path] == bytes[at], "{}", tensor.path);
    }
}

#[test]
fn moments_and_their_parameter_meet_in_a_rank() {
    for rank in RANKS {
        let description = named(rank);
        let mean = description.tensors.iter().find(|t| t.path.contains("/0.weight/exp_avg[")).unwrap();
        assert_eq!(mean.role, Role::FirstMoment);
        assert!(description.tensors[mean.of.unwrap()].path.starts_with("model/0.weight["));
        assert!(description.tensors[mean.partner.unwrap()].path.contains("exp_avg_sq["));
    }
}

#[test]
fn without_names_nothing_is_a_weight() {
    let description = describe(&file(RANKS[0])).unwrap();
    assert!(!description.tensors.is_empty() && description.tensors.iter().all(|t| t.role == Role::Other));
    let mut other = describe(&file(RANKS[0])).unwrap();
    other.name_chunks(Path::new("__7_0.distcp"), &model());
    assert_eq!(other.tensors, description.tensors);
    assert!(other.note.is_some());
    // The places of another rank's chunks are not this one's.
    let mut swapped = describe(&file(RANKS[0])).unwrap();
    swapped.name_chunks(Path::new(RANKS[1]), &model());
    assert!(swapped.tensors.iter().zip(&description.tensors).all(|(a, b)| a.extent == b.extent));
}

#[test]
fn a_changed_tensor_makes_a_sound_file() {
    let mut bytes = file(RANKS[0]);
    let description = named(RANKS[0]);
    let mut changed = Vec::new();
    for (index, tensor) in description.tensors.iter().enumerate().filter(|(_, t)| t.is_weight()) {
        let at = tensor.extent.start as usize..tensor.extent.end as usize;
        let crc_before = crc32fast::hash(&bytes[at.clone()]);
        bytes[at.start] ^= 1;
        changed.push(ChangedTensor { index, crc_before, crc_after: crc32fast::hash(&bytes[at]) });
    }
    assert!(changed.len() > 2 && !describe(&bytes).unwrap().is_intact(&bytes).unwrap());
    for patch in description.patches(&file(RANKS[0]), &changed).unwrap() {
        let at = patch.offset as usize;
        bytes[at..at + patch.bytes.len()].copy_from_slice(&patch.bytes);
    }
    let after = describe(&bytes).unwrap();
    assert!(after.kind == Kind::Dcp && after.is_intact(&bytes).unwrap());
}

#[test]
fn a_zip_in_a_chain_is_not_taken_for_the_whole_file() {
    let one = file("tiny.pt");
    let tensors = describe(&one).unwrap().tensors.len();
    // Zips of one length: the end record of the last would fit the first, too.
    let three = [&one[..], &one, &one].concat();
    let description = describe(&three).unwrap();
    assert_eq!((description.kind, description.tensors.len()), (Kind::Dcp, 3 * tensors));
    for broken in
        [[&one[..], b"x", &one].concat(), [&one[..], &one[..one.len() - 1]].concat(), [b"PK", &one[..]].concat()]
    {
        assert_eq!(describe(&broken).unwrap().kind, Kind::Opaque);
    }
}

/// Whatever stands in `.metadata`, no tensor moves, and a relation is one of equals.
fn naming_is_sane(metadata: &[u8], rank: &str, before: &Description) {
    let Ok(model) = Model::read(&metadata) else { return };
    let mut after = before.clone();
    after.name_chunks(Path::new(rank), &model);
    for (a, b) in after.tensors.iter().zip(&before.tensors) {
        assert_eq!((&a.extent, a.dtype, &a.shape), (&b.extent, b.dtype, &b.shape));
        for other in [a.of, a.partner].into_iter().flatten() {
            assert_eq!(after.tensors[other].shape, a.shape);
        }
        assert!(a.role != Role::FirstMoment || a.partner.is_some());
    }
}

#[test]
fn no_changed_or_shortened_metadata_does_harm() {
    let (metadata, rank) = (file(METADATA), RANKS[0]);
    let before = describe(&file(rank)).unwrap();
    for len in 0..metadata.len() {
        naming_is_sane(&metadata[..len], rank, &before);
    }
    for at in 0..metadata.len() {
        // Two of four values in turn: fuzzing tries all.
        for value in [0, metadata[at].wrapping_add(1), 0xff, metadata[at] ^ 0x80].into_iter().skip(at % 2).step_by(2) {
            let mut changed = metadata.clone();
            changed[at] = value;
            naming_is_sane(&changed, rank, &before);
        }
    }
}

#[test]
fn no_shortened_chain_does_harm() {
    let bytes = file(RANKS[0]);
    for len in (0..bytes.len()).step_by(7) {
        let description = describe(&bytes[..len].to_vec()).unwrap();
        assert!(description.tensors.iter().all(|t| t.extent.end <= len as u64));
    }
}

#[test]
fn files_of_chunks_are_known_by_their_name() {
    let index = Siblings { index: "step_1/.metadata".into(), files: None };
    assert_eq!(siblings(Path::new("step_1/__0_3.distcp")), Some(index));
    assert!(siblings(Path::new("tiny.pt")).is_none() && siblings(Path::new(METADATA)).is_none());
}
