"""Tensors that torch does not write one by one: the weights of an LSTM in one storage, and the ranks' parts of distributed tensors."""

import pytest
import torch
from harness import run_json
from torch import nn

pytestmark = pytest.mark.stepfs


def tensors(path):
    return {t["path"]: t for t in run_json("inspect", "--json", path)["tensors"]}


def trained(net, data):
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        net(data).square().mean().backward()
        optimizer.step()
    return optimizer


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.recurrent, self.out = nn.Embedding(32, 8), nn.LSTM(8, 6, 2), nn.Linear(6, 32)

    def forward(self, tokens):
        return self.out(self.recurrent(self.embedding(tokens))[0])


def flatten(module, extra=0):
    """Makes all parameters of a module views of one storage, as cuDNN wants them; with unused elements behind them."""
    flat = torch.cat([p.detach().flatten() for p in module.parameters()] + [torch.zeros(extra)])
    at = 0
    for p in module.parameters():
        p.data = flat[at : at + p.numel()].view_as(p)
        at += p.numel()


@pytest.mark.parametrize("extra", [0, 3])
def test_weights_in_one_storage_unprove_no_other(plain, extra):
    torch.manual_seed(1)
    net = Recurrent()
    flatten(net.recurrent, extra)
    optimizer = trained(net, torch.randint(0, 32, (5, 4)))
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, plain / "flat.pt")
    told = tensors(plain / "flat.pt")
    for name in ("embedding.weight", "out.weight", "out.bias"):
        assert told[f"model/{name}"]["trained"], told[f"model/{name}"]
    recurrent = told["model/recurrent.weight_ih_l0"]
    # Nothing says what the unused elements are.
    assert (recurrent["role"], bool(recurrent["trained"])) == ("weight", extra == 0), recurrent
    assert told["optimizer/state/0/exp_avg"]["of"] == "model/embedding.weight"
    moments = [t["role"] for path, t in told.items() if path.startswith("optimizer/") and "exp_avg" in path]
    assert sorted(moments) == ["first_moment"] * 11 + ["second_moment"] * 11


@pytest.fixture
def mesh():
    """A mesh of this process alone."""
    import torch.distributed as dist
    from torch.distributed.tensor import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_distributed_tensors_are_told_as_plain_ones(plain, mesh):
    """verl, and scripts with FSDP2 that call torch.save on each rank."""
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 3))
    state = trained(net, torch.randn(8, 6)).state_dict()

    def distributed(values):
        return {k: distribute_tensor(v.detach(), mesh, [Shard(0)]) if v.ndim else v for k, v in values.items()}

    names = [name for name, _ in net.named_parameters()]
    by_name = {"state": dict(zip(names, state["state"].values(), strict=True)), "param_groups": [dict(state["param_groups"][0], params=names)]}
    parts = {"state": {name: distributed(slots) for name, slots in by_name["state"].items()}, "param_groups": by_name["param_groups"]}
    torch.save({"model": net.state_dict(), "optimizer": by_name}, plain / "plain.pt")
    torch.save({"model": distributed(net.state_dict()), "optimizer": parts}, plain / "parts.pt")
    facts = ("dtype", "shape", "role", "of", "partner", "trained", "why")
    expected, told = ({path: [t[f] for f in facts] for path, t in tensors(plain / name).items()} for name in ("plain.pt", "parts.pt"))
    assert told == expected
    assert all(told[f"model/{name}"][5] for name in names)
