"""Odd optimizer state that no training should save and some does, written by torch through a mount: archived, and loadable."""

import json
import os
import re
import struct

import pytest
import torch
from harness import du, empty_cache, require_clean
from series import bits_equal, tensors_of, walk

pytestmark = pytest.mark.stepfs

COUNT = 6
LEAST = 128  # elements from which on copies are looked for
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


def slots(state, slot):
    return [state["optimizer"]["state"][i][slot] for i in state["optimizer"]["state"]]


def save(mount, change, count=COUNT, **options):
    """A walk whose states are changed before they are saved; returns {name: state as it was saved}."""
    saved = {}
    for step, state in enumerate(walk(count, seed=71, **options), 1):
        change(step, state)
        name = f"step_{step:04d}.pt"
        torch.save(state, mount / name)
        saved[name] = state
    mount.sync()
    return saved


def check(mount, saved, exact=()):
    """Everything loads and is as faithful as it must be. Tensors whose paths contain a part of `exact` are bit for bit."""
    lossy = 0
    for name, state in saved.items():
        read = torch.load(mount / name, weights_only=True)
        was, now = tensors_of(state), tensors_of(read)
        assert was.keys() == now.keys(), name
        for path, tensor in was.items():
            assert (tensor.dtype, tensor.shape) == (now[path].dtype, now[path].shape), f"{name}: {path}"
            if bits_equal(tensor, now[path]):
                continue
            lossy += 1
            assert not any(part in path for part in exact), f"{name}: {path} is not exact"
            # Only parameters and their moments are quantized.
            assert torch.isfinite(tensor.double()).all() and torch.isfinite(now[path].double()).all(), f"{name}: {path}"
        for i, slot in read["optimizer"]["state"].items():
            if "exp_avg" in slot and "exp_avg_sq" in slot:
                check_update(state["optimizer"]["state"][i], slot, f"{name}: {i}")
    if mount.pid:
        mount.umount()
        empty_cache(mount.store)
        require_clean(mount.store)
        mount.mount()
    return lossy


def check_update(was, now, where):
    """Adam's update m / sqrt(v): zeros of v stay zeros, no sign changes, and no ratio grows by much more than the mean ratio."""
    m, v, m_now, v_now = (s[k].double() for s in (was, now) for k in ("exp_avg", "exp_avg_sq"))
    assert torch.equal(v == 0, v_now == 0), where
    regular = (v > 0) & torch.isfinite(v) & torch.isfinite(m)
    ratio, ratio_now = ((a[regular].abs() / b[regular].sqrt()) for a, b in ((m, v), (m_now, v_now)))
    if ratio.numel():
        # Steps are at most 2 root mean squares, times the sensitivity, which is at most 4.
        assert (ratio_now <= ratio * 1.01 + 4.1 * ratio.square().mean().sqrt() + 1e-30).all(), where
    assert (m_now[regular] * m[regular] >= 0).all(), where


def poke(tensor, value, at=7):
    tensor.view(-1)[at] = value


@pytest.mark.parametrize("slot", ["weight", "exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.0], ids=str)
def test_not_a_number(mount, slot, value):
    def change(step, state):
        if step in (3, 4):
            poke(state["model"]["wte.weight"] if slot == "weight" else slots(state, slot)[0], value)

    assert check(mount, save(mount, change)) > 0


def test_negative_second_moment(mount):
    saved = save(mount, lambda step, state: poke(slots(state, "exp_avg_sq")[0], -1e-8))
    # Neither the moment nor its partner is quantized.
    check(mount, saved, exact=["state.0.exp_avg_sq", "state.0.exp_avg"])


def test_second_moments_of_zero(mount):
    def change(step, state):
        slots(state, "exp_avg_sq")[0][::2] = 0
        slots(state, "exp_avg_sq")[1].zero_()
        slots(state, "exp_avg")[3].zero_()

    assert check(mount, save(mount, change)) > 0


def test_all_zero(mount):
    def change(step, state):
        for tensor in slots(state, "exp_avg") + slots(state, "exp_avg_sq"):
            tensor.zero_()

    check(mount, save(mount, change))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("least", [1.4e-45, 1e-40, 6e-8, 1e-6], ids=str)
def test_denormals(mount, dtype, least):
    def change(step, state):
        for tensor in (slots(state, "exp_avg")[0], slots(state, "exp_avg_sq")[0], state["model"]["ln.weight"]):
            tensor.copy_((tensor != 0) * (torch.arange(tensor.numel()).view_as(tensor) % 9 * least))

    check(mount, save(mount, change, dtype=dtype))


@pytest.mark.parametrize("missing", ["exp_avg", "exp_avg_sq"])
def test_a_moment_without_its_partner(mount, missing):
    def change(step, state):
        for slot in state["optimizer"]["state"].values():
            del slot[missing]

    # `exp_avg` alone is Lion's state, and `exp_avg_sq` alone belongs to no optimizer.
    exact = {"exp_avg": [".exp_avg_sq"], "exp_avg_sq": []}[missing]
    assert check(mount, save(mount, change), exact=exact) > 0


def test_shapes_layers_and_vocabulary_that_change(mount):
    def change(step, state):
        if step == 3:  # a layer that is not there
            del state["model"]["block.up.weight"]
            del state["optimizer"]["state"][3]
        if step >= 4:  # a larger vocabulary
            grow = lambda t: torch.cat([t, t[:16]])
            state["model"]["wte.weight"] = grow(state["model"]["wte.weight"])
            for slot in ("exp_avg", "exp_avg_sq"):
                state["optimizer"]["state"][0][slot] = grow(state["optimizer"]["state"][0][slot])
        if step == 6:  # as many elements in another shape
            state["model"]["block.attn.weight"] = state["model"]["block.attn.weight"].t().contiguous()

    assert check(mount, save(mount, change)) > 0


def test_two_models_in_one_directory(mount):
    others = walk(COUNT, seed=72, shapes={"conv.weight": (64, 3, 7, 7), "wte.weight": (300, 64), "head.weight": (10, 512)}, scale=4)
    saved = {}
    for step, (a, b) in enumerate(zip(walk(COUNT, seed=73), others), 1):
        for name, state in ((f"step_{2 * step:04d}.pt", a), (f"step_{2 * step + 1:04d}.pt", b)):
            torch.save(state, mount / name)
            saved[name] = state
    mount.sync()
    assert check(mount, saved) > 0


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float16, *FP8], ids=str)
def test_weights_of_few_bits_and_state_of_many(mount, weights):
    def change(step, state):
        for name, tensor in list(state["model"].items()):
            state["model"][name] = tensor.to(weights)

    saved = save(mount, change)
    assert check(mount, saved, exact=["model"] if weights in FP8 else []) > 0
    roles = {t["path"]: t["role"] for t in mount.tensors("step_0002.pt")}
    assert roles["model/wte.weight"] == "weight"


@pytest.mark.parametrize("state_type", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_state_of_another_type_than_the_weights(mount, state_type):
    def change(step, state):
        for slot in state["optimizer"]["state"].values():
            for name in ("exp_avg", "exp_avg_sq"):
                slot[name] = slot[name].to(state_type)

    assert check(mount, save(mount, change)) > 0


@pytest.mark.parametrize("copy", [torch.bfloat16, torch.float16], ids=str)
def test_a_copy_beside_its_master(mount, copy):
    def change(step, state):
        state["half"] = {name: tensor.to(copy) for name, tensor in state["model"].items()}

    saved = save(mount, change)
    assert check(mount, saved) > 0
    for name in saved:
        read = torch.load(mount / name, weights_only=True)
        assert all(bits_equal(read["model"][k].to(copy), read["half"][k]) for k in read["half"] if read["half"][k].numel() >= LEAST), name


def test_restoring_goes_on_as_torch_does(mount):
    """torch.optim accepts a restored state, and its next step is finite."""
    torch.manual_seed(5)
    net = torch.nn.Sequential(torch.nn.Linear(96, 128), torch.nn.ReLU(), torch.nn.Linear(128, 96))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)

    def go_on():
        data = torch.randn(64, 96)
        optimizer.zero_grad()
        loss = (net(data) - data).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    losses = []
    for step in range(1, 9):
        losses = [go_on() for _ in range(10)]
        torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, mount / f"step_{step:04d}.pt")
    mount.sync()
    mount.require_released("step_0007.pt")
    state = torch.load(mount / "step_0007.pt", weights_only=True)
    net.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    again = [go_on() for _ in range(10)]
    assert max(again) < 1.5 * max(losses), (losses, again)


def sparse_state(path, seed):
    """One fp32 tensor of 2^31 elements, nearly all of it a hole: its few values move from state to state."""
    elements = 1 << 31
    header = json.dumps({"w": {"dtype": "F32", "shape": [1 << 15, 1 << 16], "data_offsets": [0, 4 * elements]}}).encode()
    header += b" " * (-len(header) % 8)
    begin = 8 + len(header)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(header)) + header)
        for place in range(9):
            # The last of them ends where the tensor does: beyond 2^31 bytes, and beyond 2^32.
            f.seek(begin + place * (4 * elements // 8) - (4000 if place == 8 else 0))
            f.write(struct.pack("<1000f", *(1e-3 * (place + i % 50) + 1e-4 * (seed * i % 7) for i in range(1000))))
    assert os.path.getsize(path) == begin + 4 * elements
    return begin, elements


# Minutes for 17 GB of zeros.
@pytest.mark.nightly
def test_a_tensor_of_two_to_the_31_elements(mount):
    names = [f"step_{seed}.safetensors" for seed in (1, 2)]
    for seed, name in enumerate(names, 1):
        begin, elements = sparse_state(mount / name, seed)
    mount.sync(timeout=300)
    mount.require_released(names[0])
    assert du(mount.store) < 64 << 20, "holes take room"
    peak = int(re.search(r"VmHWM:\s+(\d+) kB", open(f"/proc/{mount.pid}/status").read())[1])
    assert peak < 3 << 20, f"{peak} kB of memory"
    bound = mount.entry(names[0])["max_abs_error"]
    with open(mount / names[0], "rb") as f:
        for place in range(9):
            f.seek(begin + place * (4 * elements // 8) - (4000 if place == 8 else 0))
            was = [1e-3 * (place + i % 50) + 1e-4 * (i % 7) for i in range(1000)]
            now = struct.unpack("<1000f", f.read(4000))
            assert max(abs(a - b) for a, b in zip(was, now)) <= bound + 1e-8, place
        # Holes stay holes.
        for at in (5000, elements * 2 + 12345, elements * 4 - 9000):
            f.seek(begin + at // 4 * 4)
            assert f.read(4000) == bytes(4000)
        assert f.seek(0, os.SEEK_END) == begin + 4 * elements
    shown = [t for t in mount.tensors(names[0]) if t["path"] == "w"]
    assert shown[0]["role"] == "weight" and shown[0]["shape"] == [1 << 15, 1 << 16]
