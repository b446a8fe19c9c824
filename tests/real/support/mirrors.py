"""Mirrors for the tests: a directory, and an S3 server on loopback.

Without more, the directory is a plain one, and the server is moto. Two variables name others:
STEPFS_TEST_DIRECTORIES=DIR:DIR   where two clients have mounted one shared file system. Stores take these in turn.
STEPFS_TEST_BUCKET=NAME           a bucket of the server that AWS_ENDPOINT_URL and the rest of AWS_* describe.
"""

import datetime
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from harness import Mount, remove_base, run, run_json, wait_until

KINDS = ("file", "s3")


def make_mirror(kind, base):
    if kind == "file":
        return Directory(base)
    return Bucket() if "STEPFS_TEST_BUCKET" in os.environ else Moto()


class Directory:
    """`file://`: a directory that can be taken away."""

    def __init__(self, base):
        places = os.environ.get("STEPFS_TEST_DIRECTORIES")
        self.roots = [Path(place) / Path(base).name for place in places.split(":")] if places else [Path(base) / "mirror"]
        self.root = self.roots[0]
        self.url, self.other_url = f"file://{self.root}", f"file://{self.roots[-1]}"
        self.turns = itertools.cycle(self.roots)
        self.environment = {}

    def next_url(self):
        """The URL for another store."""
        return f"file://{next(self.turns)}"

    def names(self):
        return {str(p.relative_to(self.root)): p.stat().st_size for p in self.root.rglob("*") if p.is_file() and not p.name.startswith(".part-")}

    def go_away(self):
        """A file in the directory's place: every request fails, and nothing can be created there."""
        self.root.rename(f"{self.root}.away")
        self.root.write_bytes(b"")

    def come_back(self):
        self.root.unlink()
        Path(f"{self.root}.away").rename(self.root)

    def close(self):
        shutil.rmtree(self.root, ignore_errors=True)


class Bucket:
    """A prefix of its own in a bucket that is there."""

    def __init__(self):
        self.bucket, self.prefix = os.environ["STEPFS_TEST_BUCKET"], f"run-{uuid.uuid4().hex[:12]}"
        self.environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}

    @property
    def url(self):
        return f"s3://{self.bucket}/{self.prefix}"

    other_url = url

    def next_url(self):
        return self.url

    def pages(self):
        import boto3

        of = self.environment
        client = boto3.client("s3", endpoint_url=of["AWS_ENDPOINT_URL"], aws_access_key_id=of["AWS_ACCESS_KEY_ID"],
                              aws_secret_access_key=of["AWS_SECRET_ACCESS_KEY"], region_name=of["AWS_REGION"])
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=f"{self.prefix}/")
        return client, (page.get("Contents", []) for page in pages)

    def names(self):
        return {item["Key"].removeprefix(f"{self.prefix}/"): item["Size"] for page in self.pages()[1] for item in page}

    def close(self):
        client, pages = self.pages()
        for page in pages:
            if page:
                client.delete_objects(Bucket=self.bucket, Delete={"Objects": [{"Key": item["Key"]} for item in page]})


class Moto(Bucket):
    """An S3 server in a process of its own. It keeps everything in memory."""

    def __init__(self):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.bucket, self.prefix = "bucket", "run-7"
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

    def close(self):
        self.process.kill()
        self.process.wait()


class Expiring(Moto):
    """An S3 server whose keys live for some seconds. The machine's metadata service, which is the same server here, gives new ones."""

    LIFE = 3

    def __init__(self):
        super().__init__()
        self.used = set()
        self.gate = ThreadingHTTPServer(("127.0.0.1", 0), type("Gate", (Gate,), {"of": self}))
        threading.Thread(target=self.gate.serve_forever, daemon=True).start()
        here = f"http://127.0.0.1:{self.gate.server_address[1]}"
        self.environment = {"AWS_ENDPOINT_URL": here, "AWS_METADATA_ENDPOINT": here, "AWS_REGION": "us-east-1"}

    def key(self, ago=0):
        """The key of this moment, and when it expires."""
        number = int(time.time() / self.LIFE) - ago
        end = datetime.datetime.fromtimestamp((number + 1) * self.LIFE, datetime.UTC)
        return f"KEY{number}", end.strftime("%Y-%m-%dT%H:%M:%SZ")

    def close(self):
        self.gate.shutdown()
        super().close()


class Gate(BaseHTTPRequestHandler):
    """Answers questions for keys, and passes other requests on if their key is the present one."""

    protocol_version = "HTTP/1.1"

    def do_any(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        key, end = self.of.key()
        if self.path.startswith("/latest/api/token"):
            return self.say(200, b"token")
        if self.path.startswith("/latest/meta-data/iam/security-credentials/"):
            role = {"AccessKeyId": key, "SecretAccessKey": "secret", "Token": "token", "Expiration": end}
            return self.say(200, json.dumps(role).encode() if self.path.endswith("/role") else b"role")
        # A request may be on its way when its key expires.
        if not any(f"Credential={self.of.key(ago)[0]}/" in self.headers.get("Authorization", "") for ago in range(2)):
            return self.say(403, b"<Error><Code>ExpiredToken</Code><Message>The token has expired.</Message></Error>")
        self.of.used.add(key)
        passed = HTTPConnection("127.0.0.1", self.of.port)
        passed.request(self.command, self.path, body, dict(self.headers))
        answer = passed.getresponse()
        return self.say(answer.status, answer.read(), answer.getheaders())

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_any

    def say(self, status, body, headers=()):
        self.send_response(status)
        for name, value in headers:
            if name.lower() not in ("content-length", "connection", "transfer-encoding", "date", "server"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


class Mirrored(Mount):
    """A mounted store with a mirror."""

    def __init__(self, base, mirror, settings=""):
        super().__init__(base)
        self.mirror, self.settings, self.url = mirror, settings, mirror.next_url()

    def arguments(self):
        return [*super().arguments(), "--mirror", self.url]

    def mount(self):
        os.environ.update(self.mirror.environment)
        if self.settings and not self.store.exists():
            super().mount()
            self.umount()
            with open(self.store / "stepfs.toml", "a") as f:
                f.write(f"{self.settings}\n")
        return super().mount()

    def mirrored(self, timeout=300):
        self.sync(timeout, mirror=True)

    def progress(self):
        return run_json("status", "--json", self.dir)["mirror"]

    def close(self):
        super().close()
        if self.base.exists():
            remove_base(self.base)
