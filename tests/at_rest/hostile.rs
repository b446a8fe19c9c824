//! Objects with right checksums and wrong payloads or tables. Damage is an error, never a panic, never other bytes,
//! never a hang.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

use codec::moment::Rule;
use proptest::prelude::*;
use stepfs::archive::ReadError;
use stepfs::recall::Chain;
use stepfs::store::durable::Io;
use stepfs::store::object::{Object, ObjectWriter, TensorEntry, Tile};
use stepfs::store::{Id, Objects};
use stepfs::tile::{Codec, Coding};

use super::adam::{Adam, Parameter, round};
use super::series::{Dtype, Random, Rest, Tensor, decode, find, safetensors, step};
use super::sound::sound;

/// Small states with every coding: a keyframe, differences, and (where the first goes) its replacement. States of a
/// table with other rows are another lineage.
pub(crate) fn states(count: usize, rows: usize) -> Vec<Vec<u8>> {
    let mut adam = Adam::new(0.999, 51, |random| vec![Parameter::new("a.weight", Dtype::F32, &[20, 24], random)]);
    let mut random = Random(52);
    let mut table = Tensor::new("table", Dtype::F32, &[rows, 6], &mut random);
    let mut buffer = Tensor::new("state.table.momentum_buffer", Dtype::F32, &[rows, 6], &mut random);
    let mut ids = Tensor::new("ids", Dtype::I64, &[8192], &mut random);
    ids.values.fill(3.0);
    let mut note = Tensor::new("note", Dtype::I64, &[600], &mut random);
    adam.train(20);
    let state = |_| {
        adam.train(2);
        for row in 0..rows {
            // A fifth of the rows moves.
            let pairs = table.values[6 * row..][..6].iter_mut().zip(&mut buffer.values[6 * row..][..6]);
            if random.below(5) == 0 {
                pairs.for_each(|(w, b)| {
                    *b = round(Dtype::F32, 1e-3 * random.normal());
                    *w += *b;
                });
            }
        }
        note.values.iter_mut().step_by(7).for_each(|value| *value += 1.0);
        let mut tensors = adam.tensors();
        let mut copy = find(&mut tensors, "a.weight").clone();
        (copy.name, copy.dtype) = ("copy".into(), Dtype::BF16);
        copy.values.iter_mut().for_each(|value| *value = round(Dtype::BF16, *value));
        tensors.extend([copy, table.clone(), buffer.clone(), ids.clone(), note.clone()]);
        safetensors(&tensors)
    };
    (0..count).map(state).collect()
}

pub(crate) fn coding_name(coding: Coding) -> &'static str {
    let is_difference = coding.parent.is_some();
    match coding.codec {
        Codec::Lossless if is_difference => "lossless difference",
        Codec::Lattice { .. } if !is_difference => "lattice keyframe",
        Codec::Rows { .. } if !is_difference => "rows keyframe",
        Codec::Log { .. } if !is_difference => "log keyframe",
        Codec::External if !is_difference => "published keyframe",
        Codec::Moment { rule: Rule::Norm, .. } => "moment by its norm",
        Codec::Moment { rule: Rule::Inward, .. } => "moment rounded inward",
        codec => codec.name(),
    }
}

/// Entries of [`Victims::each`].
const VICTIMS_EACH: usize = 7;

/// Two objects, the second a difference to the first, and one of a store whose first state went.
struct Victims {
    stores: Vec<Rest>,
    /// Store, object to change, object to read, its bytes.
    each: Vec<(usize, Id, Id, Vec<u8>)>,
    codings: BTreeSet<&'static str>,
}

fn victims() -> Victims {
    let mut rest = Rest::new();
    for (at, state) in states(4, 256).iter().enumerate() {
        rest.write(&step(at + 1), state);
    }
    rest.settle();
    let other = rest.copied();
    fs::remove_file(other.path(&step(1))).unwrap();
    other.settle();
    let mut published = Rest::under("lc-3");
    for (at, state) in states(4, 256).iter().enumerate() {
        published.write(&step(at + 1), state);
    }
    published.settle();
    let merged = published.copied();
    [1, 2].iter().for_each(|at| fs::remove_file(merged.path(&step(*at))).unwrap());
    merged.settle();
    let mut found =
        Victims { stores: vec![rest, other, published, merged], each: Vec::new(), codings: BTreeSet::new() };
    for (store, changed, read) in [(0, 1, 2), (0, 2, 2), (1, 2, 3), (1, 3, 3), (2, 2, 3), (2, 3, 3), (3, 3, 3)] {
        let rest = &found.stores[store];
        found.codings.extend(sound(rest, &step(changed)).tensors.iter().map(|tensor| coding_name(tensor.coding)));
        found.each.push((store, rest.id(&step(changed)), rest.id(&step(read)), rest.read(&step(read)).unwrap()));
    }
    found
}

/// A store whose objects can be changed and restored.
struct Hurt<'a> {
    root: PathBuf,
    objects: Objects,
    changed: Id,
    read: Id,
    right: &'a [u8],
    whole: Vec<u8>,
    path: PathBuf,
}

impl<'a> Hurt<'a> {
    fn of(victims: &'a Victims, number: usize) -> Hurt<'a> {
        let (store, changed, read, right) = &victims.each[number];
        let root = victims.stores[*store].root();
        let path = stepfs::store::object::path_of(&root.join("objects"), *changed);
        let whole = fs::read(&path).unwrap();
        Hurt { objects: victims.stores[*store].objects(), root, changed: *changed, read: *read, right, whole, path }
    }

    #[track_caller]
    fn check(&self, what: &str) -> bool {
        let read: Result<Vec<u8>, ReadError> = decode(&self.objects, self.read);
        match &read {
            Ok(read) => assert!(read == self.right, "{what}: other bytes"),
            Err(error) => assert!(error.is_damage(), "{what}: {error}"),
        }
        read.is_ok()
    }

    /// Writes the object with other payloads and another table, all checksums right. Returns whether it still reads the
    /// same.
    #[track_caller]
    fn rewrite(
        &self,
        what: &str,
        mut payload: impl FnMut(usize, &mut Vec<u8>),
        table: impl FnOnce(&mut Vec<TensorEntry>),
    ) -> bool {
        fs::write(&self.path, &self.whole).unwrap();
        let objects = self.root.join("objects");
        let object = Object::open(&objects, self.changed).unwrap();
        let mut writer = ObjectWriter::rewrite(&Io::disk(), &self.root.join("tmp"), self.changed).unwrap();
        let mut index = object.index().clone();
        let (mut number, mut bytes) = (0, Vec::new());
        for tile in tiles(&mut index.tensors).into_iter().chain(&mut index.skeleton) {
            object.payload(tile, &mut bytes).unwrap();
            payload(number, &mut bytes);
            *tile = writer.put(&bytes, tile.decoded_hash).unwrap();
            number += 1;
        }
        table(&mut index.tensors);
        writer.close(&index).unwrap();
        writer.finish(object.header(), &objects).unwrap();
        self.check(what)
    }
}

impl Drop for Hurt<'_> {
    fn drop(&mut self) {
        let _ = fs::write(&self.path, &self.whole);
    }
}

fn tiles(tensors: &mut [TensorEntry]) -> Vec<&mut Tile> {
    tensors.iter_mut().flat_map(|tensor| tensor.factors.iter_mut().chain(&mut tensor.tiles)).collect()
}

#[test]
fn every_coding_is_among_the_victims() {
    let victims = victims();
    let all = [
        "cast", "published", "published keyframe", "lattice", "lattice keyframe", "log", "log keyframe", "lossless",
        "lossless difference", "moment", "rows", "rows keyframe",
    ];
    assert_eq!(victims.codings, BTreeSet::from(all));
    // Unchanged, an object that is written again is the same.
    for number in 0..victims.each.len() {
        assert!(Hurt::of(&victims, number).rewrite("nothing", |_, _| {}, |_| {}));
    }
}

#[test]
fn no_changed_or_shortened_object_of_a_state_gives_other_bytes() {
    let victims = victims();
    let hurt = |number| {
        let hurt = Hurt::of(&victims, number);
        for place in 0..hurt.whole.len() {
            let mut changed = hurt.whole.clone();
            changed[place] ^= 1 << (place % 8);
            fs::write(&hurt.path, &changed).unwrap();
            hurt.check(&format!("byte {place}"));
            if place % 7 == 0 {
                fs::write(&hurt.path, &hurt.whole[..place]).unwrap();
                assert!(!hurt.check("length"), "{place}");
            }
        }
        fs::write(&hurt.path, &hurt.whole).unwrap();
    };
    std::thread::scope(|scope| {
        for store in 0..victims.stores.len() {
            let (victims, hurt) = (&victims, &hurt);
            scope.spawn(move || (0..VICTIMS_EACH).filter(|number| victims.each[*number].0 == store).for_each(hurt));
        }
    });
}

/// Every byte of every payload in turn, under a right checksum.
#[test]
fn every_byte_of_every_payload() {
    let victims = victims();
    for number in 0..victims.each.len() {
        let hurt = Hurt::of(&victims, number);
        let mut index = Object::open(&hurt.root.join("objects"), hurt.changed).unwrap().index().clone();
        let lengths: Vec<u32> = tiles(&mut index.tensors).iter().map(|tile| tile.stored).collect();
        let mut random = Random(number as u64);
        for (tile, length) in lengths.into_iter().enumerate() {
            // The first bytes are modes and lengths; of the others a sample.
            let places = (0..length).filter(|place| *place < 24 || random.below(20) == 0);
            for place in places.collect::<Vec<_>>() {
                let flip = |at: usize, bytes: &mut Vec<u8>| {
                    if at == tile {
                        bytes[place as usize] ^= 1 << random.below(8);
                    }
                };
                hurt.rewrite(&format!("tile {tile}, byte {place}"), flip, |_| {});
            }
        }
    }
}

/// Every coding that a table could have, most of them wrong.
fn any_coding() -> impl Strategy<Value = Coding> {
    let number = prop_oneof![0u32..8, Just(u32::MAX), any::<u32>()];
    let step = prop_oneof![
        Just(0.0),
        Just(-1e-3),
        Just(f64::NAN),
        Just(f64::INFINITY),
        Just(f64::MIN_POSITIVE / 4.0),
        Just(1e300),
        1e-9..1e-1f64,
        (0i32..30).prop_map(|e| f64::from(-e).exp2()),
    ];
    let unit = prop_oneof![(0u32..32).prop_map(|bits| 1 << bits), any::<u32>()];
    (number, step, unit, 0..8, any::<bool>()).prop_map(|(number, step, unit, kind, is_difference)| {
        let codec = match kind {
            0 => Codec::Lossless,
            1 => Codec::Lattice { step },
            2 => Codec::Rows { step },
            3 => Codec::Log { unit },
            4 => Codec::Moment {
                second: number,
                step,
                rule: [Rule::Root, Rule::Norm, Rule::Inward][number as usize % 3],
            },
            5 => Codec::External,
            6 => Codec::Sized { step, rule: [Rule::Norm, Rule::Sign][number as usize % 2] },
            _ => Codec::Cast { of: number },
        };
        Coding { codec, parent: is_difference.then_some(number) }
    })
}

fn any_type() -> impl Strategy<Value = codec::Dtype> {
    (0..codec::Dtype::ALL.len()).prop_map(|at| codec::Dtype::ALL[at])
}

thread_local! {
    static VICTIMS: RefCell<Option<Victims>> = const { RefCell::new(None) };
}

fn with_victims(test: impl FnOnce(&Victims)) {
    VICTIMS.with_borrow_mut(|victims| test(victims.get_or_insert_with(self::victims)));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// One payload is replaced: by noise, by another's, by a part of itself.
    #[test]
    fn hostile_payloads_are_damage(
        number in 0..VICTIMS_EACH,
        which in any::<prop::sample::Index>(),
        other in any::<prop::sample::Index>(),
        noise in prop::collection::vec(any::<u8>(), 0..64),
        at in any::<prop::sample::Index>(),
        how in 0..5,
    ) {
        with_victims(|victims| {
            let hurt = Hurt::of(victims, number);
            let object = Object::open(&hurt.root.join("objects"), hurt.changed).unwrap();
            let mut index = object.index().clone();
            let mut all = tiles(&mut index.tensors);
            let (which, mut strange) = (which.index(all.len()), Vec::new());
            object.payload(other.get_mut(&mut all), &mut strange).unwrap();
            let change = |tile: usize, bytes: &mut Vec<u8>| {
                if tile != which {
                    return;
                }
                let place = at.index(bytes.len() + 1);
                match how {
                    0 => *bytes = noise.clone(),
                    1 => *bytes = strange.clone(),
                    2 => bytes.truncate(place),
                    3 => {
                        bytes.truncate(place);
                        bytes.extend_from_slice(&noise);
                    }
                    _ => noise.iter().zip(&mut bytes[place..]).for_each(|(noise, byte)| *byte = *noise),
                }
            };
            hurt.rewrite("payload", change, |_| {});
        });
    }

    /// A table that contradicts a tensor's coding.
    #[test]
    fn hostile_tables_are_damage(
        number in 0..VICTIMS_EACH,
        which in any::<prop::sample::Index>(),
        coding in prop::option::weighted(0.7, any_coding()),
        dtype in prop::option::weighted(0.2, any_type()),
        shape in prop::option::weighted(0.2, prop::collection::vec(0u64..700, 0..4)),
        no_factors in prop::bool::weighted(0.1),
    ) {
        with_victims(|victims| {
            let hurt = Hurt::of(victims, number);
            hurt.rewrite("table", |_, _| {}, |tensors| {
                let tensor = which.get_mut(tensors);
                tensor.coding = coding.unwrap_or(tensor.coding);
                tensor.dtype = dtype.unwrap_or(tensor.dtype);
                tensor.shape = shape.unwrap_or_else(|| tensor.shape.clone());
                tensor.factors = tensor.factors.filter(|_| !no_factors);
            });
            drop(Chain::open(&hurt.objects, hurt.read));
        });
    }
}
