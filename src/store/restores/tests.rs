use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

fn some() -> Restores {
    let mut restores = Restores::default();
    restores.restored(7, 1000, 0, "run/step_2.pt");
    restores.restored(7, 2000, 1, "run/step_3.pt");
    // From an earlier state again.
    restores.restored(7, 3000, 0, "run/step_1.pt");
    restores.restored(8, 1500, 4, "é");
    restores
}

#[test]
fn a_state_descends_from_the_last_restore_before_it() {
    let restores = some();
    let of = |at| restores.generations(7, at);
    assert_eq!([of(0), of(999), of(1000), of(1999), of(2500), of(9999)], [0, 0, 1, 1, 2, 1]);
    assert_eq!((restores.seen(7), restores.seen(8), restores.seen(9)), (3, 1, 0));
    assert_eq!((restores.generations(8, 2000), restores.generations(9, 2000)), (5, 0));
    assert_eq!(restores.get(7).unwrap().origin, "run/step_1.pt");
}

#[test]
fn a_clock_that_was_set_back_puts_nothing_before_what_is_known() {
    let mut restores = some();
    restores.restored(7, 10, 1, "x");
    assert_eq!((restores.generations(7, 2999), restores.generations(7, 3000)), (2, 2));
    assert_eq!(Restores::decode(&restores.encode()), Ok(restores));
}

#[test]
fn it_is_bounded() {
    let mut restores = Restores::default();
    let long = "é".repeat(1000);
    for lineage in 0..MOST_LINEAGES as u64 + 10 {
        (0..20).for_each(|n| restores.restored(lineage, 20 * lineage as i64 + n, n as u32, &long));
    }
    assert_eq!(restores.all().count(), MOST_LINEAGES);
    // The dropped ones were restored first.
    assert!(restores.get(9).is_none() && restores.get(10).is_some());
    let known = restores.get(10).unwrap();
    assert_eq!((known.restores, known.events.len(), known.before, known.origin.len()), (20, MOST_EVENTS, 12, 254));
    let bytes = restores.encode();
    assert!(bytes.len() as u64 <= MOST_BYTES, "{}", bytes.len());
    assert_eq!(Restores::decode(&bytes), Ok(restores));
}

#[test]
fn it_lies_in_the_store_and_damage_is_noticed() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(&dir.path().join("store")).unwrap();
    assert_eq!(Restores::load(&store).unwrap(), Restores::default());
    Restores::default().save(&store).unwrap();
    assert!(!path(store.root()).exists(), "nothing to remember, no file");
    let mut restores = some();
    restores.save(&store).unwrap();
    assert_eq!(Restores::load(&store).unwrap(), restores);
    assert!(restores.retain(|lineage| lineage == 8) && !restores.retain(|_| true));
    restores.save(&store).unwrap();
    assert_eq!(Restores::load(&store).unwrap().all().count(), 1);
    fs::write(path(store.root()), b"stepfsRS").unwrap();
    assert_eq!(Restores::load(&store).unwrap_err().kind(), io::ErrorKind::InvalidData);
}

proptest! {
    #[test]
    fn what_is_written_is_read(calls in vec((0u64..4, 0i64..100, 0u32..9, "\\PC{0,20}"), 0..40)) {
        let mut restores = Restores::default();
        calls
            .iter()
            .for_each(|(lineage, at, generations, origin)| restores.restored(*lineage, *at, *generations, origin));
        prop_assert_eq!(Restores::decode(&restores.encode()), Ok(restores.clone()));
        for lineage in 0..4 {
            let mut of = calls.iter().filter(|call| call.0 == lineage);
            prop_assert_eq!(restores.seen(lineage) as usize, of.clone().count());
            // New states descend from the last restored one.
            let last = of.next_back().map_or(0, |call| call.2 + 1);
            prop_assert_eq!(restores.generations(lineage, i64::MAX), last);
        }
    }

    #[test]
    fn no_changed_byte_is_believed(at in 0usize..200, bit in 0u8..8, cut in 0usize..200) {
        let bytes = some().encode();
        let mut changed = bytes.clone();
        let at = at % bytes.len();
        changed[at] ^= 1 << bit;
        prop_assert!(Restores::decode(&changed).is_err());
        prop_assert!(Restores::decode(&bytes[..cut % bytes.len()]).is_err());
    }

    #[test]
    fn rubbish_with_a_good_checksum_does_not_panic(mut body in vec(any::<u8>(), 0..300)) {
        let mut head = record::encode(MAGIC, &());
        head.truncate(record::FIELDS);
        head.append(&mut body);
        head.extend_from_slice(&codec::hash::xxh3_64(&head).to_le_bytes());
        let _ = Restores::decode(&head);
    }
}
