//! Which files are states of one training run. All others stay exact, whatever numbers their names have.

use super::series::{Dtype, Random, Rest, Tensor, work};
use super::torch::{Value, save};

const DECAY: f64 = 0.999;

/// A run with Adam.
#[derive(Clone)]
struct Run {
    weights: Tensor,
    first: Tensor,
    second: Tensor,
    steps: i32,
    random: Random,
}

impl Run {
    fn new(seed: u64) -> Run {
        let mut random = Random(7);
        let mut zeros = Tensor::new("", Dtype::F32, &[128, 130], &mut random);
        zeros.values.fill(0.0);
        let weights = Tensor::new("layer.weight", Dtype::F32, &[128, 130], &mut random);
        Run { weights, first: zeros.clone(), second: zeros, steps: 0, random: Random(seed) }
    }

    /// Elements have gradients of different sizes, and other ones in each run.
    fn train(&mut self, iterations: i32) {
        let decay = DECAY.powi(iterations);
        for (at, weight) in self.weights.values.iter_mut().enumerate() {
            let size = 1e-3 * (1 + at % 7) as f64 * (0.5 * self.random.normal()).exp();
            let gradient = size * self.random.normal();
            self.first.values[at] = 0.3 * gradient;
            let second = &mut self.second.values[at];
            *second = decay * *second + (1.0 - decay) * size * size;
            *weight -= 1e-3 * gradient.signum() * f64::from(iterations).sqrt();
        }
        self.steps += iterations;
    }

    fn file(&self, extra: &[(&str, i32)], with_optimizer: bool) -> Vec<u8> {
        let mut file = vec![("model", Value::named([("layer.weight", Value::Tensor(self.weights.clone()))]))];
        if with_optimizer {
            let state = Value::named([
                ("step", Value::Int(self.steps)),
                ("exp_avg", Value::Tensor(self.first.clone())),
                ("exp_avg_sq", Value::Tensor(self.second.clone())),
            ]);
            let group =
                Value::named([("betas", Value::Pair(0.9, DECAY)), ("params", Value::List(vec![Value::Int(0)]))]);
            let optimizer =
                Value::named([("state", Value::numbered([state])), ("param_groups", Value::List(vec![group]))]);
            file.push(("optimizer", optimizer));
        }
        file.extend(extra.iter().map(|(name, count)| (*name, Value::Int(*count))));
        save(&Value::named(file)).0
    }
}

fn lossy(rest: &Rest, name: &str) -> bool {
    rest.object(name).header().lossy
}

#[test]
fn siblings_stay_exact_whatever_their_names_say() {
    let mut rest = Rest::new();
    let trained = |seed: u64, iterations: i32| {
        let mut run = Run::new(seed);
        run.train(iterations);
        run
    };
    // Of a sweep: as many iterations each; more in each, by early stopping; and weights alone.
    // Each has weights of its own: a file whose weights another one has anyway costs nothing, and is exact for that.
    for number in 0..3u64 {
        for (family, name) in ["trial", "subject", "epoch", "step"].into_iter().enumerate() {
            let seed = 10 * number + family as u64;
            rest.write(&format!("same/{name}_{number}.pt"), &trained(seed, 200).file(&[], true));
            let more = trained(100 + seed, 200 + 40 * number as i32);
            rest.write(&format!("more/{name}_{number}.pt"), &more.file(&[], true));
        }
        rest.write(&format!("alone/model_{number}.pt"), &trained(200 + number, 200).file(&[], false));
        let far = trained(300 + number, 4000 * (1 + number as i32));
        rest.write(&format!("far/model_{number}.pt"), &far.file(&[], true));
    }
    rest.settle();
    for name in
        ["trial", "subject", "epoch", "step"].into_iter().flat_map(|name| [0, 1].map(|at| format!("{name}_{at}")))
    {
        assert!(!lossy(&rest, &format!("same/{name}.pt")), "{name}: as many steps in both");
        assert!(!lossy(&rest, &format!("more/{name}.pt")), "{name}: second moments of two runs");
    }
    for at in [0, 1] {
        assert!(!lossy(&rest, &format!("alone/model_{at}.pt")), "nothing proves that the number counts training");
        assert!(!lossy(&rest, &format!("far/model_{at}.pt")), "so far apart, second moments tell nothing");
    }
    let note = rest.object("alone/model_0.pt").index().note.clone();
    assert!(note.starts_with("not proven to be a step of one run: no number in this name"), "{note}");
}

#[test]
fn states_of_one_run_are_known_by_their_contents_where_names_say_nothing() {
    let mut rest = Rest::new();
    // Each directory has a run of its own: a file whose weights another one has anyway costs nothing, and is exact for that.
    let mut runs = [3, 4, 5, 6].map(Run::new);
    runs.iter_mut().for_each(|run| run.train(1000));
    for number in 1..=4 {
        runs.iter_mut().for_each(|run| run.train(50));
        let [adam, counted, off, other] = &runs;
        rest.write(&format!("adam/model_{number}.pt"), &adam.file(&[], true));
        rest.write(&format!("counted/model_{number}.pt"), &counted.file(&[("epoch", number)], false));
        rest.write(&format!("off/model_{number}.pt"), &off.file(&[("epoch", number - 1)], false));
        rest.write(&format!("other/model_{number}.pt"), &other.file(&[("epoch", 7 * number)], false));
    }
    rest.settle();
    for (directory, is_one_run) in [("adam", true), ("counted", true), ("off", true), ("other", false)] {
        for number in 1..=3 {
            let name = format!("{directory}/model_{number}.pt");
            assert_eq!(lossy(&rest, &name), is_one_run, "{name}");
        }
    }
}

/// A run that begins anew under the names of the former one: the last state of the former stays exact.
#[test]
fn the_last_state_of_a_former_run_stays_exact() {
    let mut rest = Rest::new();
    for (seed, numbers) in [(1, [1, 2, 3]), (2, [4, 5, 6])] {
        let mut run = Run::new(seed);
        for number in numbers {
            run.train(100);
            rest.write(&format!("step_{number}.pt"), &run.file(&[], true));
        }
    }
    rest.settle();
    assert_eq!([1, 2, 3, 4, 5].map(|at| lossy(&rest, &format!("step_{at}.pt"))), [true, true, false, true, true]);
}

#[test]
fn a_state_that_is_not_finite_makes_no_other_history() {
    let (mut rest, mut run) = (Rest::new(), Run::new(3));
    for number in 1..=5 {
        run.train(20);
        if number > 3 {
            run.weights.values[17] = f64::NAN;
        }
        rest.write(&format!("step_{number}.pt"), &run.file(&[], true));
    }
    let archive = rest.open();
    work(&archive);
    assert!(lossy(&rest, "step_1.pt") && lossy(&rest, "step_2.pt"));
    assert!(rest.stub("step_3.pt").is_none(), "the last sound state");
    let why = archive.attribute(std::path::Path::new("step_4.pt"), "why").unwrap();
    assert!(String::from_utf8_lossy(&why).contains("not finite"));
    archive.stop();
}

#[test]
fn the_best_result_in_names_stays_exact() {
    let (mut rest, mut run) = (Rest::new(), Run::new(3));
    let mut write = |rest: &mut Rest, epoch: i32, loss: f64, accuracy: f64| {
        run.train(20);
        rest.write(&format!("a/epoch={epoch}-val_loss={loss}.ckpt"), &run.file(&[], true));
        rest.write(&format!("b/epoch_{epoch}_acc_{accuracy}.pt"), &run.file(&[], true));
    };
    for (epoch, loss, accuracy) in [(1, 0.9, 0.5), (2, 0.25, 0.8), (3, 0.5, 0.9), (4, 0.75, 0.6)] {
        write(&mut rest, epoch, loss, accuracy);
    }
    rest.settle();
    let stays = |rest: &Rest, name: &str| rest.stub(name).is_none();
    assert!(stays(&rest, "a/epoch=2-val_loss=0.25.ckpt") && stays(&rest, "b/epoch_3_acc_0.9.pt"));
    assert!(lossy(&rest, "a/epoch=3-val_loss=0.5.ckpt") && lossy(&rest, "b/epoch_2_acc_0.8.pt"));
    // A better one comes: the former goes.
    for (epoch, loss, accuracy) in [(5, 0.125, 0.95), (6, 0.5, 0.5)] {
        write(&mut rest, epoch, loss, accuracy);
    }
    rest.settle();
    assert!(stays(&rest, "a/epoch=5-val_loss=0.125.ckpt") && stays(&rest, "b/epoch_5_acc_0.95.pt"));
    assert!(lossy(&rest, "a/epoch=2-val_loss=0.25.ckpt") && lossy(&rest, "b/epoch_3_acc_0.9.pt"));
}
