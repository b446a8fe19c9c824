"""The content of a file. Every file carries a stamp: integers, so bit-exact for ever. The stamp tells a reader which write it
sees, whatever names the file has had since.
"""

import hashlib
import struct
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from series import flatten

# Two words that no weight and no header has by chance.
MAGIC = (0x53545245_5353_0001, 0x0A1B2C3D_4E5F6071)
MARK = struct.pack("<2q", *MAGIC)


class Stamp(NamedTuple):
    run: int  # which series
    part: int  # which file of its checkpoint
    number: int  # which write


def stamp_tensor(stamp):
    return torch.tensor([*MAGIC, *stamp], dtype=torch.int64)


def stamp_words(stamp):
    """The same for a file without tensors."""
    return f"stress {stamp.run} {stamp.part} {stamp.number} end"


def find_stamp(data):
    """(stamp, offset of its numbers) in a file's bytes; None if the file is not whole."""
    if (at := data.find(MARK)) >= 0 and len(data) >= at + 40:
        return Stamp(*struct.unpack_from("<3q", data, at + 16)), at + 16
    if (at := data.find(b"stress ")) >= 0:
        words = bytes(data[at : at + 80]).split()
        if len(words) > 4 and words[4].startswith(b"end"):
            return Stamp(*map(int, words[1:4])), at
    return None


def digest(data):
    return hashlib.sha256(data).hexdigest()


def tensors_of(value):
    return {name: leaf for name, leaf in flatten(value).items() if isinstance(leaf, torch.Tensor)}


def tensor_digest(tensors):
    """Digest of all tensors' bytes; the same whether a file was read whole, mapped, or tensor by tensor."""
    whole = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous()
        whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        whole.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return whole.hexdigest()


def stamp_of(tensors):
    tensor = tensors.get("stamp")
    return Stamp(*tensor.tolist()[2:]) if tensor is not None and tuple(tensor.tolist()[:2]) == MAGIC else None


def save(state, path, how):
    """Write a checkpoint. `how` is "path", as most programs do, or "object", through a file object of Python. The bytes depend on
    `how`, and with torch.save to a path on the name, but on nothing else.
    """
    if isinstance(state, str):
        with open(path, "w") as f:
            f.write(state)
    elif ".safetensors" in path:
        save_file(state, path)
    elif how == "path":
        torch.save(state, path)
    else:
        with open(path, "wb") as f:
            torch.save(state, f)
