//! Files of formats that stepfs does not understand: floats by planes, and differences to the state before, also where
//! everything moved. Always bit-exact.

use std::fs;

use codec::Dtype as Stored;
use proptest::prelude::*;
use stepfs::recall::Layout;
use stepfs::store::object::Index;

use super::series::{Dtype, Random, Rest, Tensor, safetensors};

fn step(at: usize) -> String {
    format!("run/step_{at:05}.own")
}

/// A model of 3.7 MB, whose tensors have odd sizes.
fn model(random: &mut Random) -> Vec<Tensor> {
    let shapes = [(1000, 301), (333, 1001), (1, 999), (500, 600)];
    let tensor = |(at, (rows, width)): (usize, (usize, usize))| {
        Tensor::new(&format!("{at}.weight"), Dtype::F32, &[rows, width], random)
    };
    shapes.into_iter().enumerate().map(tensor).collect()
}

fn train(model: &mut [Tensor], random: &mut Random) {
    model.iter_mut().for_each(|tensor| tensor.update(1e-4, random));
}

/// A format of its own: a header of this length, then each tensor with a few bytes before it.
fn own_format(model: &[Tensor], header: usize) -> Vec<u8> {
    let mut bytes = b"OWN1".to_vec();
    bytes.extend((4..header).map(|at| b"{\"name\": \"value\"} "[at % 18]));
    for (at, tensor) in model.iter().enumerate() {
        bytes.extend([at as u8, 255, 0, 7, 7]);
        bytes.extend(tensor.bytes());
    }
    bytes
}

/// Settles these states, compares each with what was written, and returns their indexes but for the newest, which stays.
#[track_caller]
fn settled(states: &[Vec<u8>]) -> (Rest, Vec<Index>) {
    let mut rest = Rest::new();
    for (at, state) in states.iter().enumerate() {
        rest.write(&step(at), state);
    }
    rest.settle();
    let index = |at: usize| {
        assert!(rest.read(&step(at)).unwrap() == states[at], "state {at} has other bytes");
        let object = rest.object(&step(at));
        assert!(!object.header().lossy);
        object.index().clone()
    };
    let indexes = (0..states.len() - 1).map(index).collect();
    (rest, indexes)
}

/// Bytes that the object of a state takes.
fn stored(rest: &Rest, at: usize) -> f64 {
    fs::metadata(rest.object_path(&step(at))).unwrap().len() as f64
}

/// Share of the file in runs that are differences.
fn matched(index: &Index) -> f64 {
    let len = |tensor: &&stepfs::store::object::TensorEntry| (tensor.extent.end - tensor.extent.start) as f64;
    let all: f64 = index.tensors.iter().map(|tensor| len(&tensor)).sum();
    index.tensors.iter().filter(|tensor| tensor.coding.parent.is_some()).map(|tensor| len(&tensor)).sum::<f64>() / all
}

fn noise(bytes: usize, random: &mut Random) -> Vec<u8> {
    (0..bytes / 8).flat_map(|_| random.next().to_le_bytes()).collect()
}

/// Lines that are not repeated.
fn lines(from: u64, count: u64, random: &mut Random) -> Vec<u8> {
    let mut line =
        |at| format!("{{\"step\": {at}, \"loss\": {:.9}, \"id\": \"{:016x}\"}}\n", random.normal(), random.next());
    (from..from + count).flat_map(|at| line(at).into_bytes()).collect()
}

/// States of a model in training, with headers of these lengths.
fn trained(headers: &[usize]) -> (Vec<Vec<u8>>, Vec<Vec<u8>>) {
    let mut random = Random(11);
    let mut model = model(&mut random);
    let each = |&header: &usize| {
        train(&mut model, &mut random);
        (own_format(&model, header), safetensors(&model))
    };
    headers.iter().map(each).unzip()
}

#[test]
fn raw_floats_of_every_type_take_planes() {
    let mut random = Random(1);
    let cases = [(Dtype::F32, Stored::F32, 87), (Dtype::BF16, Stored::Bf16, 70), (Dtype::F64, Stored::F64, 95)];
    for (dtype, expected, percent) in cases {
        let state = |random: &mut Random| Tensor::new("w", dtype, &[300_000], random).bytes();
        let states = [state(&mut random), state(&mut random)];
        let (rest, indexes) = settled(&states);
        assert!(indexes[0].tensors.iter().all(|tensor| tensor.dtype == expected), "{dtype:?}");
        let share = stored(&rest, 0) / states[0].len() as f64;
        assert!(share < f64::from(percent) / 100.0, "{dtype:?}: {share}");
    }
}

#[test]
fn an_unknown_container_takes_what_its_tensors_take_when_they_are_exact() {
    let (own, known) = trained(&[1000; 4]);
    let (rest, indexes) = settled(&own);
    let mut exact = Rest::under("exact");
    for (at, state) in known.iter().enumerate() {
        exact.write(&super::series::step(at), state);
    }
    exact.settle();
    for at in 0..3 {
        let of_known = fs::metadata(exact.object_path(&super::series::step(at))).unwrap().len() as f64;
        let (share, of_known) = (stored(&rest, at) / own[at].len() as f64, of_known / known[at].len() as f64);
        assert!(share < of_known + 0.02, "state {at}: {share:.3}, exact {of_known:.3}");
        assert_eq!(at > 0, matched(&indexes[at]) > 0.95, "state {at}");
    }
}

#[test]
fn tensors_that_move_are_found_again() {
    let (still, _) = trained(&[1000; 4]);
    let (moved, _) = trained(&[1000, 1013, 1026, 990]);
    let ((of_still, _), (of_moved, indexes)) = (settled(&still), settled(&moved));
    for (at, index) in indexes.iter().enumerate() {
        let (moved, still) = (stored(&of_moved, at), stored(&of_still, at));
        assert!(moved < 1.02 * still, "state {at}: {moved}, {still} where nothing moves");
        assert_eq!(at > 0, matched(index) > 0.9, "state {at}");
    }
}

#[test]
fn bytes_that_come_in_the_middle_leave_one_side_matched() {
    let (mut states, _) = trained(&[1000; 4]);
    let mut random = Random(5);
    let at = states[1].len() / 4;
    states[1].splice(at..at, noise(1000, &mut random));
    let (_, indexes) = settled(&states);
    assert!(matched(&indexes[1]) > 0.6, "{}", matched(&indexes[1]));
}

#[test]
fn a_log_that_grows_takes_what_is_new() {
    let mut random = Random(2);
    let mut log = Vec::new();
    let states: Vec<Vec<u8>> = (0..12)
        .map(|at| {
            log.extend(lines(at * 4000, 4000, &mut random));
            log.clone()
        })
        .collect();
    let (rest, _) = settled(&states);
    let first = stored(&rest, 0);
    for at in 1..11 {
        // A super-step repeats the growth of eight states.
        let most = if at == 8 { 9.0 } else { 2.0 };
        assert!(stored(&rest, at) < most * first, "state {at}: {}, the first {first}", stored(&rest, at));
    }
}

#[test]
fn records_that_change_in_place_take_what_changed() {
    let mut random = Random(3);
    let mut pages = lines(0, 40_000, &mut random);
    let mut states = Vec::new();
    for at in 0..4u64 {
        // One page in twenty becomes another one, as in a database.
        for _ in 0..pages.len() / 4096 / 20 {
            let page = random.below(pages.len() as u64 / 4096 - 1) as usize * 4096;
            let new = lines(at * 1000, 100, &mut random);
            pages[page..page + 4096].copy_from_slice(&new[..4096]);
        }
        states.push(pages.clone());
    }
    let (rest, indexes) = settled(&states);
    for (at, index) in indexes.iter().enumerate().skip(1) {
        assert!(matched(index) > 0.99, "{at}");
        assert!(stored(&rest, at) < 0.08 * stored(&rest, 0), "{at}: {}", stored(&rest, at));
    }
}

#[test]
fn equal_truncated_overwritten_and_swapped_files_come_back() {
    let mut random = Random(4);
    let (a, b) = (lines(0, 20_000, &mut random), lines(7, 20_000, &mut random));
    let floats = Tensor::new("w", Dtype::F32, &[400_000], &mut random).bytes();
    let half = [&b[..b.len() / 2], &a[a.len() / 2..]].concat();
    let states =
        [a.clone(), b.clone(), half, a[..300_000].to_vec(), a.clone(), floats.clone(), floats[3..].to_vec(), b, a];
    settled(&states);
    // Two files that change places with each save.
    let mut rest = Rest::new();
    for at in 0..4 {
        let (one, other) = if at % 2 == 0 { (&states[0], &states[5]) } else { (&states[5], &states[0]) };
        rest.write(&format!("step_{at}/one.own"), one);
        rest.write(&format!("step_{at}/other.own"), other);
    }
    rest.settle();
    for (name, written) in &rest.written {
        assert!(rest.read(name).unwrap() == *written, "{name}");
    }
}

#[test]
fn what_does_not_shrink_stays() {
    let mut random = Random(6);
    let mut rest = Rest::new();
    for at in 0..3 {
        rest.write(&step(at), &noise(1_500_000, &mut random));
    }
    rest.settle();
    assert_eq!(rest.count(), 0);
}

#[test]
fn a_state_needs_no_other_one_whose_bytes_do_not_help() {
    let mut random = Random(7);
    let states: Vec<Vec<u8>> = (0..3).map(|_| Tensor::new("w", Dtype::F32, &[400_000], &mut random).bytes()).collect();
    let (rest, indexes) = settled(&states);
    assert!(indexes.iter().all(|index| matched(index) == 0.0));
    assert!((0..2).all(|at| rest.object(&step(at)).header().parent.is_none()));
}

#[test]
fn a_read_decodes_what_it_touches() {
    let (states, _) = trained(&[1000, 1013, 1026]);
    let (rest, _) = settled(&states);
    let layout = Layout::of(&rest.object(&step(1)));
    let longest = layout.segments.iter().map(|segment| segment.range.end - segment.range.start).max();
    assert_eq!(longest, Some(512 << 10));
    let archive = rest.open();
    let reader = archive.reader(&rest.stub(&step(1)).unwrap()).unwrap();
    let mut random = Random(8);
    for _ in 0..50 {
        let at = random.below(states[1].len() as u64 - 5000);
        let mut buf = vec![0; 5000];
        assert_eq!(reader.read_at(at, &mut buf).unwrap(), buf.len());
        assert_eq!(buf, states[1][at as usize..][..5000]);
    }
}

#[test]
fn whatever_state_goes_the_others_keep_their_bytes_and_their_matches() {
    let headers: Vec<usize> = (0..12).map(|at| 1000 + 13 * at).collect();
    let (states, _) = trained(&headers);
    let (rest, _) = settled(&states);
    let before: f64 = (0..11).map(|at| stored(&rest, at)).sum();
    for gone in [vec![3], vec![0, 1], vec![8], vec![5, 6, 7]] {
        for at in gone {
            fs::remove_file(rest.path(&step(at))).unwrap();
        }
        rest.settle();
        for at in (0..12).filter(|at| rest.path(&step(*at)).exists()) {
            assert!(rest.read(&step(at)).unwrap() == states[at], "state {at}");
        }
    }
    let left: Vec<usize> = (0..11).filter(|at| rest.path(&step(*at)).exists()).collect();
    let after: f64 = left.iter().map(|at| stored(&rest, *at)).sum();
    assert!(after < before * left.len() as f64 / 11.0 * 1.15, "{after} of {before}");
    let differences = left.iter().filter(|at| rest.object(&step(**at)).header().parent.is_some()).count();
    assert!(differences + 2 >= left.len(), "{differences} of {left:?}");
}

#[test]
fn runs_have_one_name_in_all_states() {
    let (states, _) = trained(&[1000, 1013, 1026, 1039]);
    let (_, indexes) = settled(&states);
    let names = |index: &Index| -> Vec<String> { index.tensors.iter().map(|tensor| tensor.path.clone()).collect() };
    assert_eq!(names(&indexes[1]), names(&indexes[2]));
    let mut unique = names(&indexes[2]);
    unique.sort_unstable();
    unique.dedup();
    assert_eq!(unique.len(), indexes[2].tensors.len());
    let parents = |index: &Index| index.tensors.iter().filter_map(|tensor| tensor.coding.parent).count();
    assert!(!indexes[1].tensors[0].coding.is_lossy() && indexes[1].tensors[0].coding.parent.is_some());
    assert!(parents(&indexes[1]) > 0);
}

/// A change of a file's bytes.
#[derive(Clone, Debug)]
enum Edit {
    Insert(prop::sample::Index, u16),
    Remove(prop::sample::Index, u32),
    Overwrite(prop::sample::Index, u32),
    Append(u32),
    Truncate(prop::sample::Index),
    Move(prop::sample::Index, prop::sample::Index, u32),
    Train,
}

fn edit() -> impl Strategy<Value = Edit> {
    let at = any::<prop::sample::Index>;
    prop_oneof![
        (at(), any::<u16>()).prop_map(|(at, len)| Edit::Insert(at, len)),
        (at(), 0..400_000u32).prop_map(|(at, len)| Edit::Remove(at, len)),
        (at(), 0..400_000u32).prop_map(|(at, len)| Edit::Overwrite(at, len)),
        (0..400_000u32).prop_map(Edit::Append),
        at().prop_map(Edit::Truncate),
        (at(), at(), 0..700_000u32).prop_map(|(from, to, len)| Edit::Move(from, to, len)),
        Just(Edit::Train),
    ]
}

fn apply(edit: &Edit, bytes: &mut Vec<u8>, random: &mut Random) {
    let end = bytes.len();
    match edit {
        Edit::Insert(at, len) => {
            let at = at.index(end);
            bytes.splice(at..at, noise(usize::from(*len), random));
        }
        Edit::Remove(at, len) => {
            let at = at.index(end);
            bytes.drain(at..end.min(at + *len as usize));
        }
        Edit::Overwrite(at, len) => {
            let at = at.index(end);
            let new = lines(0, 10_000, random);
            let len = (*len as usize).min(end - at).min(new.len());
            bytes[at..at + len].copy_from_slice(&new[..len]);
        }
        Edit::Append(len) => bytes.extend(Tensor::new("w", Dtype::F32, &[*len as usize / 4], random).bytes()),
        Edit::Truncate(at) => bytes.truncate(at.index(end).max(end / 2)),
        Edit::Move(from, to, len) => {
            let from = from.index(end);
            let piece: Vec<u8> = bytes.drain(from..end.min(from + *len as usize)).collect();
            let to = to.index(bytes.len().max(1)).min(bytes.len());
            bytes.splice(to..to, piece);
        }
        Edit::Train => {
            for element in bytes.chunks_exact_mut(4) {
                let value = f32::from_le_bytes(element.try_into().unwrap());
                element.copy_from_slice(&(value * (1.0 + 1e-3 * random.normal() as f32)).to_le_bytes());
            }
        }
    }
    // Smaller files are none of the archive's business.
    if bytes.len() < 100_000 {
        bytes.extend(lines(0, 2000, random));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, max_shrink_iters: 20, ..ProptestConfig::default() })]

    #[test]
    fn any_history_of_edits_comes_back(
        seed: u64,
        edits in prop::collection::vec(prop::collection::vec(edit(), 1..4), 3..12),
        gone in prop::collection::vec(any::<prop::sample::Index>(), 0..4),
    ) {
        let mut random = Random(seed);
        let mut bytes = own_format(&model(&mut random)[..1], 1000 + random.below(9) as usize);
        bytes.extend(lines(0, 5000, &mut random));
        let mut rest = Rest::new();
        for (at, edits) in edits.iter().enumerate() {
            edits.iter().for_each(|edit| apply(edit, &mut bytes, &mut random));
            rest.write(&step(at), &bytes);
        }
        rest.settle();
        let mut left: Vec<String> = rest.written.keys().cloned().collect();
        let check = |left: &[String]| left.iter().all(|name| rest.read(name).unwrap() == rest.written[name]);
        prop_assert!(check(&left));
        for gone in gone {
            if left.len() > 1 {
                fs::remove_file(rest.path(&left.remove(gone.index(left.len() - 1)))).unwrap();
            }
        }
        rest.settle();
        prop_assert!(check(&left));
    }
}
