//! The sources of a file's profile: rules by path and role, attributes, restores.

use std::fs;
use std::path::Path;
use std::process;
use std::sync::Arc;

use formats::Role;
use stepfs::archive::{Archive, FileId};
use stepfs::store::{Lineage, PROFILE, Restores, Store};

use super::series::{Dtype, Random, Rest, Tensor, safetensors, states, step, train, until, work};

/// A settled series under these settings, put before the first rule.
fn series(count: usize, settings: &str) -> Rest {
    let mut rest = Rest::with(|text| text.replacen("[[profile]]", &format!("{settings}\n[[profile]]"), 1));
    for (at, state) in states(count).iter().enumerate() {
        rest.write(&step(at + 1), state);
    }
    rest.settle();
    rest
}

fn is_lossy(rest: &Rest, name: &str) -> bool {
    let object = rest.object(name);
    let lossy = object.header().lossy;
    assert_eq!(lossy, rest.read(name).unwrap() != rest.written[name], "{name}");
    lossy
}

fn mark(rest: &Rest, path: &str, profile: &str) {
    xattr::set(rest.path(path), PROFILE, profile.as_bytes()).unwrap();
}

fn made_as(rest: &Rest, at: usize) -> String {
    rest.object(&step(at)).index().profile.clone()
}

#[test]
fn a_rule_for_a_role_is_for_that_role_only() {
    let rest = series(4, "[[profile]]\nrole = [\"weight\", \"ema\"]\nprofile = \"exact\"\n");
    assert!(made_as(&rest, 3).starts_with("exact; balanced: optimizer, other"), "{}", made_as(&rest, 3));
    assert!(!is_lossy(&rest, &step(3)), "everything in it is a weight");
    let rest = series(4, "[[profile]]\nrole = \"second_moment\"\nprofile = \"exact\"\n");
    assert_eq!(made_as(&rest, 3), "balanced; exact: second_moment");
    assert!(is_lossy(&rest, &step(3)));
}

#[test]
fn averages_can_be_exact_where_weights_are_not() {
    let mut random = Random(5);
    let mut model = vec![
        Tensor::new("ema_model.w.weight", Dtype::F32, &[128, 128], &mut random),
        Tensor::new("w.weight", Dtype::F32, &[128, 128], &mut random),
    ];
    let rule = "[[profile]]\nrole = \"ema\"\nprofile = \"exact\"\n\n[[profile]]";
    let mut rest = Rest::with(|text| text.replacen("[[profile]]", rule, 1));
    for at in 1..=4 {
        train(&mut model, 1e-3, &mut random);
        rest.write(&step(at), &safetensors(&model));
    }
    rest.settle();
    let object = rest.object(&step(3));
    for tensor in &object.index().tensors {
        let lossless = !tensor.coding.is_lossy();
        assert_eq!(lossless, tensor.role == Role::Ema, "{}: {:?}", tensor.path, tensor.role);
    }
}

#[test]
fn what_is_set_on_a_file_or_above_it_goes_before_the_rules() {
    let states = states(18);
    let mut rest = Rest::new();
    for (kind, states) in ["run", "best", "run/deep"].iter().zip(states.chunks(6)) {
        for (at, state) in states.iter().enumerate() {
            rest.write(&format!("{kind}/step_{at}.safetensors"), state);
        }
    }
    mark(&rest, "run", "exact");
    mark(&rest, "run/deep", "balanced");
    mark(&rest, "run/deep/step_3.safetensors", "exact");
    mark(&rest, "best", "compact");
    // Attributes that nobody can set in a mount are ignored.
    mark(&rest, "best/step_3.safetensors", "finest");
    rest.settle();
    let lossy = |kind: &str, at: usize| is_lossy(&rest, &format!("{kind}/step_{at}.safetensors"));
    assert_eq!([lossy("run", 2), lossy("run", 3)], [false, false]);
    assert_eq!([lossy("best", 2), lossy("best", 3)], [true, true]);
    assert_eq!([lossy("run/deep", 2), lossy("run/deep", 3), lossy("run/deep", 4)], [true, false, true]);
    assert_eq!(rest.object("best/step_2.safetensors").index().profile, "compact");
    // The stub has it, as the file had.
    let kept = xattr::get(rest.path("run/deep/step_3.safetensors"), PROFILE).unwrap();
    assert_eq!(kept.as_deref(), Some(&b"exact"[..]));
}

#[test]
fn what_was_made_coarser_does_not_stand_for_a_finer_copy() {
    let states = states(4);
    let mut rest = Rest::new();
    for (at, state) in [(1, 0), (2, 1), (3, 1), (4, 2)] {
        rest.write(&step(at), &states[state]);
    }
    mark(&rest, &step(2), "compact");
    rest.settle();
    assert_ne!(rest.id(&step(2)), rest.id(&step(3)), "balanced is asked for, and that one is compact");
    assert_eq!((made_as(&rest, 2).as_str(), made_as(&rest, 3).as_str()), ("compact", "balanced"));
}

/// A process that runs and does not train.
const OTHER: u32 = 1;

/// Training that saves into a store that works meanwhile.
struct Run {
    rest: Rest,
    archive: Arc<Archive>,
    states: Vec<Vec<u8>>,
}

impl Run {
    fn new(settings: &str) -> Run {
        let rest = series(0, settings);
        let archive = rest.open();
        work(&archive);
        Run { rest, archive, states: states(24) }
    }

    fn write(&mut self, name: &str, bytes: Vec<u8>, by: u32) {
        let path = self.rest.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        self.archive.opened_for_writing(Path::new(name));
        fs::write(&path, &bytes).unwrap();
        self.archive.restores().written_by(FileId::of(&path.metadata().unwrap()), Some(by));
        self.rest.written.insert(name.into(), bytes);
        self.archive.sealed(Path::new(name));
        until(|| self.archive.queue().queued == 0);
    }

    /// Saves a state with the present time: restores and states are ordered by time.
    fn save(&mut self, at: usize) {
        self.write(&step(at), self.states[at].clone(), process::id());
    }

    /// A process loads a state.
    fn read(&self, at: usize, by: u32) {
        // The kernel stamps files by ticks: a file written in the same tick as a read would count as written after it.
        std::thread::sleep(std::time::Duration::from_millis(20));
        self.archive.restores().read_by(self.rest.id(&step(at)), by);
    }

    /// Training goes on from a state, and saves another.
    fn resume(&mut self, from: usize, next: usize) {
        self.read(from, process::id());
        self.save(next);
    }

    fn remembered(&self) -> Vec<Lineage> {
        let restores = Restores::load(&Store::look(&self.rest.root()).unwrap()).unwrap_or_default();
        restores.all().map(|(_, lineage)| lineage.clone()).collect()
    }

    fn restores(&self) -> u32 {
        self.archive.status().restored.iter().map(|lineage| lineage.restores).sum()
    }

    fn generations(&self, at: usize) -> String {
        String::from_utf8(self.archive.attribute(Path::new(&step(at)), "generations").unwrap()).unwrap()
    }

    fn reopen(&mut self) {
        self.archive.stop();
        // The id of the open store, so that its lock goes.
        let closed = std::mem::replace(&mut self.archive, Rest::new().open());
        drop(closed);
        self.archive = self.rest.open();
        work(&self.archive);
    }
}

#[test]
fn only_a_process_that_read_and_then_saves_a_newer_state_was_restored() {
    let mut run = Run::new("[[profile]]\nglob = \"**/step_00020.*\"\nprofile = \"exact\"\n");
    (1..=5).for_each(|at| run.save(at));
    // Another process reads; a lossless state is read; a copy is made; nothing of the lineage is written.
    (2..=4).for_each(|at| run.read(at, OTHER));
    run.resume(1, 6);
    run.read(2, process::id());
    let copy = run.rest.read(&step(2)).unwrap();
    run.write(&step(20), copy, process::id());
    run.write("other/step_00020.safetensors", run.states[20].clone(), process::id());
    assert_eq!(run.restores(), 0);
    // Another process saves, and a file that the run opened is written by another process.
    run.write(&step(7), run.states[7].clone(), 9);
    run.archive.restores().written_by(FileId::of(&run.rest.path(&step(7)).metadata().unwrap()), Some(process::id()));
    run.write(&step(7), run.states[8].clone(), 9);
    assert_eq!(run.restores(), 0);
    // Once for each read, whatever is read of the lineage before the next save.
    run.read(3, process::id());
    run.save(8);
    run.save(9);
    assert_eq!((run.restores(), run.archive.status().restored[0].path.clone()), (1, step(3)));
    // Under another name first, as most programs save.
    run.read(4, process::id());
    run.write("part", run.states[10].clone(), process::id());
    assert_eq!(run.restores(), 1);
    fs::rename(run.rest.path("part"), run.rest.path(&step(10))).unwrap();
    run.archive.renamed(Path::new("part"), Path::new(&step(10)));
    until(|| run.archive.queue().queued == 0);
    assert_eq!(run.restores(), 2);
    // The other process is a run as well, if it saves.
    run.write(&step(11), run.states[11].clone(), OTHER);
    assert_eq!(run.restores(), 3);
    run.archive.stop();
}

#[test]
fn a_lineage_that_was_restored_more_often_than_expected_goes_on_finer() {
    let mut run = Run::new("expected_restores = 1");
    (1..=5).for_each(|at| run.save(at));
    assert!(is_lossy(&run.rest, &step(4)));
    // The newest file at the time of a restore from an older one does not descend from that restore.
    run.resume(3, 6);
    run.save(7);
    assert_eq!(
        (made_as(&run.rest, 6).as_str(), run.generations(5).as_str(), run.generations(6).as_str()),
        ("balanced", "0", "1")
    );
    // From a state that descends from a restore itself. The file before the new one is made finer already.
    run.resume(6, 8);
    assert_eq!((run.restores(), made_as(&run.rest, 7).as_str()), (2, "exact"));
    (9..=10).for_each(|at| run.save(at));
    assert_eq!((made_as(&run.rest, 6).as_str(), made_as(&run.rest, 8).as_str()), ("balanced", "exact"));
    assert!(is_lossy(&run.rest, &step(6)) && !is_lossy(&run.rest, &step(9)));
    assert_eq!(
        (run.generations(7).as_str(), run.generations(9).as_str(), run.generations(10).as_str()),
        ("1", "2", "2")
    );
    let status = run.archive.status().restored;
    assert_eq!((status[0].path.as_str(), status[0].expected_restores), (step(6).as_str(), Some(1)));
    assert_eq!((status[0].asked.as_str(), status[0].profile.as_str(), status[0].generations), ("balanced", "exact", 2));
    // It is remembered.
    run.reopen();
    assert_eq!((run.archive.status().restored, run.generations(10).as_str()), (status, "2"));
    run.save(11);
    assert_eq!(made_as(&run.rest, 10), "exact");
    run.archive.stop();
}

#[test]
fn without_expectations_restores_are_counted_and_change_nothing() {
    let mut run = Run::new("");
    (1..=12).for_each(|at| run.save(at));
    (2..=11).for_each(|at| run.resume(at, at + 11));
    run.save(23);
    assert_eq!((made_as(&run.rest, 22).as_str(), run.restores(), run.generations(23).as_str()), ("balanced", 10, "1"));
    run.archive.stop();
}

#[test]
fn a_damaged_record_is_begun_anew_and_one_of_what_is_gone_forgotten() {
    let mut run = Run::new("");
    (1..=4).for_each(|at| run.save(at));
    run.resume(2, 5);
    until(|| run.remembered().len() == 1);
    let path = run.rest.root().join("restores");
    fs::write(&path, b"stepfsRS and then something else").unwrap();
    run.reopen();
    assert_eq!(run.restores(), 0);
    run.resume(3, 6);
    until(|| run.remembered().len() == 1);
    // Another lineage comes, and the first one goes with all of its states.
    let other = |at: usize| format!("other/step_{at}.safetensors");
    for at in 1..=6 {
        run.write(&other(at), run.states[at + 6].clone(), process::id());
        fs::remove_file(run.rest.path(&step(at))).unwrap();
        run.archive.removed(Path::new(&step(at)));
    }
    until(|| run.archive.queue().queued == 0);
    run.archive.restores().read_by(run.rest.id(&other(3)), process::id());
    run.write(&other(7), run.states[13].clone(), process::id());
    until(|| run.archive.status().restored.iter().any(|lineage| lineage.path == other(3)));
    run.archive.stop();
    let origins: Vec<String> = run.remembered().into_iter().map(|lineage| lineage.origin).collect();
    assert_eq!(origins, [other(3)]);
}
