#!/usr/bin/env python3
"""Writes the bill of materials of the program to standard output, as CycloneDX 1.5: each crate that is linked or runs at build
time, with version, licence and the checksum of crates.io. It comes from `cargo metadata` and Cargo.lock alone.

    sbom.py [TARGET]    default: x86_64-unknown-linux-gnu
"""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def packages():
    target = sys.argv[1] if len(sys.argv) > 1 else "x86_64-unknown-linux-gnu"
    text = subprocess.run(["cargo", "metadata", "--locked", "--format-version=1", "--filter-platform", target], cwd=ROOT,
                          check=True, capture_output=True, text=True).stdout
    found = json.loads(text)
    nodes = {node["id"]: node for node in found["resolve"]["nodes"]}
    # Only what the program needs: no dependency of tests.
    needs = {name: sorted({dep["pkg"] for dep in node["deps"] if any(kind["kind"] != "dev" for kind in dep["dep_kinds"])})
             for name, node in nodes.items()}
    root = found["resolve"]["root"]
    rest, reached = [root], {root}
    while rest:
        for name in needs[rest.pop()]:
            if name not in reached:
                reached.add(name)
                rest.append(name)
    by_id = {package["id"]: package for package in found["packages"]}
    return root, {name: by_id[name] for name in sorted(reached)}, needs


def main():
    root, found, needs = packages()
    lock = (ROOT / "Cargo.lock").read_text()
    sums = {(name, version): sum for name, version, sum in
            re.findall(r'name = "(.+)"\nversion = "(.+)"\nsource = ".+"\nchecksum = "(.+)"', lock)}
    refs = {name: f"pkg:cargo/{package['name']}@{package['version']}" for name, package in found.items()}

    def component(name):
        package = found[name]
        kind = "application" if name == root else "library"
        part = {"type": kind, "bom-ref": refs[name], "name": package["name"], "version": package["version"], "purl": refs[name],
                "scope": "required"}
        if package["license"]:
            part["licenses"] = [{"expression": package["license"].replace("/", " OR ")}]
        if sum := sums.get((package["name"], package["version"])):
            part["hashes"] = [{"alg": "SHA-256", "content": sum}]
        return part

    bill = {
        "bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1,
        "metadata": {"component": component(root)},
        "components": [component(name) for name in found if name != root],
        "dependencies": [{"ref": refs[name], "dependsOn": [refs[other] for other in needs[name]]} for name in found],
    }
    json.dump(bill, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
