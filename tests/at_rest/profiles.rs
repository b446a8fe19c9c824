//! The sources of a file's profile: rules by path and role, attributes, restores.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use stepfs::archive::Archive;
use stepfs::container::Role;
use stepfs::store::{Lineage, PROFILE, Restores, Store};
use stepfs::tile::Coding;

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
        let lossless = matches!(tensor.coding, Coding::Lossless | Coding::LosslessDelta { .. });
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

    /// Saves a state with the present time: restores and states are ordered by time.
    fn save(&mut self, at: usize) {
        self.archive.opened_for_writing(Path::new(&step(at)));
        let path = self.rest.path(&step(at));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, &self.states[at]).unwrap();
        self.rest.written.insert(step(at), self.states[at].clone());
        self.archive.sealed(Path::new(&step(at)));
        until(|| self.archive.queue().queued == 0);
    }

    /// Training resumes from a state; returns when that is recorded.
    fn restore(&self, at: usize) {
        let before = self.restores();
        // The kernel stamps files by ticks: a file written in the same tick as a restore would count as written after
        // it.
        std::thread::sleep(std::time::Duration::from_millis(20));
        self.archive.restored(self.rest.id(&step(at)));
        until(|| self.remembered().iter().map(|lineage| lineage.restores).sum::<u32>() > before);
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
fn a_lineage_that_was_restored_more_often_than_expected_goes_on_finer() {
    let exact = "[[profile]]\nglob = \"**/step_00001.*\"\nprofile = \"exact\"\n";
    let mut run = Run::new(&format!("expected_restores = 1\n{exact}"));
    (1..=5).for_each(|at| run.save(at));
    assert!(is_lossy(&run.rest, &step(4)));
    run.restore(3);
    // The newest file at the time of a restore from an older one does not descend from that restore.
    (6..=7).for_each(|at| run.save(at));
    assert_eq!(
        (made_as(&run.rest, 6).as_str(), run.generations(5).as_str(), run.generations(6).as_str()),
        ("balanced", "0", "1")
    );
    // Again within the minute: the same restore, read by another rank.
    run.archive.restored(run.rest.id(&step(3)));
    // Reading a lossless state is no restore.
    run.archive.restored(run.rest.id(&step(1)));
    run.restore(6);
    assert_eq!(run.restores(), 2);
    (8..=10).for_each(|at| run.save(at));
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
    (2..=11).for_each(|at| run.restore(at));
    (13..=14).for_each(|at| run.save(at));
    assert_eq!((made_as(&run.rest, 13).as_str(), run.restores(), run.generations(14).as_str()), ("balanced", 10, "1"));
    run.archive.stop();
}

#[test]
fn a_damaged_record_is_begun_anew_and_one_of_what_is_gone_forgotten() {
    let mut run = Run::new("");
    (1..=4).for_each(|at| run.save(at));
    run.restore(2);
    let path = run.rest.root().join("restores");
    fs::write(&path, b"stepfsRS and then something else").unwrap();
    run.reopen();
    assert_eq!(run.restores(), 0);
    run.restore(3);
    assert_eq!(run.remembered().len(), 1);
    // Another lineage comes, and the first one goes with all of its states.
    for at in 1..=4 {
        let name = format!("other/step_{at}.safetensors");
        run.archive.opened_for_writing(Path::new(&name));
        fs::create_dir_all(run.rest.path("other")).unwrap();
        fs::write(run.rest.path(&name), &run.states[at + 5]).unwrap();
        run.archive.sealed(Path::new(&name));
        until(|| run.archive.queue().queued == 0);
        fs::remove_file(run.rest.path(&step(at))).unwrap();
        run.archive.removed(Path::new(&step(at)));
    }
    until(|| run.archive.queue().queued == 0);
    run.archive.restored(run.rest.id("other/step_3.safetensors"));
    until(|| run.archive.status().restored.iter().any(|lineage| lineage.path.starts_with("other")));
    run.archive.stop();
    let origins: Vec<String> = run.remembered().into_iter().map(|lineage| lineage.origin).collect();
    assert_eq!(origins, ["other/step_3.safetensors"]);
}
