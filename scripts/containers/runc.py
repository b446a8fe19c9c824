#!/usr/bin/env python3
"""runc for machines that lack a capability themselves, as a virtual machine may: Docker wants to give a privileged container all."""

import json
import os
import sys

arguments = sys.argv[1:]
if "--bundle" in arguments and "create" in arguments:
    path = os.path.join(arguments[arguments.index("--bundle") + 1], "config.json")
    with open("/proc/self/status") as file:
        bounding = int(next(line for line in file if line.startswith("CapBnd")).split()[1], 16)
    with open("/containers/capabilities") as file:
        have = [f"CAP_{name.upper()}" for number, name in enumerate(file.read().split()) if bounding >> number & 1]
    with open(path) as file:
        config = json.load(file)
    for kind, names in config["process"]["capabilities"].items():
        config["process"]["capabilities"][kind] = [name for name in names if name in have]
    if "CAP_SYS_RESOURCE" not in have:
        # Kubernetes protects its containers from the kernel's killer, which takes this capability.
        config["process"].pop("oomScoreAdj", None)
    with open(path, "w") as file:
        json.dump(config, file)
os.execvp("runc", ["runc", *arguments])
