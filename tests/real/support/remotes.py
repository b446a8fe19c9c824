"""Remotes for the tests: a plain directory, and moto as an S3 server on loopback."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from harness import Mount, remove_base, run, run_json, wait_until


class Directory:
    """`file://`: a directory that can be taken away."""

    def __init__(self, base):
        self.root = Path(base) / "remote"
        self.url = f"file://{self.root}"
        self.environment = {}

    def names(self):
        return {str(p.relative_to(self.root)): p.stat().st_size for p in self.root.rglob("*") if p.is_file()}

    def go_away(self):
        """A file in the directory's place: every request fails, and nothing can be created there."""
        self.root.rename(f"{self.root}.away")
        self.root.write_bytes(b"")

    def come_back(self):
        self.root.unlink()
        Path(f"{self.root}.away").rename(self.root)

    def close(self):
        pass


class Moto:
    """An S3 server in a process of its own. It keeps everything in memory."""

    def __init__(self):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.url = "s3://bucket/run-7"
        self.environment = {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "test-key",
            "AWS_SECRET_ACCESS_KEY": "very-secret-word",
            "AWS_REGION": "us-east-1",
        }
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_until(self.answers, 30, "moto answers")
            urllib.request.urlopen(urllib.request.Request(f"{self.endpoint}/bucket", method="PUT"), timeout=30)
        except BaseException:
            self.close()
            raise

    def answers(self):
        assert self.process.poll() is None, "moto_server ended"
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return True
        except OSError:
            time.sleep(0.1)
            return False

    def names(self):
        import boto3

        client = boto3.client("s3", endpoint_url=self.endpoint, aws_access_key_id="x", aws_secret_access_key="y",
                              region_name="us-east-1")
        pages = client.get_paginator("list_objects_v2").paginate(Bucket="bucket")
        return {item["Key"].removeprefix("run-7/"): item["Size"] for page in pages for item in page.get("Contents", [])}

    def close(self):
        self.process.kill()
        self.process.wait()


class Node(Mount):
    """A mounted store with a remote."""

    def __init__(self, base, remote, settings=""):
        super().__init__(base)
        self.remote, self.settings = remote, settings

    def arguments(self):
        return [*super().arguments(), "--remote", self.remote.url]

    def mount(self):
        os.environ.update(self.remote.environment)
        if self.settings and not self.store.exists():
            plain = Mount(self.base)
            plain.mount()
            plain.umount()
            with open(self.store / "stepfs.toml", "a") as f:
                f.write(f'\n[remote]\nurl = "{self.remote.url}"\n{self.settings}\n')
        return super().mount()

    def pushed(self, timeout=300):
        self.sync(timeout, remote=True)

    def progress(self):
        return run_json("status", "--json", self.dir)["remote"]

    def sees(self, name, timeout=20):
        wait_until(lambda: os.path.lexists(self.dir / name), timeout, f"{name} appears on {self.dir}")

    def close(self):
        super().close()
        if self.base.exists():
            remove_base(self.base)
