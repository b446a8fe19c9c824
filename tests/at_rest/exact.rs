//! Files that stay exact: the best of a run by its own files, links, the highest step. And the status of other files.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use sha2::Digest as _;
use stepfs::archive::Archive;
use stepfs::store::{PIN, RECALLED};

use super::elasticdl;
use super::series::{Dtype, Random, Rest, Tensor, entry, safetensors, states, step, train, until, work};
use super::torch::{Value, optimizer, save};

fn model(at: u64) -> String {
    format!("run/checkpoint-{at}/model.safetensors")
}

/// Trainer's state of a checkpoint, as it names the best one.
fn trainer_state(rest: &mut Rest, at: u64, best: u64) {
    let text = format!(
        "{{\n  \"best_global_step\": {best},\n  \"best_metric\": 0.5,\n  \"best_model_checkpoint\": \
         \"/mnt/elsewhere/run/checkpoint-{best}\",\n  \"log_history\": [{{\"loss\": 3.5, \"step\": {at}}}]\n}}"
    );
    rest.write(&format!("run/checkpoint-{at}/trainer_state.json"), text.as_bytes());
}

fn attribute(archive: &Archive, path: &str, name: &str) -> Option<String> {
    archive.attribute(Path::new(path), name).map(|value| String::from_utf8(value).unwrap())
}

fn sha256(bytes: &[u8]) -> String {
    sha2::Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn is_exact(rest: &Rest, name: &str) -> bool {
    rest.stub(name).is_none() && fs::read(rest.path(name)).unwrap() == rest.written[name]
}

/// Writes while the archive works, as a program does.
fn save_now(archive: &Archive, rest: &mut Rest, name: &str, write: impl FnOnce(&mut Rest)) {
    archive.opened_for_writing(Path::new(name));
    write(rest);
    archive.sealed(Path::new(name));
}

#[test]
fn what_trainer_names_as_the_best_stays_exact() {
    let states = states(5);
    let mut rest = Rest::new();
    for at in 1..=3 {
        rest.write(&model(10 * at), &states[at as usize]);
        trainer_state(&mut rest, 10 * at, 10);
    }
    rest.settle();
    assert!(is_exact(&rest, &model(10)));
    assert!(rest.stub(&model(20)).is_some());
    // The run's directory gets another name, and the store is opened again.
    fs::rename(rest.path("run"), rest.path("moved")).unwrap();
    let archive = rest.open();
    work(&archive);
    let moved = model(10).replacen("run", "moved", 1);
    assert!(rest.stub(&moved).is_none());
    let why = attribute(&archive, &moved, "why").unwrap();
    assert_eq!(why, "moved/checkpoint-30/trainer_state.json names it as the best, so it stays exact");
    assert_eq!(attribute(&archive, &moved, "release").unwrap(), why);
    assert_eq!(attribute(&archive, &moved, "best").unwrap(), "moved/checkpoint-30/trainer_state.json");
    archive.stop();
    drop(archive);
    // Another one becomes the best.
    fs::rename(rest.path("moved"), rest.path("run")).unwrap();
    rest.write(&model(40), &states[4]);
    trainer_state(&mut rest, 40, 40);
    rest.settle();
    assert!(rest.stub(&model(10)).is_some() && rest.stub(&model(30)).is_some());
    assert!(is_exact(&rest, &model(40)));
}

#[test]
fn a_run_whose_every_checkpoint_is_the_best_so_far_gets_its_older_ones_archived() {
    let states = states(3);
    let mut rest = Rest::with(|text| text.replace("settle_seconds = 600", "settle_seconds = 0"));
    rest.write(&model(10), &states[0]);
    trainer_state(&mut rest, 10, 10);
    let archive = rest.open();
    work(&archive);
    for at in [20, 30] {
        let before = model(at - 10);
        save_now(&archive, &mut rest, &model(at), |rest| rest.write(&model(at), &states[at as usize / 10 - 1]));
        // Its own statement is the newest so far.
        until(|| attribute(&archive, &before, "why").is_some_and(|why| why.contains("names it as the best")));
        until(|| archive.queue().queued == 0);
        assert!(is_exact(&rest, &before));
        let name = format!("run/checkpoint-{at}/trainer_state.json");
        save_now(&archive, &mut rest, &name, |rest| trainer_state(rest, at, at));
        until(|| rest.stub(&before).is_some());
    }
    until(|| archive.queue().queued == 0);
    archive.stop();
    rest.faithful(&model(10));
    rest.faithful(&model(20));
    assert!(is_exact(&rest, &model(30)));
}

#[test]
fn what_is_named_late_is_said_to_be_gone_and_nothing_else_happens() {
    let states = states(4);
    let mut rest = Rest::new();
    for at in 1..=3 {
        rest.write(&model(10 * at), &states[at as usize]);
        trainer_state(&mut rest, 10 * at, 10 * at);
    }
    rest.settle();
    let read = rest.read(&model(10)).unwrap();
    let archive = rest.open();
    work(&archive);
    let name = "run/trainer_state.json";
    save_now(&archive, &mut rest, name, |rest| {
        rest.write(name, b"{\"best_model_checkpoint\": \"/mnt/run/checkpoint-10\"}");
    });
    until(|| attribute(&archive, &model(10), "best").as_deref() == Some(name));
    assert!(attribute(&archive, &model(10), "lossy").unwrap().starts_with("1 weight "));
    // A state that names nothing, or is cut short, ends it.
    save_now(&archive, &mut rest, name, |rest| rest.write(name, b"{\"best_model_check"));
    until(|| attribute(&archive, &model(10), "best").is_none());
    archive.stop();
    assert_eq!(rest.read(&model(10)).unwrap(), read);
}

/// A checkpoint as Lightning writes it.
fn lightning(model: &[Tensor], best: &str) -> Vec<u8> {
    let tensors = model.iter().map(|tensor| (tensor.name.clone(), Value::Tensor(tensor.clone())));
    let moments = |tensor: &Tensor| {
        let copy = |name: &str| Tensor { name: name.into(), ..tensor.clone() };
        let square = Tensor { values: tensor.values.iter().map(|value| value * value).collect(), ..copy("exp_avg_sq") };
        Value::named([("exp_avg", Value::Tensor(copy("exp_avg"))), ("exp_avg_sq", Value::Tensor(square))])
    };
    let callback = Value::named([
        ("monitor", Value::Text("val_loss".into())),
        ("best_model_score", Value::Float(0.5)),
        ("best_model_path", Value::Text(best.into())),
        ("dirpath", Value::Text("/elsewhere/run".into())),
        ("best_k_models", Value::named([(best, Value::Float(0.5))])),
    ]);
    let stopping = Value::named([("wait_count", Value::Int(1)), ("stopped_epoch", Value::Int(0))]);
    save(&Value::named([
        ("epoch", Value::Int(1)),
        ("state_dict", Value::named(tensors)),
        ("optimizer_states", Value::List(vec![optimizer(model.iter().map(moments).collect())])),
        (
            "callbacks",
            Value::named([
                ("EarlyStopping{'monitor': 'val_loss'}", stopping),
                ("ModelCheckpoint{'monitor': 'val_loss'}", callback),
            ]),
        ),
    ]))
    .0
}

#[test]
fn what_lightning_names_as_the_best_stays_exact() {
    let mut random = Random(7);
    let mut weights = vec![Tensor::new("layer.weight", Dtype::F32, &[128, 130], &mut random)];
    let mut rest = Rest::new();
    let name = |at: usize| format!("run/epoch={at}-step={}.ckpt", 20 * at);
    for (at, best) in [(0, 0), (1, 1), (2, 1), (3, 1)] {
        train(&mut weights, 1e-3, &mut random);
        rest.write(
            &name(at),
            &lightning(&weights, &format!("/elsewhere/run/{}", name(best).trim_start_matches("run/"))),
        );
    }
    rest.settle();
    assert!(rest.stub(&name(0)).is_some() && rest.stub(&name(2)).is_some());
    assert!(is_exact(&rest, &name(1)) && is_exact(&rest, &name(3)));
    train(&mut weights, 1e-3, &mut random);
    rest.write(&name(4), &lightning(&weights, &format!("/elsewhere/{}", name(4))));
    rest.settle();
    assert!(rest.stub(&name(1)).is_some() && rest.stub(&name(3)).is_some());
    assert!(is_exact(&rest, &name(4)));
}

#[test]
fn what_a_link_named_best_leads_to_stays_exact() {
    let states = states(6);
    let mut rest = Rest::new();
    (1..=5).for_each(|at| rest.write(&step(at), &states[at - 1]));
    symlink("step_00020.safetensors", rest.path("run/best.safetensors")).unwrap();
    symlink("/mnt/anywhere/run/step_00040.safetensors", rest.path("final_model")).unwrap();
    // By a link to a directory, and by another link.
    symlink("run", rest.path("latest")).unwrap();
    symlink("../latest/step_00060.safetensors", rest.path("run/chosen")).unwrap();
    symlink("run/chosen", rest.path("my_best")).unwrap();
    // Three useless links: to a file that nobody asked for, out of the tree, in a circle.
    symlink("step_00080.safetensors", rest.path("run/newest")).unwrap();
    symlink("../../step_00080.safetensors", rest.path("run/best_out")).unwrap();
    symlink("best_circle", rest.path("run/best_circle")).unwrap();
    let archive = rest.open();
    work(&archive);
    assert_eq!([1, 2, 3, 4, 5].map(|at| rest.stub(&step(at)).is_none()), [true, true, true, false, true]);
    // It leads elsewhere, another goes, a third one comes.
    fs::remove_file(rest.path("run/best.safetensors")).unwrap();
    archive.link_changed(Path::new("run/best.safetensors"));
    until(|| rest.stub(&step(1)).is_some());
    symlink("run/step_00100.safetensors", rest.path("best_now")).unwrap();
    archive.link_changed(Path::new("best_now"));
    save_now(&archive, &mut rest, &step(6), |rest| rest.write(&step(6), &states[5]));
    until(|| attribute(&archive, &step(5), "why").is_some_and(|why| why.starts_with("best_now names it")));
    fs::rename(rest.path("best_now"), rest.path("other_name")).unwrap();
    archive.renamed(Path::new("best_now"), Path::new("other_name"));
    until(|| rest.stub(&step(5)).is_some());
    until(|| archive.queue().queued == 0);
    assert!(is_exact(&rest, &step(2)) && is_exact(&rest, &step(3)));
    archive.stop();
}

#[test]
fn the_highest_step_stays_beside_the_newest() {
    let states = states(7);
    let mut rest = Rest::new();
    // Resumed from step 2.
    [1, 2, 3, 5, 4].iter().enumerate().for_each(|(at, number)| rest.write(&step(*number), &states[at]));
    let archive = rest.open();
    work(&archive);
    assert_eq!([1, 2, 3, 4, 5].map(|at| rest.stub(&step(at)).is_none()), [false, false, false, true, true]);
    assert_eq!(
        attribute(&archive, &step(5), "release").unwrap(),
        "it has the highest step of its lineage, and stays exact"
    );
    assert_eq!(attribute(&archive, &step(4), "release").unwrap(), "it is the newest of its lineage, and stays exact");
    archive.stop();
    drop(archive);
    rest.write(&step(6), &states[5]);
    rest.settle();
    assert!(rest.stub(&step(4)).is_some() && rest.stub(&step(5)).is_some());
    assert!(is_exact(&rest, &step(6)));
}

/// A state as `torch.save` writes it, with its weights, Adam's moments of them, or both.
fn state(weights: &[Tensor], [with_weights, with_optimizer]: [bool; 2], random: &mut Random) -> Vec<u8> {
    /// Each save is later in training than all before.
    static STEPS: AtomicI32 = AtomicI32::new(1);
    let steps = STEPS.fetch_add(1, Ordering::Relaxed);
    let mut file = Vec::new();
    if with_weights {
        file.push(("model", Value::named(weights.iter().map(|of| (&*of.name, Value::Tensor(of.clone()))))));
    }
    if with_optimizer {
        let mut moments = |of: &Tensor| {
            let mut square = Tensor::new("exp_avg_sq", Dtype::F32, &of.shape, random);
            square.values.iter_mut().for_each(|value| *value *= *value);
            let first = Tensor::new("exp_avg", Dtype::F32, &of.shape, random);
            Value::named([
                ("step", Value::Int(steps)),
                ("exp_avg", Value::Tensor(first)),
                ("exp_avg_sq", Value::Tensor(square)),
            ])
        };
        file.push(("optimizer", optimizer(weights.iter().map(&mut moments).collect())));
    }
    save(&Value::named(file)).0
}

#[test]
fn a_save_of_weights_alone_is_no_newer_state_of_a_whole_one() {
    let (mut random, mut rest) = (Random(9), Rest::new());
    let mut weights = vec![Tensor::new("layer.weight", Dtype::F32, &[128, 130], &mut random)];
    for (at, is_whole) in [true, true, false, false].into_iter().enumerate() {
        train(&mut weights, 1e-3, &mut random);
        rest.write(&format!("run/step_{at}.pt"), &state(&weights, [true, is_whole], &mut random));
    }
    rest.settle();
    let stubs = [0, 1, 2, 3].map(|at| rest.stub(&format!("run/step_{at}.pt")).is_some());
    assert_eq!(stubs, [true, false, true, false], "the last with an optimizer stays, and the last of the others");
}

/// Trainer dies while it saves checkpoint-30. The run goes on from checkpoint-20, maybe days later.
#[test]
fn a_whole_checkpoint_stays_exact_until_another_is_whole() {
    let (mut random, mut rest) = (Random(10), Rest::new());
    let mut weights = vec![Tensor::new("layer.weight", Dtype::F32, &[128, 130], &mut random)];
    let optimizer = |at: usize| format!("run/checkpoint-{at}/optimizer.pt");
    for at in [10, 20, 30] {
        train(&mut weights, 1e-3, &mut random);
        rest.write(&model(at), &safetensors(&weights));
        let state = state(&weights, [false, true], &mut random);
        if at < 30 {
            rest.write(&optimizer(at as usize), &state);
        }
    }
    let archive = rest.open();
    work(&archive);
    assert!(rest.stub(&model(10)).is_some() && rest.stub(&optimizer(10)).is_some());
    assert!(is_exact(&rest, &model(20)) && is_exact(&rest, &optimizer(20)), "no time limit");
    assert_eq!(
        attribute(&archive, &model(20), "release").unwrap(),
        "it waits until run/checkpoint-20/optimizer.pt of its checkpoint has a newer state"
    );
    archive.stop();
    drop(archive);
    let state = state(&weights, [false, true], &mut random);
    rest.write(&optimizer(30), &state);
    rest.settle();
    assert!(rest.stub(&model(20)).is_some() && rest.stub(&optimizer(20)).is_some());
}

/// The same with all files in one directory: a model and its optimizer in either order, and a file of each rank.
#[test]
fn files_of_one_step_beside_each_other_stay_exact_until_the_next_step_is_whole() {
    let (mut random, mut rest) = (Random(11), Rest::new());
    let mut weights = vec![Tensor::new("layer.weight", Dtype::F32, &[128, 130], &mut random)];
    let names = |at: usize| {
        [
            format!("run/resnet18_step{at}.safetensors"),
            format!("run/optim_step{at}.pt"),
            format!("other/optim_step{at}.pt"),
            format!("other/resnet18_step{at}.safetensors"),
            format!("ranks/ckpt_step{at}_rank0.pt"),
            format!("ranks/ckpt_step{at}_rank1.pt"),
        ]
    };
    let bytes = |name: &str, weights: &[Tensor], random: &mut Random| match name {
        name if name.ends_with("safetensors") => safetensors(weights),
        name => state(weights, [!name.contains("optim"), true], random),
    };
    // The run dies twice, at different steps. A log has a higher number, and a run that is ahead has, too.
    for at in [10, 20, 30, 24] {
        train(&mut weights, 1e-3, &mut random);
        for name in names(at).iter().step_by(if at > 20 { 2 } else { 1 }) {
            let bytes = bytes(name, &weights, &mut random);
            rest.write(name, &bytes);
        }
    }
    for log in ["run/slurm-123456.out", "run/events.out.tfevents.1732521600.host.42.0"] {
        rest.write(log, b"a log");
    }
    rest.settle();
    assert!(names(10).iter().all(|name| rest.stub(name).is_some()));
    assert!(names(20).iter().all(|name| is_exact(&rest, name)), "no later step is whole");
    for name in names(40) {
        let bytes = bytes(&name, &weights, &mut random);
        rest.write(&name, &bytes);
    }
    rest.settle();
    assert!(names(20).iter().all(|name| rest.stub(name).is_some()));
}

#[test]
fn a_run_that_ended_holds_nothing_of_another_up() {
    let (mut random, mut rest) = (Random(12), Rest::new());
    let mut weights = vec![Tensor::new("layer.weight", Dtype::F32, &[128, 130], &mut random)];
    let name = |rate: &str, at: usize| format!("sweep/model_lr{rate}_step{at}.pt");
    for at in 1..=4 {
        train(&mut weights, 1e-3, &mut random);
        for rate in ["0.1", "0.01"].into_iter().take(if at <= 2 { 2 } else { 1 }) {
            let state = state(&weights, [true, true], &mut random);
            rest.write(&name(rate, at), &state);
        }
    }
    rest.settle();
    let released = |rate: &'static str, steps: &[usize]| -> Vec<bool> {
        steps.iter().map(|at| rest.stub(&name(rate, *at)).is_some()).collect()
    };
    assert_eq!(released("0.1", &[1, 2, 3, 4]), [true, true, true, false]);
    assert_eq!(released("0.01", &[1, 2]), [true, false], "the last of its run");
}

#[test]
fn a_copy_of_a_lossy_file_under_an_exact_name_says_what_it_is() {
    let mut rest = Rest::of(4);
    let lossy = rest.read(&step(2)).unwrap();
    assert_ne!(lossy, rest.written[&step(2)]);
    let name = "run/best_model.safetensors";
    let archive = rest.open();
    work(&archive);
    assert_eq!(attribute(&archive, &step(2), "profile").unwrap(), "balanced");
    assert_eq!(attribute(&archive, &step(4), "lossy").unwrap(), "0");
    let of_original = attribute(&archive, &step(2), "lossy").unwrap();
    assert!(of_original.starts_with("1 weight "), "{of_original}");
    save_now(&archive, &mut rest, name, |rest| rest.write(name, &lossy));
    until(|| archive.queue().queued == 0);
    let says =
        |archive: &Archive| [attribute(archive, name, "lossy").unwrap(), attribute(archive, name, "profile").unwrap()];
    let less = [of_original.clone(), "exact; its bytes are balanced".into()];
    assert_eq!(says(&archive), less);
    archive.stop();
    drop(archive);
    let archive = rest.open();
    work(&archive);
    assert_eq!(says(&archive), less, "after the next mount");
    // Until it has other content.
    let state = states(1).remove(0);
    save_now(&archive, &mut rest, name, |rest| rest.write(name, &state));
    until(|| archive.queue().queued == 0);
    assert_eq!(says(&archive), ["0", "exact"]);
    // A pinned file is no stub, and says so.
    let pinned = "best/pinned.safetensors";
    fs::create_dir(rest.path("best")).unwrap();
    xattr::set(rest.path("best"), PIN, b"1").unwrap();
    save_now(&archive, &mut rest, pinned, |rest| rest.write(pinned, &lossy));
    until(|| archive.queue().queued == 0);
    assert!(rest.stub(pinned).is_none());
    assert_eq!(attribute(&archive, pinned, "lossy"), Some(of_original.clone()));
    archive.stop();
    drop(archive);
    let archive = rest.open();
    work(&archive);
    assert_eq!(attribute(&archive, pinned, "lossy"), Some(of_original));
    archive.stop();
}

/// A recall leaves a plain file with the object's mark. The next mount seals it only later.
#[test]
fn a_file_that_was_brought_back_says_so_before_it_is_sealed() {
    let rest = Rest::of(4);
    let (lossy, id) = (rest.read(&step(2)).unwrap(), rest.id(&step(2)));
    let mark = |name: &str, bytes: &[u8]| {
        fs::remove_file(rest.path(name)).unwrap();
        fs::write(rest.path(name), bytes).unwrap();
        xattr::set(rest.path(name), RECALLED, id.to_string().as_bytes()).unwrap();
    };
    let said = attribute(&rest.open(), &step(2), "lossy").unwrap();
    assert!(said.starts_with("1 weight "), "{said}");
    mark(&step(2), &lossy);
    // A program made it longer since.
    mark(&step(3), &[&lossy[..], b"more"].concat());
    let archive = rest.open();
    assert_eq!(attribute(&archive, &step(2), "lossy").unwrap(), said);
    assert_eq!(attribute(&archive, &step(3), "lossy").unwrap(), "0");
    work(&archive);
    assert_eq!(attribute(&archive, &step(2), "lossy").unwrap(), said);
    archive.stop();
}

fn originals(archive: &Arc<Archive>, rest: &Rest, names: &[String]) {
    for name in names {
        let expected = rest.stub(name).map(|_| sha256(&rest.written[name]));
        assert_eq!(attribute(archive, name, "original"), expected, "{name}");
        assert_eq!(attribute(archive, name, "lossy").as_deref() == Some("0"), expected.is_none(), "{name}");
    }
}

#[test]
fn the_hash_of_what_was_written_stays_with_the_file() {
    let rest = Rest::of(5);
    let archive = rest.open();
    work(&archive);
    originals(&archive, &rest, &(1..=5).map(step).collect::<Vec<_>>());
    // Others take over the lost bytes, and are encoded anew.
    let parent = rest.object(&step(3)).header().parent;
    for at in 1..=2 {
        fs::remove_file(rest.path(&step(at))).unwrap();
        archive.removed(Path::new(&step(at)));
    }
    until(|| archive.queue().queued == 0 && rest.count() == 2);
    assert_ne!(rest.object(&step(3)).header().parent, parent);
    originals(&archive, &rest, &(3..=5).map(step).collect::<Vec<_>>());
    // A copy was made from the same bytes.
    let copy = rest.read(&step(3)).unwrap();
    fs::write(rest.path("copy.safetensors"), copy).unwrap();
    archive.opened_for_writing(Path::new("copy.safetensors"));
    archive.sealed(Path::new("copy.safetensors"));
    until(|| rest.stub("copy.safetensors").is_some());
    assert_eq!(attribute(&archive, "copy.safetensors", "original"), Some(sha256(&rest.written[&step(3)])));
    archive.stop();
}

#[test]
fn the_hash_is_of_the_file_also_where_rows_are_kept_in_order() {
    let rest = elasticdl::settled(("cache_mib = 10240", "cache_mib = 10240"), true);
    let archive = rest.open();
    work(&archive);
    let released: Vec<&String> = rest.written.keys().filter(|name| rest.stub(name).is_some()).collect();
    assert!(released.iter().any(|name| rest.object(name).header().ordered));
    for name in released {
        assert_eq!(attribute(&archive, name, "original"), Some(sha256(&rest.written[name])), "{name}");
    }
    archive.stop();
}

#[test]
fn what_is_lossless_says_so() {
    let mut random = Random(5);
    let mut model = vec![Tensor::new("w", Dtype::F32, &[128, 129], &mut random)];
    let mut rest = Rest::under("exact");
    for at in 1..=3 {
        train(&mut model, 1e-3, &mut random);
        rest.write(&step(at), &safetensors(&model));
    }
    let archive = rest.open();
    work(&archive);
    for at in 1..=2 {
        assert!(!entry(rest.object(&step(at)).index(), "w").coding.is_lossy());
        assert_eq!(attribute(&archive, &step(at), "lossy").unwrap(), "0");
        assert_eq!(attribute(&archive, &step(at), "original"), Some(sha256(&rest.written[&step(at)])));
    }
    archive.stop();
}
