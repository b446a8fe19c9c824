"""Roles and pairs that `stepfs inspect` finds in files that torch, safetensors and Accelerate have just written."""

import pytest
import safetensors.torch
import torch
from harness import run, run_json
from torch_optimizers import OPTIMIZERS, expect_model, expect_state, model, stepped

pytestmark = pytest.mark.stepfs


def told(path):
    """{tensor path: [role, parameter's path, other moment's path]} by `inspect`."""
    tensors = run_json("inspect", "--json", path)["tensors"]
    assert all(t["why"] for t in tensors)
    return {t["path"]: [t["role"], t["of"], t["partner"]] for t in tensors}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_of_torch(plain, name):
    net = model()
    state = stepped(net, OPTIMIZERS[name](net.parameters())).state_dict()
    torch.save({"model": net.state_dict(), "optimizer": state}, plain / "both.pt")
    assert told(plain / "both.pt") == expect_model(net, "model") | expect_state(name, net, state, "optimizer", "model")
    torch.save(state, plain / "alone.pt")
    assert told(plain / "alone.pt") == expect_state(name, net, state, "", None)


def test_the_names_in_torch_optim_are_all_known():
    """A new torch may bring a new optimizer, and somebody must look at it."""
    classes = {n for n, c in vars(torch.optim).items() if isinstance(c, type) and issubclass(c, torch.optim.Optimizer)}
    assert classes - {"Optimizer", "SparseAdam"} == {type(make(list(model().parameters()))).__name__ for make in OPTIMIZERS.values()}


def test_safetensors_beside_the_optimizer(plain):
    net = model()
    state = stepped(net, torch.optim.AdamW(net.parameters())).state_dict()
    safetensors.torch.save_file(net.state_dict(), plain / "model.safetensors")
    torch.save(state, plain / "optimizer.pt")
    parameters = dict(net.named_parameters())
    assert told(plain / "model.safetensors") == {n: ["weight" if n in parameters else "other", None, None] for n in net.state_dict()}
    assert told(plain / "optimizer.pt") == expect_state("adamw", net, state, "", None)


def test_accelerate(plain):
    accelerate = pytest.importorskip("accelerate")
    net = model()
    accelerator = accelerate.Accelerator(cpu=True)
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
    stepped(net, optimizer.optimizer)
    accelerator.save_state(plain / "state")
    state = torch.load(plain / "state" / "optimizer.bin")
    assert told(plain / "state" / "optimizer.bin") == expect_state("adamw", net, state, "", None)


def test_people_are_told_why(plain):
    net = model()
    state = stepped(net, torch.optim.AdamW(net.parameters())).state_dict()
    torch.save({"model": net.state_dict(), "optimizer": state}, plain / "both.pt")
    lines = [line for line in run("inspect", plain / "both.pt").stdout.splitlines() if "optimizer/state/0/exp_avg " in line]
    assert len(lines) == 1 and "first moment" in lines[0] and "beside exp_avg_sq" in lines[0] and "of model/0.weight" in lines[0]
