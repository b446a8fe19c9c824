"""The registry of the animals, their mount, and helpers of their tests."""

import fnmatch
import gc
import io
import re
import shutil
import zipfile
import zlib

import numpy as np
import safetensors.torch
import torch
from bounds import stated
from series import bits_equal, tensors_of

ANIMALS = {}
# Five states: a keyframe, three differences to it, and the newest, which stays exact.
STEPS = range(10, 60, 10)


def animal(pattern, lossy=(), small=None, stays=False):
    """Registers a class under its name in lower case.

    `pattern`: name of the file of a step; with `/`, of a checkpoint's main file. `lossy`: patterns of the tensors that may
    change (all others must not). `small`: the largest stored share of a difference. `stays`: some of its files are never
    released, because they would not become smaller.
    """

    def register(kind):
        kind.name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kind.__name__).lower()
        kind.pattern, kind.lossy, kind.small, kind.stays = pattern, tuple(lossy), small, stays
        assert kind.name not in ANIMALS, f"two animals are called {kind.name}"
        ANIMALS[kind.name] = kind
        return kind

    return register


class Zoo:
    """All animals that a run of the tests needs, in one mount; each file also in a plain directory."""

    def __init__(self, mount, plain, names):
        self.mount, self.plain, self.animals = mount, plain, {}
        # Earlier answers; nothing changes after the release.
        self.differences, self.inspected = {}, {}
        # Nets as small as these gain nothing from a second thread, and on a busy machine they wait for it.
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        for name in names:
            self.settle(name)
        mount.sync()
        self.rows = {row["path"].removeprefix(str(mount.dir)).strip("/"): row for row in mount.ls()}
        torch.set_num_threads(threads)

    def settle(self, name):
        """Writes all states of one animal into the mount, and copies each while it is the newest, hence exact."""
        torch.manual_seed(zlib.crc32(name.encode()))
        self.animals[name] = member = ANIMALS[name]()
        for step in STEPS:
            path = self.mount.dir / name / member.pattern.format(step)
            path.parent.mkdir(parents=True, exist_ok=True)
            member.make(path, step)
            for file in (self.mount.dir / name).rglob("*"):
                copy = self.plain / file.relative_to(self.mount.dir)
                if file.is_file() and not copy.exists():
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(file, copy)

    def forget(self):
        """Lets go of all tensors that were read."""
        self.animals, self.differences, self.inspected = {}, {}, {}
        gc.collect()

    def older(self, name):
        """(as written, as it reads now) of each main file but the newest."""
        names = [f"{name}/{ANIMALS[name].pattern.format(step)}" for step in STEPS[:-1]]
        return [(self.plain / file, self.mount.dir / file) for file in names]

    def older_files(self, name):
        """The same of all files of the older states."""
        newest = ANIMALS[name].pattern.format(STEPS[-1]).split("/")[0]
        files = sorted(file for file in (self.plain / name).rglob("*") if file.is_file())
        files = [file for file in files if file.relative_to(self.plain / name).parts[0] != newest]
        return [(file, self.mount.dir / file.relative_to(self.plain)) for file in files]

    def use(self, name):
        """Uses every older state."""
        for was, now in self.older(name):
            self.animals[name].use(was, now)

    def changed(self, name):
        """(file, tensor path, as written, as read) of every tensor that differs from the written one."""
        if name not in self.differences:
            self.differences[name] = [row for was, now in self.older_files(name) for row in self.compare(was, now)]
        return self.differences[name]

    def compare(self, was, now):
        """The rows of `changed` for one file."""
        if was.read_bytes() == now.read_bytes():
            return []
        before, after = tensors_in(was), tensors_in(now)
        assert before is not None, f"{was.name} is no file of tensors, and its bytes changed"
        assert before.keys() == after.keys()
        file = str(was.relative_to(self.plain))
        return [(file, path, t, after[path]) for path, t in before.items() if not bits_equal(t, after[path])]

    def said(self, file):
        """The answer of `inspect` for each tensor of a file, by its path."""
        if file not in self.inspected:
            self.inspected[file] = stated(self.mount, file)
        return self.inspected[file]

    def may_change(self, name, path):
        """Whether the tensor is a trained parameter or an optimizer's state, and proven to be one."""
        return any(fnmatch.fnmatchcase(path, pattern) for pattern in ANIMALS[name].lossy)


def load(path):
    """The content of a file: a state of torch's, the tensors of a safetensors file, or arrays of numpy as tensors."""
    if path.suffix == ".safetensors":
        return safetensors.torch.load_file(path)
    if path.suffix == ".npy":
        return {"array": torch.from_numpy(np.load(path))}
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    if zipfile.is_zipfile(path) and "policy.pth" in (members := zipfile.ZipFile(path)).namelist():
        # An agent of stable-baselines3: torch files in a zip.
        inner = [name for name in members.namelist() if name.endswith(".pth")]
        return {name: torch.load(io.BytesIO(members.read(name)), weights_only=False) for name in inner}
    return torch.load(path, weights_only=False)


def tensors_in(path):
    """{path: tensor} of a file, or None if it has no tensors."""
    try:
        return {name: t.int_repr() if t.is_quantized else t for name, t in tensors_of(load(path)).items()}
    except (RuntimeError, OSError, ValueError):
        return None


def fit(optimizer, loss, steps=20):
    """Some iterations of training; returns the last loss."""
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
    return value.item()


def breach(was, now, most=2.0):
    """The breach of the floor under a lossy tensor, in words; None if there is none.

    In a tensor of one sign no entry becomes 0, changes its sign, or is off by more than a factor of `most`.
    """
    was, now = was.double(), now.double()
    if not torch.isfinite(now).all():
        return f"{(~torch.isfinite(now)).sum().item()} entries are not finite"
    if (was < 0).any() and (was > 0).any():
        return None
    lost, turned, both = (was != 0) & (now == 0), was * now < 0, (was != 0) & (now != 0)
    factor = 2 ** (now[both] / was[both]).abs().log2().abs().max().item() if both.any() else 1
    if lost.any() or turned.any() or factor > most * (1 + 1e-6):
        return f"{lost.sum().item()} of {was.numel()} read as 0, {turned.sum().item()} changed their sign, off by a factor of {factor:.3g}"
    return None


def require_same(was, now, what):
    """Bit for bit: for values where any difference would be a loss."""
    differ = (was != now).sum().item()
    assert bits_equal(was, now), f"{differ} of {was.numel()} {what} changed"


def require_no_zero(was, now, what):
    """For divisors and arguments of logarithms: no entry becomes 0 or changes its sign."""
    lost, turned = (((now == 0) & (was != 0)).sum().item(), (now * was.sign() < 0).sum().item())
    assert not lost, f"{lost} of {was.numel()} {what} read as 0"
    assert not turned, f"{turned} of {was.numel()} {what} changed their sign"


def require_finite(values, what):
    bad = (~torch.isfinite(values)).sum().item()
    assert not bad, f"{bad} of {values.numel()} {what} are not finite"


def require_same_choice(was, now, what):
    """The same argmax or the same cluster for each input."""
    differ = (was != now).sum().item()
    assert not differ, f"{differ} of {was.numel()} {what} changed"


def require_choices(was, now, what):
    """The same argmax of a trained model's outputs, if the best is ahead of the second by a tenth of the outputs' range.

    A near tie may fall to the other side, as it does in the next iteration of training.
    """
    first, second = was.topk(2, -1).values.unbind(-1)
    clear = first - second > 0.1 * (was.amax(-1) - was.amin(-1))
    differ = (was.argmax(-1) != now.argmax(-1))[clear].sum().item()
    assert differ <= 0.03 * clear.sum().item(), f"{differ} of {clear.sum().item()} clear {what} changed"


def require_same_loss(was, now, share=0.06):
    """The loss of a trained model. `balanced` promises half an iteration in the mean; an iteration gains some 5 % in such young
    runs.
    """
    assert abs(now - was) <= share * abs(was) + 1e-6, f"the loss is {now:.6g}, and was {was:.6g}"


def require_near(was, now, what, share=0.25):
    """Results of a trained model: the largest error against the largest value.

    The nets of the zoo are young: ten iterations change such results by several times this share.
    """
    error = ((now - was).abs().max() / was.abs().max()).item()
    assert error <= share, f"{what} are off by {100 * error:.3g} % of the largest"
