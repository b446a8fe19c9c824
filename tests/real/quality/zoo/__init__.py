"""A zoo of real files: each animal is a kind of checkpoint, written by the library that people write it with.

An animal is a class with `make` and `use`. `make(path, step)` trains for one interval and writes the state to `path`.
`use(was, now)` takes the path of a file as written, and of the same file as it reads after its release. It uses both as people
use such a file, and asserts that the released one is as good.
"""

from . import adapters, arrays, averages, clusters, data, frameworks, networks, normalisers, parameters, quantized, statistics, tables, traps
from .keeper import ANIMALS, Zoo

__all__ = ["ANIMALS", "Zoo", "adapters", "arrays", "averages", "clusters", "data", "frameworks", "networks", "normalisers", "parameters",
           "quantized", "statistics", "tables", "traps"]
