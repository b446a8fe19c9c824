"""Real files of many libraries on one mount: after its release each is as good for its use as before.

docs/ZOO.md lists them.
"""

import math
import shutil

import pytest
from bounds import same_words
from harness import ROOT, make_base, open_mount
from zoo import ANIMALS, Zoo
from zoo.keeper import STEPS, breach, load, require_finite, require_no_zero, require_same
from zoo.record import describe

pytestmark = pytest.mark.stepfs
# A bound in octaves is stated in the linear pseudo-logarithm, which differs from the true one by this much at most.
OCTAVES_OF_LOGARITHM = 0.1
every_animal = pytest.mark.parametrize("name", ANIMALS)


@pytest.fixture(scope="module")
def zoo(request):
    """The animals that the selected tests name, made once."""
    here = (item for item in request.session.items if item.module is request.module and hasattr(item, "callspec"))
    wanted = dict.fromkeys(item.callspec.params["name"] for item in here)
    plain, mounts = make_base(), open_mount(True)
    try:
        zoo = Zoo(next(mounts), plain, wanted)
        yield zoo
        # Tensors of safetensors files are mapped: the daemon waits until all are gone.
        zoo.forget()
    finally:
        mounts.close()
        shutil.rmtree(plain)


@every_animal
def test_released_files_are_as_good_for_their_use(zoo, name):
    zoo.use(name)


@every_animal
def test_only_what_is_proven_to_be_trained_is_lossy(zoo, name):
    found = {f"{file}: {path}" for file, path, _, _ in zoo.changed(name) if not zoo.may_change(name, path)}
    assert not found, f"{len(found)} tensors changed without a proof: {sorted(found)[:5]}"


@every_animal
def test_there_is_a_floor_under_every_lossy_value(zoo, name):
    broken = []
    for file, path, was, now in zoo.changed(name):
        about = zoo.said(file)[same_words(path)]
        # For second moments the promised bound is in octaves, and never more than two. For means of gradients only the sign is
        # promised, and that no value becomes 0: nothing divides by them.
        if about["codec"] == "log":
            most = 2 ** min(about["bound"] + OCTAVES_OF_LOGARITHM, 2)
        else:
            most = math.inf if about["codec"] in ("moment", "sized", "signs") else 2.0
        if what := breach(was, now, most):
            broken.append(f"{file}: {path}: {what}")
    assert not broken, f"{len(broken)} tensors: {broken[:5]}"


@every_animal
def test_inspect_tells_what_is_lossy(zoo, name):
    """Every tensor that changed has a bound and a reason; no tensor that is called exact changed."""
    changed = zoo.changed(name)
    for file in {row[0] for row in changed}:
        assert all(tensor["why"] and tensor["role"] for tensor in zoo.said(file).values())
    exact = [f"{file}: {path}" for file, path, _, _ in changed if not zoo.said(file)[same_words(path)]["bound"]]
    assert not exact, f"said to be exact: {exact[:5]}"


@every_animal
def test_older_states_are_released(zoo, name):
    """Without a release the other tests would show nothing."""
    files = [str(was.relative_to(zoo.plain)) for was, _ in zoo.older(name)]
    late = [file for file in files if zoo.rows[file]["state"] != "released"]
    assert bool(late) == ANIMALS[name].stays, f"not released: {late}\n{zoo.mount.log_tail()}"


@pytest.mark.parametrize("name", [name for name, kind in ANIMALS.items() if kind.small])
def test_what_is_proven_stays_small(zoo, name):
    for step in STEPS[1:-1]:
        row = zoo.rows[f"{name}/{ANIMALS[name].pattern.format(step)}"]
        share = row["stored_bytes"] / row["logical_bytes"]
        assert share <= ANIMALS[name].small, f"step {step} takes {100 * share:.1f} %"


@pytest.mark.parametrize("name", ["replay", "replay_refreshed"])
def test_replay_data_come_back_bit_for_bit(zoo, name):
    for was, now in zoo.older(name):
        assert was.read_bytes() == now.read_bytes()


@pytest.mark.parametrize("name", ["rsl_rl_normalizer"])
def test_no_variance_of_a_normaliser_becomes_zero(zoo, name):
    for was, now in zoo.older(name):
        before, after = load(was), load(now)
        for key in ("_mean", "_var", "_std"):
            require_same(before[f"obs_normalizer.{key}"], after[f"obs_normalizer.{key}"], f"entries of {key}")
        require_no_zero(before["obs_normalizer._var"], after["obs_normalizer._var"], "variances")
        require_finite(1 / after["obs_normalizer._std"], "scales")


@pytest.mark.parametrize("name", ["softmax_buffer", "softmax_buffer_with_optimizer", "softmax_buffer_unpaired"])
def test_a_probability_next_to_nothing_is_not_nothing(zoo, name):
    for was, now in zoo.older(name):
        before, after = (state.get("model", state)["prior.probs"] for state in (load(was), load(now)))
        assert 0 < before.min() < 3.7e-14
        require_same(before, after, "probabilities")


def test_the_record_lists_every_animal():
    """A new animal needs a row in docs/ZOO.md."""
    rows = [line for line in (ROOT / "docs/ZOO.md").read_text().splitlines() if line.startswith("| ")]
    missing = [describe(name) for name in ANIMALS if not any(row.startswith(describe(name)) for row in rows)]
    assert not missing, "not in docs/ZOO.md:\n" + "\n".join(missing)
    unknown = {row.split(" | ")[0].removeprefix("| ") for row in rows[1:]} - ANIMALS.keys()
    assert not unknown, f"in docs/ZOO.md, but not in the zoo: {unknown}"
