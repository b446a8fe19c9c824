#!/usr/bin/env python3
"""Measure a pull from an S3 server beside boto3's download of the same bytes, in turns.

    mirror_restore.py [--mib 200] [--rounds 5]

STEPFS_BIN names the program. Without STEPFS_TEST_BUCKET (tests/real/support/mirrors.py) the server is moto, which is slow.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests/real/support")]

from harness import run  # noqa: E402
from mirrors import Mirrored, make_mirror  # noqa: E402


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="stepfs-mirror-"))
    mirror = make_mirror("s3", base)
    mount = Mirrored(base / "store", mirror)
    try:
        mount.mount()
        (mount / "model.bin").write_bytes(os.urandom(args.mib << 20))
        mount.mirrored()
        client, _ = mirror.pages()
        client.upload_file(str(mount / "model.bin"), mirror.bucket, f"{mirror.prefix}/plain")
        ratios = []
        for number in range(args.rounds):
            begun = time.monotonic()
            client.download_file(mirror.bucket, f"{mirror.prefix}/plain", str(base / "plain"))
            plain = time.monotonic() - begun
            begun = time.monotonic()
            run("pull", mirror.url, base / f"pulled_{number}")
            pulled = time.monotonic() - begun
            shutil.rmtree(base / f"pulled_{number}")
            ratios.append(pulled / plain)
            print(f"boto3 {plain:.2f} s, pull {pulled:.2f} s, {ratios[-1]:.2f} times", flush=True)
        print(f"median {statistics.median(ratios):.2f}")
    finally:
        mount.close()
        mirror.close()
        shutil.rmtree(base, ignore_errors=True)


if __name__ == "__main__":
    main()
