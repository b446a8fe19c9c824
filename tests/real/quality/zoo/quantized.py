"""Scales, zero points and calibration statistics of quantized networks."""

import torch
from safetensors.torch import save_file
from torch import nn
from torch.ao import quantization

from .keeper import animal, fit, load, require_choices, require_finite, require_near, require_no_zero, require_same, require_same_choice

DIM = 256


def body():
    return nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, DIM))


def inputs(count=128, seed=None):
    """Some channels are a thousand times as loud as others."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return torch.randn(count, DIM, generator=generator) * torch.logspace(-3, 1, DIM)


class Fitted:
    """A network in training; each animal quantizes its weights in another way."""

    rate = 3e-4

    def __init__(self):
        self.net = body()
        with torch.no_grad():
            self.net[0].weight *= torch.logspace(-4, 0, DIM)[:, None]
        self.optimizer = torch.optim.Adam(self.net.parameters(), self.rate)

    def train(self):
        x = inputs()
        fit(self.optimizer, lambda: (self.net(x) - x.roll(1, 1)).square().mean(), 5)


@animal("qat_{}.pt", lossy=["*.weight"])
class FakeQuantize(Fitted):
    """torch.ao: quantization-aware training, with scales, zero points, `min_val` and `max_val`; model-only."""

    def __init__(self):
        super().__init__()
        per_channel = quantization.FakeQuantize.with_args(observer=quantization.MovingAveragePerChannelMinMaxObserver, dtype=torch.qint8,
                                                          quant_min=-128, quant_max=127, qscheme=torch.per_channel_symmetric)
        self.net.qconfig = quantization.QConfig(activation=quantization.default_fake_quant, weight=per_channel)
        self.net = quantization.prepare_qat(self.net.train())
        self.optimizer = torch.optim.Adam(self.net.parameters(), 3e-4)

    def make(self, path, step):
        self.train()
        torch.save(self.net.state_dict(), path)

    def use(self, was, now):
        before, after = load(was), load(now)
        scales = [name for name in before if name.endswith(".scale")]
        assert scales
        for name in scales:
            require_no_zero(before[name], after[name], f"scales of {name}")
            require_same(before[name], after[name], f"scales of {name}")
        for name in (n for n in before if n.endswith(("min_val", "max_val"))):
            require_same(before[name], after[name], f"limits of {name}")
        # The integers that a deployment would hold.
        codes = [(s["0.weight"] / s["0.weight_fake_quant.scale"][:, None]).round().clamp(-128, 127) for s in (before, after)]
        assert (codes[0] - codes[1]).abs().max() <= 1, "an integer weight moved by more than one step"


@animal("calibration_{}.pt")
class HistogramObserver(Fitted):
    """torch.ao: histograms and per-channel limits of activations, between batches of a calibration."""

    def __init__(self):
        super().__init__()
        self.observers = nn.ModuleDict({"histogram": quantization.HistogramObserver(bins=2048),
                                        "channels": quantization.PerChannelMinMaxObserver(ch_axis=1)})
        self.seen = torch.zeros(0, DIM)

    def make(self, path, step):
        x = inputs(64) * (1 + step / 100)
        self.seen = torch.cat([self.seen, x])
        for observer in self.observers.values():
            observer(x)
        torch.save({"observers": self.observers.state_dict(), "abs_mean": self.seen.abs().mean(0), "seen": self.seen[-64:].clone()}, path)

    def use(self, was, now):
        before, after = load(was), load(now)
        for name, tensor in before["observers"].items():
            require_same(tensor, after["observers"][name], f"entries of {name}")
        require_no_zero(before["abs_mean"], after["abs_mean"], "mean magnitudes")
        require_finite(after["abs_mean"].rsqrt(), "smoothing factors")


@animal("int8_{}.pt", stays=True)
class PerChannelScales(Fitted):
    """Integers with a scale per row and factors of smoothing per column; model-only."""

    def make(self, path, step):
        self.train()
        weight = self.net[0].weight.detach()
        scale = weight.abs().amax(1) / 127
        codes = (weight / scale[:, None]).round().to(torch.int8)
        torch.save({"layer.qweight": codes, "layer.row_scaling": scale, "layer.smooth": weight.abs().amax(0)}, path)

    def use(self, was, now):
        before, after = load(was), load(now)
        require_no_zero(before["layer.row_scaling"], after["layer.row_scaling"], "scales")
        weights = [s["layer.qweight"] * s["layer.row_scaling"][:, None] for s in (before, after)]
        require_same(*weights, "dequantized weights")
        require_finite(1 / after["layer.smooth"], "smoothing factors")


@animal("model-{}.safetensors")
class Float8Scales(Fitted):
    """fp8 weights with `weight_scale_inv` per block of 16 by 16, as DeepSeek publishes them; model-only."""

    def make(self, path, step):
        self.train()
        state = {}
        for name in ("0", "2"):
            blocks = self.net[int(name)].weight.detach().view(DIM // 16, 16, DIM // 16, 16)
            scale = blocks.abs().amax((1, 3), keepdim=True) / 448
            state[f"layers.{name}.weight"] = (blocks / scale).reshape(DIM, DIM).to(torch.float8_e4m3fn)
            state[f"layers.{name}.weight_scale_inv"] = scale[:, 0, :, 0].contiguous()
            state[f"layers.{name}.input_scale"] = inputs().abs().amax(0) / 448
        save_file(state, path)

    def use(self, was, now):
        before, after = load(was), load(now)
        for name in ("layers.0", "layers.2"):
            for part in ("weight_scale_inv", "input_scale"):
                require_no_zero(before[f"{name}.{part}"], after[f"{name}.{part}"], f"scales of {name}.{part}")
                require_same(before[f"{name}.{part}"], after[f"{name}.{part}"], f"scales of {name}.{part}")
            require_same(before[f"{name}.weight"].float(), after[f"{name}.weight"].float(), "fp8 weights")


@animal("nf4_{}.pt", lossy=["adapter.*"])
class BlockAbsmax(Fitted):
    """QLoRA by hand: 4-bit codes with one `absmax` per block of 64, a codebook and adapters; model-only."""

    def __init__(self):
        super().__init__()
        self.low = nn.ParameterDict({"lora_A": torch.randn(16, DIM) / 16, "lora_B": torch.zeros(DIM, 16)})
        self.tune = torch.optim.Adam(self.low.parameters(), 1e-3)
        self.book = torch.erfinv(torch.linspace(-0.95, 0.95, 16)) / torch.erfinv(torch.tensor(0.95))

    def make(self, path, step):
        self.train()
        x = inputs()
        delta = lambda: x @ self.low["lora_A"].T @ self.low["lora_B"].T
        fit(self.tune, lambda: (delta() - x.roll(1, 1)).square().mean())
        blocks = self.net[0].weight.detach().view(-1, 64)
        most = blocks.abs().amax(1)
        codes = (blocks[..., None] / most[:, None, None] - self.book).abs().argmin(2).to(torch.uint8)
        torch.save({"base.weight": codes, "base.block_max": most, "base.code": self.book,
                    **{f"adapter.{k}.weight": v.detach() for k, v in self.low.items()}}, path)

    def use(self, was, now):
        before, after = load(was), load(now)
        require_no_zero(before["base.block_max"], after["base.block_max"], "block scales")
        weights = [s["base.code"][s["base.weight"].long()] * s["base.block_max"][:, None] for s in (before, after)]
        require_same(*weights, "dequantized weights")
        x = inputs(64, seed=1)
        outs = [x @ w.view(DIM, DIM).T + x @ s["adapter.lora_A.weight"].T @ s["adapter.lora_B.weight"].T for w, s in zip(weights, (before, after))]
        require_choices(*outs, "largest outputs")


@animal("dynamic_{}.pt", stays=True)
class QuantizedTensors(Fitted):
    """torch's own quantized tensors with a scale per row, as `torch.ao` converts a layer; model-only."""

    def make(self, path, step):
        self.train()
        zero = torch.zeros(DIM, dtype=torch.long)
        weights = {f"{i}._packed": self.net[i].weight.detach() for i in (0, 2)}
        torch.save({name: torch.quantize_per_channel(w, w.abs().amax(1).double() / 127, zero, 0, torch.qint8)
                    for name, w in weights.items()}, path)

    def use(self, was, now):
        for name, exact in load(was).items():
            require_same(exact.dequantize(), load(now)[name].dequantize(), f"dequantized weights of {name}")


class StepSize(nn.Module):
    """A linear layer with a learned step per output (LSQ)."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM) / 16 * torch.logspace(-3, 0, DIM)[:, None])
        self.step = nn.Parameter(self.weight.detach().abs().amax(1) / 7)

    def codes(self):
        ratio = self.weight / self.step[:, None]
        return ratio + (ratio.round().clamp(-8, 7) - ratio).detach()

    def forward(self, x):
        return x @ (self.codes() * self.step[:, None]).T


@animal("lsq_{}.pt", lossy=["model.weight", "model.step", "optimizer.state.*"])
class LearnedStepSize:
    """LSQ: steps of 4-bit weights, one per row, from 1e-5 to .03, learned with Adam, which is in the file."""

    def __init__(self):
        self.net = StepSize()
        self.optimizer = torch.optim.Adam([{"params": [self.net.weight], "lr": 1e-4}, {"params": [self.net.step], "lr": 2e-6}])

    def make(self, path, step):
        for _ in range(10):
            x = torch.randn(128, DIM)
            fit(self.optimizer, lambda: (self.net(x) - x.roll(1, 1)).square().mean(), 1)
        torch.save({"model": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}, path)

    def use(self, was, now):
        before, after = (load(path)["model"] for path in (was, now))
        require_no_zero(before["step"], after["step"], "steps")
        off = (after["step"] / before["step"]).log2().abs().max().item()
        assert off < 0.5, f"a step is off by a factor of {2**off:.3g}"
        outs, x = [], torch.randn(200, DIM, generator=torch.Generator().manual_seed(1))
        for state in (before, after):
            self.net.load_state_dict(state)
            outs.append(self.net(x).detach())
        require_near(*outs, "outputs")


@animal("awq_{}.safetensors")
class GroupScales(Fitted):
    """GPTQ's and AWQ's layout: packed integers, `scales` in fp16 per group, and scales of a key-value cache; model-only."""

    def make(self, path, step):
        self.train()
        groups = torch.cat([self.net[0].weight, self.net[2].weight]).detach().view(2 * DIM, DIM // 32, 32)
        low, high = groups.amin(2), groups.amax(2)
        scale = ((high - low) / 15).clamp_min(1e-7)
        codes = ((groups - low[..., None]) / scale[..., None]).round().to(torch.int32)
        packed = (codes.view(2 * DIM, -1, 8) << (4 * torch.arange(8))).sum(2).to(torch.int32)
        save_file({"q_proj.qweight": packed, "q_proj.scales": scale.half(), "q_proj.group_min": low.contiguous(),
                   "attn.k_scale": inputs().abs().amax(0) / 127, "attn.v_scale": torch.tensor(0.01 + step / 1e4),
                   "smooth.weight": inputs(512).abs().mean(0)}, path)

    def use(self, was, now):
        before, after = load(was), load(now)
        for name in ("q_proj.scales", "attn.k_scale", "smooth.weight"):
            require_no_zero(before[name], after[name], f"scales of {name}")
        for name in before:
            require_same(before[name], after[name], f"entries of {name}")
        smooth = [(inputs(64, seed=1) / s["smooth.weight"]).argmax(1) for s in (before, after)]
        require_same_choice(*smooth, "largest channels")
