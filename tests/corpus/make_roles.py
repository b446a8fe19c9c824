#!/usr/bin/env python3
"""Writes roles/NAME and roles/expected.json: small checkpoints of every optimizer and framework, and the role of each tensor:
{file: {path: [role, parameter's path or null, other moment's path or null]}}. The expected roles come from the writers of the
state, not from stepfs. Needs torch and safetensors.
"""

import json
import os
import sys
from pathlib import Path

import safetensors.torch
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "real"))
from optimizers import OPTIMIZERS, expect_model, expect_state, model, stepped  # noqa: E402

HERE = Path(__file__).parent / "roles"
expected = {}


def write(name, value, want):
    torch.save(value, HERE / name)
    expected[name] = want


def paired(at, first="exp_avg", second="exp_avg_sq", of=None):
    """Expectations for Adam's state at a path."""
    return {f"{at}/{first}": ["first_moment", of, f"{at}/{second}"], f"{at}/{second}": ["second_moment", of, f"{at}/{first}"],
            f"{at}/step": ["optimizer", None, None]}


def moments(shape=(4, 6)):
    return {"step": torch.tensor(2.0), "exp_avg": torch.randn(shape), "exp_avg_sq": torch.rand(shape)}


def plain():
    for name, make in OPTIMIZERS.items():
        net = model()
        optimizer = stepped(net, make(net.parameters()))
        state = optimizer.state_dict()
        want = expect_model(net, "model") | expect_state(name, net, state, "optimizer", "model")
        write(f"{name}.pt", {"model": net.state_dict(), "optimizer": state}, want)
    net = model()
    state = stepped(net, torch.optim.AdamW(net.parameters())).state_dict()
    # As the Trainer of transformers (optimizer.pt) and Accelerate (optimizer.bin) write it: no weights beside it.
    write("optimizer.bin", state, expect_state("adamw", net, state, "", None))
    named = {"state": {n: moments(p.shape) for n, p in net.named_parameters()},
             "param_groups": [{"lr": 0.1, "params": [n for n, _ in net.named_parameters()]}]}
    want = expect_model(net, "model")
    for n, _ in net.named_parameters():
        want |= paired(f"optim/state/{n}", of=f"model/{n}")
    write("by_name.pt", {"model": net.state_dict(), "optim": named}, want)


def groups():
    net = model()
    decay = [p for p in net.parameters() if p.dim() > 1]
    rest = [p for p in net.parameters() if p.dim() < 2]
    state = stepped(net, torch.optim.AdamW([{"params": decay}, {"params": rest, "weight_decay": 0.0}])).state_dict()
    names = [n for n, p in net.named_parameters() if p.dim() > 1] + [n for n, p in net.named_parameters() if p.dim() < 2]
    want = expect_model(net, "model") | expect_state("adamw", net, state, "optimizer", "model", names)
    write("two_groups.pt", {"model": net.state_dict(), "optimizer": state}, want)

    # Four layers alike, two in each group: the file does not tell them apart.
    net = torch.nn.Sequential(*[torch.nn.Linear(4, 4, bias=False) for _ in range(4)], torch.nn.Linear(4, 2, bias=False))
    parts = [[net[0].weight, net[2].weight], [net[1].weight, net[3].weight, net[4].weight]]
    optimizer = torch.optim.AdamW([{"params": part} for part in parts])
    net(torch.randn(3, 4)).square().mean().backward()
    optimizer.step()
    state = optimizer.state_dict()
    want = expect_model(net, "model") | expect_state("adamw", net, state, "optimizer", "model", [None] * 4 + ["4.weight"])
    write("alike.pt", {"model": net.state_dict(), "optimizer": state}, want)

    # A frozen layer of the same shape as a trained one.
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 3))
    for p in net[0].parameters():
        p.requires_grad = False
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad])
    net(torch.randn(3, 4)).square().mean().backward()
    optimizer.step()
    state = optimizer.state_dict()
    want = expect_model(net, "model") | expect_state("adamw", net, state, "optimizer", "model", [None, None, "2.weight", "2.bias"])
    write("frozen.pt", {"model": net.state_dict(), "optimizer": state}, want)


def frameworks():
    net = model()
    state = stepped(net, torch.optim.AdamW(net.parameters())).state_dict()
    average = {n: p + 0.01 for n, p in net.state_dict().items()}
    lightning = {"state_dict": net.state_dict(), "optimizer_states": [state], "lr_schedulers": [{"last_epoch": 1}],
                 "callbacks": {"EMACallback": {"ema_state_dict": average, "decay": 0.999}}, "loops": {}}
    want = expect_model(net, "state_dict") | expect_state("adamw", net, state, "optimizer_states/0", "state_dict")
    parameters = dict(net.named_parameters())
    at = "callbacks/EMACallback/ema_state_dict"
    want |= {f"{at}/{n}": ["ema", f"state_dict/{n}", None] if n in parameters else ["other", None, None] for n in average}
    write("lightning.ckpt", lightning, want)

    swa = torch.optim.swa_utils.AveragedModel(net).state_dict()
    want = expect_model(net, "model")
    want |= {f"swa_model/{n}": ["ema", f"model/{n[7:]}", None] if n[7:] in parameters else ["other", None, None] for n in swa}
    write("swa.pt", {"model": net.state_dict(), "swa_model": swa}, want)

    # DeepSpeed: flat partitions, one parameter of the wrapped optimizer for each group.
    flat = [torch.randn(48), torch.randn(20)]
    base = {"state": {i: moments(t.shape) for i, t in enumerate(flat)},
            "param_groups": [{"lr": 0.1, "params": [i]} for i in range(2)]}
    common = {"loss_scaler": None, "overflow": False, "zero_stage": 2, "partition_count": [2, 2], "ds_version": "0.19.8"}
    for name, masters in (("zero2.pt", "single_partition_of_fp32_groups"), ("zero3.pt", "fp32_flat_groups")):
        inner = "base_optimizer_state" if name == "zero2.pt" else "optimizer_state_dict"
        want = {f"optimizer_state_dict/{masters}/{i}": ["master", None, None] for i in range(2)}
        for i in range(2):
            want |= paired(f"optimizer_state_dict/{inner}/state/{i}", of=f"optimizer_state_dict/{masters}/{i}")
        write(name, {"optimizer_state_dict": {**common, inner: base, masters: flat}}, want)
    elastic = {**common, "base_optimizer_state": [moments(t.shape) for t in flat], "single_partition_of_fp32_groups": flat}
    want = {f"optimizer_state_dict/single_partition_of_fp32_groups/{i}": ["master", None, None] for i in range(2)}
    for i in range(2):
        want |= paired(f"optimizer_state_dict/base_optimizer_state/{i}", of=f"optimizer_state_dict/single_partition_of_fp32_groups/{i}")
    write("zero_elastic.pt", {"optimizer_state_dict": elastic}, want)

    hand = {"params": {"a": torch.randn(4, 6), "b": torch.randn(4)}}
    hand |= {k: {"a": torch.rand(4, 6), "b": torch.rand(4)} for k in "mv"}
    want = {"params/a": ["weight", None, None], "params/b": ["weight", None, None]}
    for n in "ab":
        want |= {f"m/{n}": ["first_moment", f"params/{n}", f"v/{n}"], f"v/{n}": ["second_moment", f"params/{n}", f"m/{n}"]}
    write("by_hand.pt", hand, want)

    names = {"fc.weight": torch.randn(4, 6), "fc.bias": torch.randn(4)}
    tensors, want = dict(names), {n: ["weight", None, None] for n in names}
    for n, t in names.items():
        tensors |= {f"state.{n}.exp_avg": torch.randn(t.shape), f"state.{n}.exp_avg_sq": torch.rand(t.shape)}
        want |= {f"state.{n}.exp_avg": ["first_moment", n, f"state.{n}.exp_avg_sq"],
                 f"state.{n}.exp_avg_sq": ["second_moment", n, f"state.{n}.exp_avg"]}
    safetensors.torch.save_file(tensors, HERE / "flat.safetensors")
    os.chmod(HERE / "flat.safetensors", 0o644)
    expected["flat.safetensors"] = want


def hostile():
    """State with a false name, or of an unknown optimizer: never a kind, never a weight."""
    groups = [{"params": [0, 1, 2]}]
    slot = lambda **more: {0: {"step": torch.tensor(1.0), **more}}
    m, v = torch.randn(4, 6), torch.rand(4, 6)
    other, state = ["other", None, None], ["optimizer", None, None]
    cases = {
        "alone": (slot(exp_avg=m.int()), groups, {"exp_avg": other}),
        "beside": (slot(exp_avg=m, fast=v), groups, {"exp_avg": other, "fast": state}),
        "list": ({0: {"step": torch.tensor(1.0), "exp_avg": m, "exp_avg_sq": v, "factors": [torch.rand(6)]}}, groups,
                 {"exp_avg": other, "exp_avg_sq": other, "factors/0": state}),
        "number": ({0: {"step": 1, "exp_avg": m, "exp_avg_sq": v, "exp_avg_lr_1": 0.1}}, groups,
                   {"exp_avg": other, "exp_avg_sq": other}),
        "nested": ({0: {"step": torch.tensor(1.0), "exp_avg": {"scale": v}, "exp_avg_sq": {"scale": v + 1}}}, groups,
                   {"exp_avg/scale": state, "exp_avg_sq/scale": state}),
        "iterate": (slot(z=m, exp_avg_sq=v, s=v + 1), groups, {"z": state, "exp_avg_sq": other, "s": state}),
        "rprop": (slot(prev=m, step_size=v, exp_avg=m + 1), groups, {"prev": state, "step_size": state, "exp_avg": other}),
        "other_alone": (slot(exp_avg_sq=v), groups, {"exp_avg_sq": other}),
        "shapes": (slot(exp_avg=m, exp_avg_sq=torch.rand(6, 4)), groups, {"exp_avg": other, "exp_avg_sq": other}),
        "types": (slot(exp_avg=m, exp_avg_sq=v.double()), groups, {"exp_avg": other, "exp_avg_sq": other}),
        "integers": (slot(exp_avg=m.int(), exp_avg_sq=v.int()), groups, {"exp_avg": other, "exp_avg_sq": other}),
        "adan": (slot(exp_avg=m, exp_avg_sq=v, exp_avg_diff=m + 1), groups, {"exp_avg": other, "exp_avg_sq": other, "exp_avg_diff": state}),
        "shared": (slot(exp_avg=m, exp_avg_sq=m), groups, {"exp_avg": other}),
        "momentum": (slot(momentum_buffer=m, fast=v), groups, {"momentum_buffer": other, "fast": state}),
        "no_groups": (slot(sum=v), 3, {"sum": other}),
        "beyond": ({7: {"step": torch.tensor(1.0), "sum": v}}, groups, {"sum": other}),
    }
    for name, (states, param_groups, want) in cases.items():
        key = next(iter(states))
        step = {"step": state} if isinstance(states[key].get("step"), torch.Tensor) else {}
        want = {f"state/{key}/{slot}": role for slot, role in {**step, **want}.items()}
        write(f"bad_{name}.pt", {"state": states, "param_groups": param_groups}, want)
    write("bad_names.pt", {"model": {"a": m, "b": torch.randn(4)}, "exp_avg": {"a": v}, "momentum_buffer": {"z": m + 1}},
          {"model/a": ["weight", None, None], "model/b": ["weight", None, None], "exp_avg/a": other, "momentum_buffer/z": other})
    named = {"state": {"a": moments((6, 4))}, "param_groups": [{"params": ["a"]}]}
    write("bad_parameter.pt", {"model": {"a": m}, "optimizer": named},
          {"model/a": ["weight", None, None], "optimizer/state/a/step": state, "optimizer/state/a/exp_avg": other, "optimizer/state/a/exp_avg_sq": other})
    write("bad_copies.pt", {"single_partition_of_fp32_groups": [m, v]},
          {f"single_partition_of_fp32_groups/{i}": other for i in range(2)})


if __name__ == "__main__":
    torch.manual_seed(7)
    HERE.mkdir(exist_ok=True)
    for old in HERE.iterdir():
        old.unlink()
    plain()
    groups()
    frameworks()
    hostile()
    lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(expected.items())]
    (HERE / "expected.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
