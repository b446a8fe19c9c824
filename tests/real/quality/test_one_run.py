"""Only states of one training run become lossy. Trials, folds, agents, critics and tasks stay exact under any name."""

import os
import pickle
import shutil
import warnings

import pytest
import safetensors.torch
import sweeps
import torch
from series import bits_equal, tensors_of
from sweeps import RATES, Saved, adamw, as_another, batches, contradicts_adam, fit, momentum, net, trained, whole
from torch import nn

pytestmark = [pytest.mark.stepfs, pytest.mark.slow]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- one table of names

FIRST = (0, 1, 2)
SETTINGS = ("0.0003", "0.001", "0.003")
SIZES = (16, 32, 64)
DAYS = ("01", "02", "03")
# Each name gets two or three finished models. None of them is a later state of another.
SWEEPS = {
    # Trials of a search.
    "trial_{}.pt": FIRST, "trial{}.pth": FIRST, "trial-{}.ckpt": FIRST, "{}.pt": FIRST, "{:03d}.pt": FIRST,
    "{}.joblib": FIRST, "models/{}.pth": FIRST, "model_{}.pt": FIRST, "model{}.pt": FIRST, "model-{}.bin": FIRST,
    "net_{}.pt": FIRST, "weights_{}.pth": FIRST, "final_trial_{}.pt": FIRST, "study_trial{:02d}.pt": FIRST,
    "candidate_{}.pt": FIRST, "config{}.pt": FIRST, "{}/model.pt": FIRST, "trial_{}/model.pt": FIRST,
    "multirun/{}/model.pt": FIRST, "trial_{}/checkpoint_000010/model.pt": FIRST,
    "model_{}.safetensors": FIRST, "{}/model.safetensors": FIRST,
    # Parts of the data, each with its own model.
    "subject{}.pt": FIRST, "subject_{:02d}.pt": FIRST, "patient-{}.pt": FIRST, "site{}.pt": FIRST, "user_{}.pt": FIRST,
    "client_{}.pt": FIRST, "fold{}.pt": FIRST, "fold_{}.pt": FIRST, "model_fold{}.pt": FIRST,
    "fold_{}/checkpoint_final.pth": FIRST, "split{}.pt": FIRST, "cv_{}.pt": FIRST, "class_{}.pt": FIRST,
    "digit{}.pt": FIRST, "scene_{}.pt": FIRST, "lang{}.pt": FIRST,
    # Tasks, agents, members of an ensemble or a population.
    "task_{}.pt": FIRST, "task{}.pt": FIRST, "domain_{}.pt": FIRST, "agent_{}.pt": FIRST, "agent{}.pth": FIRST,
    "player_{}.pt": FIRST, "policy_{}.pt": FIRST, "critic{}.pt": FIRST, "critic_{}.pth": FIRST, "q{}.pt": FIRST,
    "qf{}.pt": FIRST, "actor_{}.pt": FIRST, "member_{}.pt": FIRST, "member_{}/weights.pt": FIRST,
    "ensemble_{}.pt": FIRST, "expert_{}.pt": FIRST, "student{}.pt": FIRST, "agent_{}_step_100.pt": FIRST,
    "rank{}.pt": FIRST, "worker_{}.pt": FIRST,
    # Settings.
    "lr{}.pt": SETTINGS, "model_lr{}.pt": SETTINGS, "lr_{}_final.pt": SETTINGS, "lr{}_epoch_10.pt": SETTINGS,
    "wd={}.pt": SETTINGS, "dropout_{}.pt": SETTINGS, "alpha{}.pt": SETTINGS, "lr{}e-4.pt": (3, 10, 30),
    "bs{}.pt": SIZES, "bs_{}.pt": SIZES, "batch{}.pt": SIZES, "batch_{}.pt": SIZES, "model_batch{}.pt": SIZES,
    "batch_size_{}.pt": SIZES, "rank_r{}.pt": SIZES, "seed{}.pt": FIRST, "seed_{}.pt": (1, 42, 1234),
    "model_seed={}.pt": FIRST, "seed{}/epoch_10.pt": FIRST,
    # Versions, runs, dates.
    "v{}.pt": FIRST, "model_v{}.pt": FIRST, "model-v1.{}.pt": FIRST, "exp{}.pt": FIRST, "exp_{}.pt": FIRST,
    "exp{}/model.pt": FIRST, "run{}.pt": FIRST, "run_{}.pt": FIRST, "run{}/model.pt": FIRST,
    "version_{}/checkpoints/epoch=9-step=100.ckpt": FIRST, "model_202401{}.pt": DAYS, "model_2024-01-{}.pt": DAYS,
    "2024-01-{}.pt": DAYS, "2024-01-{}/model.pt": DAYS, "202401{}_101500.pt": DAYS, "20240101_10{}00.pt": DAYS,
}
# These names say that training is counted. The optimizers in the files say otherwise.
CONTRADICTED = (
    "epoch_{}.pt", "epoch{}.pth", "step_{}.pt", "iter_{}.pt", "ckpt_{}.pt", "checkpoint{}.pt", "checkpoint-{}/model.pt",
)

EVERY = (100, 120, 140, 160)
COUNTS = (1, 2, 3, 4)
# A run's four states: the names, the numbers in them, the content, and the verdict of all but the newest.
RUNS = [
    # A word for training is enough.
    ("step_{}.pt", EVERY, "adamw", "lossy"), ("step_{}.pt", EVERY, "weights", "lossy"),
    ("step{:06d}.pt", EVERY, "adamw", "lossy"), ("global_step{}/state.pt", EVERY, "adamw", "lossy"),
    ("iter_{}.pth", EVERY, "adamw", "lossy"), ("iteration{}.pt", EVERY, "weights", "lossy"),
    ("checkpoint-{}/model.pt", EVERY, "adamw", "lossy"), ("checkpoint_{}.pt", COUNTS, "weights", "lossy"),
    ("ckpt_{}.pt", COUNTS, "adamw", "lossy"), ("epoch_{}.pt", COUNTS, "adamw", "lossy"),
    ("epoch_{}.pt", COUNTS, "weights", "lossy"), ("epoch{}.pt", COUNTS, "sgd", "lossy"),
    ("epoch={}.ckpt", COUNTS, "forgetful", "lossy"), ("update_{}.pt", COUNTS, "adamw", "lossy"),
    ("model_epoch_{}.pt", COUNTS, "weights", "lossy"), ("run2/epoch_{}.pt", COUNTS, "adamw", "lossy"),
    ("seed3_epoch{}.pt", COUNTS, "weights", "lossy"), ("exp1_lr0.001_step{}.pt", EVERY, "adamw", "lossy"),
    ("fold0/epoch_{}.pt", COUNTS, "adamw", "lossy"),
    # The number is that of a counter in the file.
    ("model_{}.pt", EVERY, "adamw", "lossy"), ("{}.pt", EVERY, "adamw", "lossy"),
    ("{:05d}.pth", EVERY, "adamw", "lossy"), ("exp1-{}.pt", EVERY, "adamw", "lossy"),
    ("resnet50_{}.pt", EVERY, "adamw", "lossy"), ("{}/state.pt", EVERY, "adamw", "lossy"),
    ("model_{}.pt", EVERY, "forgetful", "lossy"), ("model_{}.pt", EVERY, "global_step", "lossy"),
    ("{}.pt", EVERY, "global_step", "lossy"), ("exp1-{}.pt", EVERY, "global_step", "lossy"),
    ("model_{}.pth", COUNTS, "epoch", "lossy"), ("net-{}.pt", COUNTS, "epoch from 0", "lossy"),
    ("model_{}.pt", COUNTS, "sgd, epoch", "lossy"),
    # Adam's second moments show that one state follows from the other.
    ("model_{}.pt", COUNTS, "adamw", "lossy"), ("{}.pt", COUNTS, "adamw", "lossy"),
    ("exp1-{}.pt", COUNTS, "adamw", "lossy"),
    # Nothing in the files shows it: no counter, no optimizer, or one that has forgotten the state before.
    ("model_{}.pt", EVERY, "weights", "exact"), ("{}.pt", EVERY, "weights", "exact"),
    ("exp1-{}.pt", EVERY, "weights", "exact"), ("model_{}.pt", COUNTS, "sgd", "exact"),
    ("model_{}.pt", COUNTS, "forgetful", "exact"), ("{}.pt", COUNTS, "global_step", "exact"),
]


def finished():
    """{content: states of finished trials}. Trials that stopped have counts that fall and rise."""
    same, stopped = [], []
    for seed, (lr, count) in enumerate(zip(RATES, (60, 50, 75))):
        counts = sorted({60, count})
        states = dict(zip(counts, trained(counts, lr, seed)))
        same.append(states[60])
        stopped.append(states[count])
    # The table below is right only if the optimizers show that no trial follows from another.
    for trials in (same, stopped):
        assert all(contradicts_adam(trials[a], trials[b]) for a in range(3) for b in range(3) if a != b)
    return {"whole": same[:2], "stopped": stopped, "weights": same[1:]}


def runs():
    """{content: (states of a run, and the content that a program saves for a state and a number)}."""
    adam, sgd, forgetful = trained(EVERY), trained(EVERY, make=momentum), trained(EVERY, betas=(0.9, 0.9))
    iterations = lambda state: int(state["optimizer"]["state"][0]["step"])  # noqa: E731
    as_it_is = lambda state, number: state  # noqa: E731
    return {
        "adamw": (adam, as_it_is),
        "weights": (adam, lambda state, number: state["model"]),
        "global_step": (adam, lambda state, number: {"model": state["model"], "global_step": iterations(state)}),
        "epoch": (adam, lambda state, number: {"epoch": number, "state_dict": state["model"]}),
        "epoch from 0": (adam, lambda state, number: {"epoch": number - 1, "state_dict": state["model"]}),
        "sgd": (sgd, as_it_is),
        "sgd, epoch": (sgd, lambda state, number: {**state, "epoch": number}),
        "forgetful": (forgetful, as_it_is),
    }


class Table:
    """Many series in one mount, each in a directory whose name has no number."""

    def __init__(self, mount):
        self.saved, self.rows = Saved(mount), []

    def add(self, pattern, numbers, content, states, verdict):
        at = len(self.rows)
        folder = chr(97 + at // 26) + chr(97 + at % 26)
        names = [f"{folder}/{pattern.format(number)}" for number, _ in zip(numbers, states)]
        save = safetensors.torch.save if pattern.endswith(".safetensors") else None
        for name, state in zip(names, states):
            self.saved.write(name, save(state) if save else sweeps.bytes_of(state))
        self.rows.append((pattern, content, names, verdict))

    def check(self):
        lines, wrong = [], 0
        for pattern, content, names, wanted in self.rows:
            found = [self.saved.verdict(name) for name in names]
            # The newest of a run is exact.
            expected = [wanted] * (len(names) - 1) + ["exact"]
            wrong += found != expected
            shown = "".join("L" if verdict == "lossy" else "e" for verdict in found)
            lines.append(f"{'   ' if found == expected else 'BAD'} {shown} {wanted:6} {content:12} {pattern}")
        table = "\n".join(sorted(lines, reverse=True))
        assert not wrong, f"{wrong} of {len(lines)} series are wrong (L is lossy, e exact):\n{table}"


def test_names_and_contents_decide_together_which_files_are_one_run(mount):
    assert len(SWEEPS) >= 60
    trials, table = finished(), Table(mount)
    for content, states in trials.items():
        worded = CONTRADICTED if content != "weights" else ()
        for pattern, values in [*SWEEPS.items(), *((pattern, FIRST) for pattern in worded)]:
            if pattern.endswith(".safetensors") and content != "weights":
                continue
            others = [as_another(state, len(table.rows)) for state in states]
            files = [other["model"] for other in others] if content == "weights" else others
            table.add(pattern, values, content, files, "exact")
    of_runs = runs()
    for pattern, numbers, content, verdict in RUNS:
        states, told = of_runs[content]
        files = [told(as_another(state, len(table.rows)), number) for state, number in zip(states, numbers)]
        table.add(pattern, numbers, content, files, verdict)
    mount.sync()
    table.check()


# --- finished models of one name

@pytest.mark.parametrize("kind", ["rates", "folds"])
def test_trials_that_stop_at_very_different_times_stay_exact(mount, kind):
    """Successive halving stops trials after 25, 75 and 225 iterations. Folds stop early, each at its own time.

    Second moments grow from 0. So those of a longer trial are above the decayed ones of a shorter one.
    """
    rates, seeds = ((1e-3, 2e-3, 3e-3), (9, 9, 9)) if kind == "rates" else ((1e-3, 1e-3, 1e-3), (1, 2, 3))
    trials = [trained([count], lr, seed)[0] for count, lr, seed in zip((25, 75, 225), rates, seeds)]
    assert not any(contradicts_adam(a, b) for a, b in zip(trials, trials[1:])), "this test is about the other case"
    saved = Saved(mount)
    for at, state in enumerate(trials):
        saved.save(f"model_{at}.pt", state)
    mount.sync()
    saved.require(exact=list(saved.sums))


def text():
    """Bytes to learn from: the source of torch's functions."""
    with open(nn.functional.__file__, "rb") as f:
        return torch.frombuffer(bytearray(f.read()), dtype=torch.uint8).long()


def study_of(objective, trials):
    """A study of Optuna itself, with settings that depend on the seed alone."""
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(seed=0))
    study.optimize(objective, n_trials=trials)
    return study


@pytest.mark.parametrize("name", ["{}.pt", "{}.pickle", "trial_{}.pickle"])
def test_optunas_faq_loads_the_best_trial_as_it_was_trained(mount, name):
    """Each trial saves its finished model under its number. The best one's is loaded at the end. All start alike."""
    code = text()
    pickled = name.endswith(".pickle")

    def some(count, generator):
        parts = code[torch.randint(0, len(code) - 17, (count,), generator=generator)[:, None] + torch.arange(17)]
        return parts[:, :16], parts[:, 16]

    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(256, 16), nn.Flatten(), nn.Linear(256, 128), nn.GELU(), nn.Linear(128, 256))

    x, y = some(2048, torch.Generator().manual_seed(9))
    saved, said = Saved(mount), []

    def objective(trial):
        made = model()
        optimizer = adamw(made, trial.suggest_float("lr", 3e-4, 3e-3, log=True))
        generator = torch.Generator().manual_seed(trial.number)
        for _ in range(80):
            batch, target = some(64, generator)
            loss = nn.functional.cross_entropy(made(batch), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        save = (lambda state, f: pickle.dump(state, f)) if pickled else torch.save
        saved.save(name.format(trial.number), whole(made, optimizer), save)
        with torch.no_grad():
            said.append(made(x).argmax(1))
        return (said[-1] == y).float().mean().item()

    best, number = model(), study_of(objective, 5).best_trial.number
    mount.sync()
    file = mount / name.format(number)
    best.load_state_dict((pickle.loads(file.read_bytes()) if pickled else torch.load(file))["model"])
    with torch.no_grad():
        assert torch.equal(best(x).argmax(1), said[number])
    saved.require(exact=list(saved.sums))


def test_an_optuna_trial_that_was_pruned_leaves_its_own_steps_alone(mount):
    """Trials that report as they train, and are pruned, save each step below their own number. Each is a run of its own."""
    optuna, saved, lost = pytest.importorskip("optuna"), Saved(mount), []

    def objective(trial):
        model, data = net(trial.number), batches(trial.number)
        optimizer = adamw(model, trial.suggest_float("lr", 3e-4, 3e-3, log=True))
        for step in range(3):
            loss = fit(model, optimizer, data, 20)
            saved.save(f"trial_{trial.number}/epoch_{step + 1}.pt", whole(model, optimizer))
            trial.report(-loss, step)
            if trial.number % 2 and step == 1:
                lost.append(trial.number)
                raise optuna.TrialPruned
        return -loss

    best = study_of(objective, 4).best_trial.number
    mount.sync()
    last = {trial: 2 if trial in lost else 3 for trial in range(4)}
    assert lost == [1, 3] and best not in lost
    newest = [f"trial_{trial}/epoch_{epoch}.pt" for trial, epoch in last.items()]
    saved.require(exact=newest, lossy=[file for file in saved.sums if file not in newest])


def test_optunas_faq_with_scikit_learn_keeps_each_classifier(mount):
    """As the FAQ writes it: `with open("{}.pickle".format(trial.number), "wb") as fout: pickle.dump(clf, fout)`."""
    neural_network = pytest.importorskip("sklearn.neural_network", exc_type=ImportError)
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    saved = Saved(mount)
    for number, rate in enumerate([1e-3, 3e-4, 3e-3]):
        classifier = neural_network.MLPClassifier((128, 128), learning_rate_init=rate, max_iter=4, random_state=0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it has not converged
            classifier.fit(digits.data[:1000] / 16, digits.target[:1000])
        saved.save(f"{number}.pickle", classifier, lambda state, f: pickle.dump(state, f))
    mount.sync()
    saved.require(exact=list(saved.sums))


@pytest.mark.parametrize("name", ["fold{}.pt", "model_{}.pt"])
def test_the_models_of_all_folds_stay_exact(mount, name):
    samples, saved = [pair for pair, _ in zip(batches(5), range(40))], Saved(mount)
    for fold in range(4):
        model, train = net(), [pair for at, pair in enumerate(samples) if at % 4 != fold]
        optimizer = adamw(model)
        for _ in range(2):
            fit(model, optimizer, train, len(train))
        saved.save(name.format(fold), whole(model, optimizer))
    mount.sync()
    saved.require(exact=list(saved.sums))


@pytest.mark.parametrize("content", ["whole", "weights"])
def test_the_model_after_each_task_stays_exact(mount, content):
    """Each task goes on from the weights of the last one, with an optimizer of its own."""
    model, saved = net(), Saved(mount)
    for task in range(4):
        optimizer = adamw(model)
        fit(model, optimizer, batches(task, of=task), 60)
        saved.save(f"task_{task}.pt", whole(model, optimizer) if content == "whole" else model.state_dict())
    mount.sync()
    saved.require(exact=list(saved.sums))


# --- models that are trained beside each other

@pytest.mark.parametrize("content", ["whole", "weights"])
def test_twin_critics_are_exact_after_every_save(mount, content):
    """TD3 and SAC have two critics of one shape, and rewrite both files at each save."""
    critics = [net(1), net(2)]
    optimizers, data, saved = [adamw(critic) for critic in critics], batches(3), Saved(mount)
    for _ in range(4):
        for x, y in (next(data) for _ in range(20)):
            for critic, optimizer in zip(critics, optimizers):
                loss = nn.functional.mse_loss(critic(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        for number, (critic, optimizer) in enumerate(zip(critics, optimizers), 1):
            saved.save(f"critic_{number}.pth", whole(critic, optimizer) if content == "whole" else critic.state_dict())
        mount.sync()
        saved.require(exact=["critic_1.pth", "critic_2.pth"])


@pytest.mark.parametrize("algorithm", ["SAC", "TD3"])
def test_each_agent_of_stable_baselines_stays_as_it_was_saved(mount, algorithm):
    baselines = pytest.importorskip("stable_baselines3")
    from gymnasium.envs.classic_control import PendulumEnv
    from stable_baselines3.common.save_util import load_from_zip_file

    written = {}
    for number in range(3):
        agent = getattr(baselines, algorithm)(
            "MlpPolicy", PendulumEnv(), seed=number, learning_starts=20, batch_size=32, buffer_size=1000, device="cpu",
            policy_kwargs={"net_arch": [64, 64]},
        )
        agent.learn(60)
        name = f"agent_{number}.zip"
        agent.save(mount / name)
        written[name] = {path: tensor.clone() for path, tensor in tensors_of(agent.get_parameters()).items()}
    mount.sync()
    for name, tensors in written.items():
        assert os.path.getsize(mount / name) > 1 << 16
        read = tensors_of(load_from_zip_file(mount / name, device="cpu")[1])
        wrong = [path for path, tensor in tensors.items() if not bits_equal(tensor, read[path])]
        assert not wrong and os.getxattr(mount / name, "user.stepfs.lossy") == b"0", f"{name}: {wrong}"


def test_a_gans_networks_are_exact_after_every_save_and_their_epochs_are_runs(mount):
    """A cycle of two generators with two critics, all of one shape; the critics judge patches."""
    networks = [net(seed) for seed in range(4)]
    make, judge = networks[:2], networks[2:]
    optimizers = [adamw(network, 2e-4, (0.5, 0.999)) for network in networks]
    saved, generator = Saved(mount), torch.Generator().manual_seed(4)
    score = nn.functional.mse_loss
    of_epoch = lambda epoch: [f"epochs/net_{number}_epoch_{epoch}.pth" for number in range(4)]  # noqa: E731
    for epoch in range(1, 5):
        for _ in range(15):
            real = [torch.randn(32, 64, generator=generator), torch.rand(32, 64, generator=generator)]
            false = [make[0](real[0]), make[1](real[1])]
            back = [make[1](false[0]), make[0](false[1])]
            for side in (0, 1):
                told = judge[side](false[side])
                loss = score(told, torch.ones_like(told)) + 10 * score(back[side], real[side])
                # The generators' gradients add up; the critics' are their own.
                loss.backward(inputs=[*make[0].parameters(), *make[1].parameters()], retain_graph=True)
                on_real, on_false = judge[side](real[1 - side]), judge[side](false[side].detach())
                loss = score(on_real, torch.ones_like(on_real)) + score(on_false, torch.zeros_like(on_false))
                loss.backward(inputs=list(judge[side].parameters()))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for number, (network, optimizer) in enumerate(zip(networks, optimizers)):
            saved.save(f"net_{number}.pth", whole(network, optimizer))
            saved.save(f"epochs/net_{number}_epoch_{epoch}.pth", whole(network, optimizer, epoch=epoch))
        mount.sync()
        saved.require(exact=[f"net_{number}.pth" for number in range(4)] + of_epoch(epoch))
    saved.require(lossy=[*of_epoch(1), *of_epoch(2), *of_epoch(3)])


@pytest.mark.parametrize("name", ["member_{}.pt", "agent_{}.pt"])
def test_a_population_is_exact_after_every_round(mount, name):
    """The worst member takes over the best one's file, and goes on with another rate. Some programs copy the file."""
    files = [name.format(number) for number in range(4)]
    members = [net(number) for number in range(4)]
    optimizers = [adamw(member, lr) for member, lr in zip(members, RATES)]
    data, saved = [batches(number) for number in range(4)], Saved(mount)
    for round_ in range(3):
        losses = [fit(*each, 20) for each in zip(members, optimizers, data)]
        for file, member, optimizer in zip(files, members, optimizers):
            saved.save(file, whole(member, optimizer))
        mount.sync()
        saved.require(exact=files)
        worst, best = losses.index(max(losses)), losses.index(min(losses))
        if round_ == 1:
            shutil.copyfile(mount / files[best], mount / files[worst])
            saved.sums[files[worst]] = saved.sums[files[best]]
            mount.sync()
            saved.require(exact=files)
        state = torch.load(mount / files[best])
        members[worst].load_state_dict(state["model"])
        optimizers[worst].load_state_dict(state["optimizer"])
        optimizers[worst].param_groups[0]["lr"] *= 1.2


# --- the last good state, and the best one

@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_state_with_one_weight_that_is_not_finite_replaces_no_good_one(mount, value):
    steps, saved = (20, 40, 60, 80, 100), Saved(mount)
    for step, state in zip(steps, trained(steps)):
        if step > 60:
            state["model"]["2.weight"][17, 3] = value
        saved.save(f"step_{step}.pt", state)
    mount.sync()
    saved.require(lossy=["step_20.pt", "step_40.pt"], exact=["step_60.pt", "step_80.pt", "step_100.pt"])


def test_the_last_good_state_of_a_run_that_diverges_stays_exact_until_a_good_one_follows(mount):
    model, data, saved = net(), batches(1), Saved(mount)
    optimizer = adamw(model)
    for step in range(10, 91, 10):
        if step >= 70:
            next(model.parameters()).data.mul_(float("nan"))
        fit(model, optimizer, data, 10)
        if step == 60:
            good = whole(model, optimizer)
        saved.save(f"step_{step}.pt", whole(model, optimizer))
    mount.sync()
    names = [f"step_{step}.pt" for step in range(10, 91, 10)]
    saved.require(lossy=names[:5], exact=names[5:])
    # Somebody goes on from a good state.
    model.load_state_dict(good["model"])
    optimizer.load_state_dict(good["optimizer"])
    fit(model, optimizer, batches(1), 30)
    saved.save("step_100.pt", whole(model, optimizer))
    mount.sync()
    saved.require(lossy=["step_60.pt"], exact=["step_100.pt"])


# Four results; the second is the best one.
LOSSES, SCORES = (0.9, 0.31, 0.5, 0.74), (0.3, 0.91, 0.5, 0.74)
RESULTS = {
    "epoch={}-val_loss={:.4f}.ckpt": LOSSES, "epoch_{}_loss_{:.3f}.pt": LOSSES, "step_{}_ppl_{:.2f}.pt": LOSSES,
    "model_epoch{}_wer{:.2f}.pth": LOSSES, "epoch_{}_val_error_{:.3f}.pt": LOSSES, "epoch_{}_rmse={:.2f}.pt": LOSSES,
    "epoch={}-val_acc={:.2f}.ckpt": SCORES, "epoch{}_acc{:.2f}.pt": SCORES, "checkpoint_{}_mIoU_{:.4f}.pth": SCORES,
    "epoch_{}_val_accuracy_{:.3f}.pt": SCORES, "epoch={}-auc={:.2f}.ckpt": SCORES, "step_{}_psnr_{:.2f}.pt": SCORES,
    "weights.{:02d}-{:.2f}.pt": LOSSES, "model.{:02d}-{:.4f}.pt": LOSSES,
}


def test_the_best_by_the_result_in_its_name_stays_exact(mount):
    states, saved, lines, wrong = trained(EVERY), Saved(mount), [], 0
    names = {pattern: [f"{chr(97 + at)}/{pattern.format(count, result)}" for count, result in zip(COUNTS, results)]
             for at, (pattern, results) in enumerate(RESULTS.items())}
    for at, files in enumerate(names.values()):
        for name, state in zip(files, states):
            saved.save(name, as_another(state, at))
    mount.sync()
    for pattern, files in names.items():
        found = "".join("L" if saved.verdict(name) == "lossy" else "e" for name in files)
        # Keras's name does not say whether the result is a loss, so the highest may stay, too.
        is_right = found == "LeLe" or found == "eeLe" and pattern.startswith(("weights", "model."))
        wrong += not is_right
        lines.append(f"{'   ' if is_right else 'BAD'} {found} {pattern}")
    table = "\n".join(lines)
    assert not wrong, f"{wrong} wrong (L is lossy, e exact; the second and the last must be exact):\n{table}"


def test_lightnings_best_weights_stay_as_they_were_saved(mount):
    """With `save_weights_only` no file holds a callback that names the best one: only its name does."""
    lightning = pytest.importorskip("pytorch_lightning")
    from pytorch_lightning.callbacks import ModelCheckpoint

    saved, written = Saved(mount), []

    class Regression(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))

        def training_step(self, batch, _):
            return nn.functional.mse_loss(self.layers(batch[0]), batch[0].sin())

        def validation_step(self, batch, _):
            self.log("val_loss", abs(self.current_epoch - 1.0) + 0.5)  # the second epoch is the best

        def configure_optimizers(self):
            return adamw(self)

    class Save(ModelCheckpoint):
        def _save_checkpoint(self, trainer, filepath):
            super()._save_checkpoint(trainer, filepath)
            written.append(os.path.basename(filepath))
            with open(filepath, "rb") as f:
                saved.note(written[-1], f.read())

    torch.manual_seed(0)
    saver = Save(mount.dir, "{epoch}-{val_loss:.4f}", monitor="val_loss", save_top_k=-1, save_weights_only=True)
    job = lightning.Trainer(max_epochs=5, accelerator="cpu", logger=False, callbacks=[saver], enable_progress_bar=False,
                            enable_model_summary=False, num_sanity_val_steps=0)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(256, 64)), batch_size=32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        job.fit(Regression(), loader, loader)
    mount.sync()
    best = os.path.basename(saver.best_model_path)
    assert best == "epoch=1-val_loss=0.5000.ckpt" and len(written) == 5
    saved.require(exact=[best, written[-1]], lossy=[written[0], written[2], written[3]])
