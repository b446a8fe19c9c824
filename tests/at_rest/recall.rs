//! Reading released files in pieces.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use safetensors::Dtype;
use stepfs::recall::{Cache, Reader, Recall};

use super::series::{Random, Rest, Tensor, safetensors, states, step};

/// Reads pieces of all sizes at random places, and compares them with the whole.
fn random_reads(reader: &Reader, whole: &[u8], seed: u64, count: usize) {
    let mut random = Random(seed);
    let len = whole.len() as u64;
    for _ in 0..count {
        let offset = random.below(len + 100);
        let most = 1 << random.below(19);
        let mut buf = vec![0xaa; random.below(most) as usize];
        let read = reader.read_at(offset, &mut buf).unwrap();
        let expected = &whole[whole.len().min(offset as usize)..whole.len().min(offset as usize + buf.len())];
        assert_eq!(read, expected.len());
        assert_eq!(&buf[..read], expected, "{} bytes at {offset}", buf.len());
    }
    assert_eq!(reader.read_at(len, &mut [0; 10]).unwrap(), 0);
    assert_eq!(reader.read_at(u64::MAX, &mut [0; 10]).unwrap(), 0);
}

fn settled(cache_mib: &str) -> Rest {
    let mut rest = Rest::with(|text| text.replace("cache_mib = 10240", cache_mib));
    for (at, state) in states(5).into_iter().enumerate() {
        rest.write(&step(at + 1), &state);
    }
    rest.settle();
    rest
}

#[test]
fn pieces_are_those_of_the_whole() {
    for cache_mib in ["cache_mib = 10240", "cache_mib = 0"] {
        let rest = settled(cache_mib);
        let archive = rest.open();
        for at in 1..5 {
            let whole = rest.read(&step(at)).unwrap();
            let reader = archive.reader(&rest.stub(&step(at)).unwrap()).unwrap();
            assert_eq!(reader.len(), whole.len() as u64);
            random_reads(&reader, &whole, at as u64, 200);
            // In order, as a copy does.
            let mut copy = Vec::new();
            let mut buf = vec![0; 10_000];
            while copy.len() < whole.len() {
                let read = reader.read_at(copy.len() as u64, &mut buf).unwrap();
                copy.extend_from_slice(&buf[..read]);
            }
            assert_eq!(copy, whole);
            match reader.whole() {
                Some(_) => assert_eq!(cache_mib, "cache_mib = 10240"),
                None => assert_eq!(cache_mib, "cache_mib = 0"),
            }
        }
        assert_eq!(archive.status().cache_bytes > 0, cache_mib != "cache_mib = 0");
        let kept = if cache_mib == "cache_mib = 0" { 0 } else { 4 };
        assert_eq!(fs::read_dir(rest.root().join("cache")).unwrap().count(), kept);
        drop(archive);
        drop(rest.open());
        assert_eq!(fs::read_dir(rest.root().join("cache")).unwrap().count(), 0, "decoded files are for one mount");
    }
}

#[test]
fn many_readers_at_once_get_the_same() {
    for cache_mib in ["cache_mib = 10240", "cache_mib = 0"] {
        let rest = settled(cache_mib);
        let archive = rest.open();
        let wholes: Vec<Vec<u8>> = (1..5).map(|at| rest.read(&step(at)).unwrap()).collect();
        std::thread::scope(|scope| {
            for thread in 0..8 {
                let (rest, archive, wholes) = (&rest, Arc::clone(&archive), &wholes);
                scope.spawn(move || {
                    for at in 1..5 {
                        let reader = archive.reader(&rest.stub(&step(at)).unwrap()).unwrap();
                        random_reads(&reader, &wholes[at - 1], thread, 30);
                    }
                });
            }
        });
    }
}

#[test]
fn a_full_cache_lets_go_of_what_was_read_longest_ago() {
    let rest = settled("cache_mib = 1");
    let archive = rest.open();
    for round in 0..3 {
        for at in 1..5 {
            let whole = rest.read(&step(at)).unwrap();
            let reader = archive.reader(&rest.stub(&step(at)).unwrap()).unwrap();
            random_reads(&reader, &whole, round, 20);
            assert!(archive.status().cache_bytes <= 1 << 20);
        }
    }
}

#[test]
fn an_open_reader_outlives_names_and_objects() {
    let rest = settled("cache_mib = 10240");
    let archive = rest.open();
    let whole = rest.read(&step(3)).unwrap();
    let reader = archive.reader(&rest.stub(&step(3)).unwrap()).unwrap();
    fs::remove_dir_all(rest.root().join("objects")).unwrap();
    random_reads(&reader, &whole, 1, 50);
}

#[test]
fn a_stub_that_lies_about_its_length_is_refused() {
    let rest = settled("cache_mib = 10240");
    let archive = rest.open();
    let mut stub = rest.stub(&step(3)).unwrap();
    stub.logical_len += 1;
    let error = archive.reader(&stub).unwrap_err();
    assert!(error.is_damage());
    assert_eq!(error.object, stub.object);
}

/// By a program, since the file became the one in the tree, or by programs that clean up.
#[test]
fn a_decoded_file_that_is_cut_short_says_nothing_about_its_object() {
    let rest = settled("cache_mib = 10240");
    let archive = rest.open();
    let whole = rest.read(&step(2)).unwrap();
    let cut = |reader: &Reader| {
        reader.read_at(0, &mut vec![0; whole.len()]).unwrap();
        reader.whole().unwrap().file().set_len(1000).unwrap();
        assert!(reader.whole().is_none() && reader.present(900, 200).is_none() && reader.present(900, 100).is_some());
    };
    let mut part = [0; 200];
    let reader = archive.reader(&rest.stub(&step(2)).unwrap()).unwrap();
    cut(&reader);
    assert_eq!(reader.read_at(900, &mut part).unwrap(), 200);
    assert_eq!(part, whole[900..1100]);
    drop(reader);
    let reader = archive.reader(&rest.stub(&step(2)).unwrap()).unwrap();
    cut(&reader);
    assert!(reader.give().is_some_and(|(_, is_whole)| !is_whole));
    assert_eq!(reader.read_at(900, &mut part).unwrap(), 200, "nobody knows what became of it");
    assert_eq!(part, whole[900..1100]);
    reader.is_in_place();
    assert_eq!(reader.read_at(900, &mut part).unwrap(), 100);
    assert!(archive.status().problems.is_empty());
}

#[test]
fn a_file_brought_back_has_its_bytes_and_attributes() {
    use std::os::unix::fs::MetadataExt;
    let rest = settled("cache_mib = 10240");
    let archive = rest.open();
    let path = rest.path(&step(2));
    let (back, _) = archive.recall(&rest.stub(&step(2)).unwrap(), &fs::File::open(&path).unwrap(), None).unwrap();
    assert_eq!(fs::read(&back).unwrap(), rest.read(&step(2)).unwrap());
    let (was, is) = (fs::metadata(&path).unwrap(), fs::metadata(&back).unwrap());
    assert_eq!((was.mode(), was.mtime(), was.mtime_nsec()), (is.mode(), is.mtime(), is.mtime_nsec()));
}

#[test]
fn a_read_does_not_wait_for_the_end_of_a_recall() {
    const ROWS: usize = 1 << 14;
    let mut rest = Rest::under("exact");
    let mut random = Random(5);
    let mut large = [Tensor::new("a.weight", Dtype::F32, &[ROWS, 1024], &mut random)];
    for at in 1..=2 {
        large[0].values[at] += 1.0;
        rest.write(&step(at), &safetensors(&large));
    }
    for (at, state) in states(2).into_iter().enumerate() {
        rest.write(&format!("small/{}", step(at + 1)), &state);
    }
    rest.settle();
    let (large, small) = (rest.id(&step(1)), rest.id(&format!("small/{}", step(1))));
    let place = tempfile::tempdir().unwrap();
    // Another program may hold this test up between the two, so once is enough.
    let is_soon = || {
        let cache = Cache::new(place.path(), 1 << 30).unwrap();
        let recall = Recall::new(Arc::new(rest.objects()), cache, 0, 2).unwrap();
        let (passed, at_read) = (AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let put = |bytes: &[u8], _| {
                    passed.fetch_add(bytes.len(), Ordering::Relaxed);
                    Ok(())
                };
                recall.copy(large, &put).unwrap();
            });
            while passed.load(Ordering::Relaxed) == 0 {
                std::thread::yield_now();
            }
            recall.reader(small).unwrap().read_at(0, &mut [0; 100_000]).unwrap();
            at_read.store(passed.load(Ordering::Relaxed), Ordering::Relaxed);
        });
        at_read.into_inner() < passed.into_inner() * 2 / 3
    };
    assert!((0..5).any(|_| is_soon()), "the read came after two thirds of the recall, five times");
}
