"""The study of restores in small: its protocol is exact where nothing is lost, and its figures are right."""

import copy
import json
import os
import random
import subprocess
import sys

import harness
import pytest
from harness import make_base, remove_base
from study import gaps, lean, protocol, sizes, tasks, training


@pytest.mark.nightly
@pytest.mark.stepfs
def test_quick_study():
    """resume_study.py itself fails when a run under `exact` ends in other bits than the uninterrupted one."""
    base = make_base()
    try:
        chosen = ["gpt_i25", "gpt_bf16", "mlr_sgd5", "recommend"]
        command = [sys.executable, harness.ROOT / "scripts/resume_study.py", "--quick", "--tasks", ",".join(chosen), "--profiles", "exact,balanced",
                   "--restores", "2", "--raw", base / "raw", "--dir", base, "--json", "-"]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300, env={**os.environ, "STEPFS_BIN": harness.BIN})
        assert done.returncode == 0, done.stderr
        results = {result["task"]: result for result in json.loads(done.stdout)}
        assert list(results) == chosen
        for name, result in results.items():
            exact, balanced, ulp = (result["chains"][profile]["2"] for profile in ("exact", "balanced", "ulp"))
            assert exact["same_bits"] == 1 and balanced["same_bits"] == 0 and ulp["same_bits"] == 0, name
            assert exact["behind"][0] == 0 and exact["end_gap"][0] == 0, name
            assert balanced["late_gap"][0] < 0.1, f"{name}: going on from balanced checkpoints lost {balanced['late_gap'][0]}"
            for report in result["sizes"].values():
                sums = report["total"]
                assert report["unnamed_bytes"] == 0
                assert sum(part["stored_bytes"] for part in sums["kinds"].values()) == sums["object_bytes"]
                assert sum(part["raw_bytes"] for part in sums["kinds"].values()) == sums["raw_bytes"]
            assert result["sizes"]["balanced"]["total"]["share"] < result["sizes"]["exact"]["total"]["share"], name
        assert results["mlr_sgd5"]["singles"]["exact"]["rework"][0] == 0
        again = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300, env={**os.environ, "STEPFS_BIN": harness.BIN})
        assert again.returncode == 0 and " ..." not in again.stderr, f"finished runs were done again:\n{again.stderr}"
    finally:
        remove_base(base)


@pytest.mark.nightly
@pytest.mark.stepfs
def test_quick_judging():
    """Chains of restores on models of three kinds that judge the promises, in small."""
    base = make_base()
    try:
        chosen = ["held_gpt_w96_i20", "held_convolution_i20", "held_mixture_i20"]
        command = [sys.executable, harness.ROOT / "scripts/resume_study.py", "--quick", "--judge", "held_out", "--tasks", ",".join(chosen), "--profiles",
                   "exact,balanced", "--starts", "0", "--raw", base / "raw", "--dir", base, "--seeds", "2", "--no-control", "--json", "-"]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300, env={**os.environ, "STEPFS_BIN": harness.BIN})
        assert done.returncode == 0, done.stderr
        results = {result["task"]: result["profiles"] for result in json.loads(done.stdout)}
        assert list(results) == chosen
        for name, found in results.items():
            assert found["exact"]["each"] == [0, 0] and found["exact"]["upper"] == 0, f"{name}: nothing was lost, but it is behind"
            assert found["balanced"]["each"] != [0, 0], f"{name}: the restored state is exact"
            assert found["balanced"]["verdict"] is not None and found["exact"]["verdict"] is None
            assert found["balanced"]["total"]["share"] < found["exact"]["total"]["share"], name
    finally:
        remove_base(base)


@pytest.mark.parametrize("name", [task.name for task in tasks.JUDGED])
def test_a_judged_run_goes_on_as_if_never_interrupted(name):
    task = tasks.TASKS[name].smoke()
    whole, first, second = task.make(3), task.make(3), task.make(3)
    losses = [whole.step() for _ in range(6)]
    for _ in range(3):
        first.step()
    second.load(first.state())
    assert [second.step() for _ in range(3)] == losses[3:]
    assert training.digest(second.state()) == training.digest(whole.state())


def test_what_judges_is_not_what_chooses():
    """The two sets share no task, and no settings of one."""
    sets = {}
    for task in tasks.JUDGED:
        sets.setdefault(task.set, []).append(f"{sorted(task.settings.items())} every {task.every}")
    assert tasks.CALIBRATION in sets and len(sets) > 1
    settings = [setting for of in sets.values() for setting in {*of}]
    assert len(settings) == len({*settings})


def test_chains_find_the_checkpoints_they_begin_with():
    for task in (task for task in tasks.JUDGED if not task.weighed_only):
        for start in task.starts:
            found, end = task.chain_from(start)
            assert len(found) == 9 and found[-1] + 1 < task.count and end <= task.length
            assert 35 <= (found[1] - found[0]) * task.every <= 50
            assert {*range(max(0, start - tasks.HISTORY), start + 2)} <= task.needed()
            assert {task.iteration(place) + k for place in found for k in task.offsets} <= task.measured()


def test_a_chain_that_loses_two_iterations_a_restore():
    """For any curve of the loss, and although the loss dips at first after each restore."""
    task = tasks.TASKS["gpt_w64_i20"]
    loss = lambda n: 1 + 4 * n**-0.4
    base = {"averaged": {}, **{what: {str(n): loss(n) for n in range(10, task.length + 1)} for what in ("held_out", "train")}}
    found, end = task.chain_from(task.starts[1])
    segments = []
    for n, place in enumerate(found, 1):
        at = task.iteration(place)
        until = task.iteration(found[n] + 1) if n < len(found) else end
        late = {str(k): loss(k - 2 * n) - (0.1 if k - at <= 10 else 0) for k in range(at, until + 1)}
        middle = at + (20 + 60) // 2
        base["averaged"][f"{at + 20}-{at + 60}"] = loss(middle)
        segments.append({"at": at, "until": until, "held_out": late, "train": late, "averaged": {f"{at + 20}-{at + 60}": loss(middle - 2 * n)}})
    chain = {**gaps.of_chain(task, segments, base, [base]), "seed": 1}
    assert all(chain[what] == pytest.approx(2, rel=0.06) for what in ("behind", "states_behind", "train_behind"))
    assert chain["rows"][0]["gaps"][0] < 0 < chain["rows"][0]["gaps"][20]
    assert chain["both"] == pytest.approx((chain["behind"] + chain["states_behind"]) / 2)
    more = {**chain, "seed": 2, "behind": chain["behind"] + 1, "states_behind": chain["states_behind"] + 3, "both": chain["both"] + 2}
    found = gaps.judge(task, [chain, more])
    assert found["upper"] == pytest.approx(chain["both"] + 1 + gaps.t95(1))
    assert found["upper_each"] == pytest.approx(chain["states_behind"] + 1.5 * (1 + gaps.t95(1)))
    assert [gaps.verdict(found, promise) for promise in (None, 20, 2)] == [None, "met", "not shown"]
    assert gaps.verdict(gaps.judge(task, [chain, chain]), 0.5) == "broken"


def test_coarse_steps_keep_less_of_what_training_did():
    task = tasks.TASKS["gpt_w64_i20"].smoke()
    run, states = task.make(1), []
    for _ in range(3):
        for _ in range(task.every):
            run.step()
        states.append(copy.deepcopy(run.state()))
    kept = lambda sums: sums.both / sums.square
    for measure, of in ((lean.moments, states), (lean.weights, [tuple(states)])):
        fine, coarse = measure(of, 0.5), measure(of, 6.0)
        assert abs(kept(fine) - 1) < 0.06 and fine.error < 0.03 * fine.square
        assert coarse.error > 0.5 * coarse.square and fine.bits > coarse.bits + 1
    assert kept(lean.moments(states, 6.0)) < 0.1


@pytest.mark.slow
def test_two_processes_share_jobs(tmp_path):
    """Each job is done once, though both processes ask for all of them."""
    program = (
        "import sys, time; from study import chains\n"
        "def job(n):\n"
        "    path = f'{sys.argv[1]}/{n}'\n"
        "    def work():\n"
        "        try: open(path, 'x').write(sys.argv[2]); time.sleep(0.05)\n"
        "        except FileExistsError: pass\n"
        "        return open(path).read()\n"
        "    return path, work\n"
        "print(''.join(chains.share([job(n) for n in range(20)])))"
    )
    paths = os.pathsep.join(str(harness.ROOT / part) for part in ("scripts", "tests/real/support"))
    start = lambda who: subprocess.Popen([sys.executable, "-c", program, tmp_path, who], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths})
    both = [start("a"), start("b")]
    first, second = (one.communicate(timeout=120)[0].strip() for one in both)
    assert first == second and len(first) == 20


def test_settings_are_replaced_and_appended():
    text = '# a store\nformat = 1\ndefault_profile = "balanced"\n\n[[profile]]\nglob = "a"\n'
    done = sizes.with_settings(text, 'default_profile = "exact"\nmore = 2\n[x]\ny = 1\n').splitlines()
    assert [line for line in done if line] == ["# a store", "format = 1", 'default_profile = "exact"', "more = 2", "[[profile]]", 'glob = "a"', "[x]", "y = 1"]


def test_iterations_behind_of_a_late_run():
    """A run that is 3 iterations late is 3 iterations behind, for any curve."""
    task = tasks.TASKS["gpt_i25"]
    loss = lambda n: 2 + 3 * (n + 50) ** -0.5
    base = {"held_out": {str(n): loss(n) for n in range(0, 900)}, "train": {str(n): 0.0 for n in range(900)}}
    late = {"at": 400, "until": 500, "held_out": {str(n): loss(n - 3) for n in range(400, 501)}, "train": {str(n): 0.0 for n in range(900)}}
    found = gaps.of_segment(task, late, base)
    assert found["train_mean"] == 0
    assert found["late_behind"] == pytest.approx(3, rel=0.05)
    # The restored state had the loss of iteration 397: 3 iterations bring back that of 400.
    assert gaps.rework(late, base) == (3, True)


def test_no_fall_is_not_behind():
    assert gaps.behind(0.1, 0.0) is None and gaps.behind(0.1, 0.01) is None and gaps.behind(0.1, -0.05) == pytest.approx(2)


def test_per_restore_finds_the_rate_in_noise():
    draw = random.Random(5)
    rows = [{"late_behind": 1.5 * n + draw.gauss(0, 0.5)} for n in range(1, 11)]
    rate, half = gaps.per_restore(rows)
    assert abs(rate - 1.5) < half < 0.2


def test_places_leave_a_newer_checkpoint():
    for task in (task for task in tasks.TASKS.values() if not task.set):
        for restores in (1, 5, 9, 10, task.count - 2):
            found = protocol.places(task, restores)
            assert len(set(found)) == restores and found == sorted(found) and 0 <= found[0] and found[-1] < task.count - 1
    with pytest.raises(ValueError):
        protocol.places(task, task.count)


def test_batches_depend_on_seed_and_iteration_only():
    task = tasks.TASKS["mlr_sgd5"].smoke()
    whole, first = task.make(3), task.make(3)
    losses = [whole.step() for _ in range(12)]
    for _ in range(7):
        first.step()
    second = task.make(3)
    second.load(first.state())
    assert [second.step() for _ in range(5)] == losses[7:]
    assert task.make(4).step() != losses[0]
