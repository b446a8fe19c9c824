"""Small models that train, so that updates look real, and the states that programs save of them."""

import gpt
import torch
import torch.nn.functional as F
from torch import nn

# Parameters: 0.13, 0.5 and 1.0 million; with Adam's moments in fp32 files of 1.5, 6 and 12 MB.
SIZES = {"small": gpt.Config(context=64, layers=2, width=64, batch=4), "medium": gpt.Config(context=64, layers=4, width=96, batch=4),
         "large": gpt.Config(context=64, batch=4)}  # fmt: skip


class Gpt:
    """The GPT of the demo, on the standard library's sources, with AdamW."""

    def __init__(self, seed, size, dtype):
        self.run = gpt.Run(SIZES[size], seed, dtype)
        self.model, self.optimizer = self.run.model, self.run.optimizer
        self.step = self.run.step


class Digits:
    """A perceptron that learns to tell noisy prototypes apart, with SGD and momentum."""

    def __init__(self, seed, size, dtype):
        torch.manual_seed(seed)
        width = {"small": 128, "medium": 384, "large": 768}[size]
        self.model = nn.Sequential(nn.Linear(256, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 16)).to(dtype)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9)
        self.prototypes = torch.randn(16, 256, dtype=dtype)

    def step(self):
        labels = torch.randint(16, (64,))
        images = self.prototypes[labels] + torch.randn(64, 256, dtype=self.prototypes.dtype)
        self.optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(self.model(images), labels).backward()
        self.optimizer.step()


MODELS = {"gpt": Gpt, "digits": Digits}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Training:
    """A run that trains a few iterations between two checkpoints."""

    def __init__(self, model, size, dtype, seed):
        self.training, self.iterations = MODELS[model](seed, size, DTYPES[dtype]), 0

    def go_on(self, iterations):
        for _ in range(iterations):
            self.training.step()
        self.iterations += iterations

    def model(self):
        # Two names of one tensor (tied weights) are one tensor in a safetensors file.
        state = self.training.model.state_dict()
        seen = set()
        return {name: t for name, t in state.items() if t.data_ptr() not in seen and not seen.add(t.data_ptr())}

    def optimizer(self):
        return self.training.optimizer.state_dict()

    def whole(self):
        return {"model": self.training.model.state_dict(), "optimizer": self.optimizer(), "rng": torch.get_rng_state(), "step": self.iterations}
