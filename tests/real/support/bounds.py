"""The bounds that stepfs states for each tensor of a file, and whether reads keep them."""

import re

import torch
from series import bits_equal, difference, flatten, tensors_of


def same_words(path):
    """Tensor paths as stepfs and as Python spell them, made comparable."""
    return re.sub(r"[^0-9A-Za-z_]+", ".", path).strip(".")


def stated(mount, name):
    """{tensor path: answer of `inspect`}."""
    tensors = mount.tensors(name)
    return {same_words(path): tensor for tensor in tensors for path in [tensor["path"], *tensor.get("aliases", [])]}


def check_within_bounds(mount, name, exact, read):
    """Unquantized tensors are bit-equal, quantized ones within the stated bound; returns the number of quantized ones."""
    said, limit, quantized = stated(mount, name), mount.entry(name)["max_abs_error"] or 0.0, 0
    assert flatten(exact).keys() == flatten(read).keys()
    for path, leaf in flatten(exact).items():
        other = flatten(read)[path] if not isinstance(leaf, torch.Tensor) else None
        assert isinstance(leaf, torch.Tensor) or other == leaf, f"{path}: {other!r} is not {leaf!r}"
    read = tensors_of(read)
    for path, tensor in tensors_of(exact).items():
        about = said.get(same_words(path), {"bound": 0})
        assert tensor.shape == read[path].shape and tensor.dtype == read[path].dtype and tensor.stride() == read[path].stride()
        if not about["bound"]:
            assert bits_equal(tensor, read[path]), f"{path} is said to be exact: {about}"
        else:
            error = difference(tensor, read[path])
            quantized += 1
            assert tensor.is_floating_point()
            assert error <= about["max_abs_error"], f"{path}: off by {error}, stated {about}"
            # A moment's bound is of something else: of octaves, or of their ratio.
            assert about["codec"] in ("log", "moment") or error <= about["bound"], f"{path}: off by {error}, stated {about}"
            assert about["max_abs_error"] <= limit, f"{path}: ls states less than inspect"
    return quantized
