#!/usr/bin/env python3
"""Writes zarr/: arrays of zarr 2 and 3, with the chunk 0,0 of each, as NAME/.zarray or NAME/zarr.json, and NAME/chunk. Needs zarr."""

import shutil
import tempfile
from pathlib import Path

import numpy as np
import zarr

HERE = Path(__file__).parent / "zarr"
VALUES = np.random.default_rng(3).standard_normal((6, 5)).astype("float32")
# Each name: the version, the directory's name of the chunk, and what zarr is told.
ARRAYS = {
    "two": (2, "0.0", {"compressors": None}),
    "two_by_column": (2, "0.0", {"compressors": None, "order": "F"}),
    "two_compressed": (2, "0.0", {}),
    "two_parts": (2, "0.0", {"compressors": None, "chunks": (4, 5)}),
    "three": (3, "c/0/0", {"compressors": None}),
    "three_half": (3, "c/0/0", {"compressors": None, "dtype": "float16"}),
    "three_big": (3, "c/0/0", {"compressors": None, "serializer": zarr.codecs.BytesCodec(endian="big")}),
    "three_compressed": (3, "c/0/0", {}),
    "three_checked": (3, "c/0/0", {"compressors": [zarr.codecs.Crc32cCodec()]}),
    "three_sharded": (3, "c/0/0", {"compressors": None, "chunks": (3, 5), "shards": (6, 5)}),
}


def main():
    for name, (version, chunk, options) in ARRAYS.items():
        with tempfile.TemporaryDirectory() as folder:
            options = {"chunks": VALUES.shape, "dtype": VALUES.dtype, **options}
            array = zarr.create_array(folder, shape=VALUES.shape, zarr_format=version, **options)
            array[:] = VALUES
            description = ".zarray" if version == 2 else "zarr.json"
            (HERE / name).mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path(folder, description), HERE / name / description)
            shutil.copyfile(Path(folder, chunk), HERE / name / "chunk")


if __name__ == "__main__":
    main()
