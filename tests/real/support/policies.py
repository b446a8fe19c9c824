"""Retention rules and pins in a history, against a separate implementation in the model."""

import os
import re

import harness
import safetensors.torch
from series import torch_bytes


def supported(base):
    """Whether the program knows `[[retention]]` in stepfs.toml."""
    store, file = base / "probe.store", base / "probe.txt"
    file.write_text("probe")
    harness.run("import", store, file)
    with open(store / "stepfs.toml", "a") as f:
        f.write(rule("*.nothing", 1, 1))
    return harness.run("status", store, check=False).returncode == harness.OK


def rule(glob, last, every):
    lines = [f'glob = "{glob}"', f"keep_last = {last}" if last else "", f"keep_every = {every}" if every else ""]
    return "\n[[retention]]\n" + "\n".join(filter(None, lines)) + "\n"


def survivors(steps, last, every, pinned):
    """The steps that stay: those that any keep line wants, the newest, and pinned ones."""
    kept = {max(steps)} | pinned
    if last:
        kept |= set(sorted(steps)[-last:])
    if every:
        kept |= {step for step in steps if step % every == 0}
    return kept


def policy(history):
    """A new short series, of files or of directories; a rule for it while nothing is mounted; a mount that follows it.

    The rule goes again at the end, because its later removals would depend on the time of sealing.
    """
    rng, tree, mount = history.rng, history.tree, history.mount
    source = history.sources["gamma"]
    folder = history.new_name("policy", "")
    while re.search(r"\d", folder):  # one number only, that of the step
        folder = history.new_name("policy", "")
    directories, count = rng.random() < 0.5, rng.randrange(2, 8)
    name = (lambda step: f"{folder}/checkpoint-{step}") if directories else (lambda step: f"{folder}/step_{step}.pt")
    steps = []
    for step in sorted(rng.sample(range(1, 30), count)):
        state = source.next()
        if directories:
            history.write(f"{name(step)}/model.safetensors", safetensors.torch.save(state.pop("model")), ".safetensors")
            history.write(f"{name(step)}/optimizer.pt", torch_bytes(state), ".pt")
        else:
            history.write(name(step), torch_bytes(state), ".pt")
        steps.append(step)
    pinned = set()
    if harness.run("pin", "--help", check=False).returncode == harness.OK:
        pinned = {step for step in steps if rng.random() < 0.2}
        for step in sorted(pinned):
            harness.run("pin", tree.full(name(step)))
    last, every = rng.choice([(1, 0), (2, 0), (0, 5), (2, 5), (3, 4), (99, 0)])
    history.note(f"{folder} steps {steps}, pinned {sorted(pinned)}, keep_last {last}, keep_every {every}")
    if rng.random() < 0.5:
        mount.sync()

    settings = mount.store / "stepfs.toml"
    mount.umount()
    text = settings.read_text()
    # And one that matches nothing.
    settings.write_text(text + rule(name("*"), last, every) + rule("policy/nothing/step_*.pt", 1, 0))
    mount.mount()
    kept = survivors(steps, last, every, pinned)
    if rng.random() < 0.5:
        harness.run("gc", mount.dir)
    else:
        names = {os.path.basename(name(step)) for step in kept}
        harness.wait_until(lambda: set(os.listdir(tree.full(folder))) <= names, 60, f"{folder} holds {sorted(names)} only")
    gone = [tree.full(name(step)) for step in set(steps) - kept]
    # A separate thread tells the kernel, which believes its older answers for a second.
    harness.wait_until(lambda: not any(map(os.path.lexists, gone)), 5, "the kernel knows the removed names")
    for step in set(steps) - kept:
        if directories:
            tree.remove_tree(name(step))
        else:
            del tree.files[name(step)]
    for step in steps:
        tree.check_path(name(step))
    mount.umount()
    settings.write_text(text)
    mount.mount()
    for step in sorted(pinned):
        harness.run("unpin", tree.full(name(step)))
    tree.note_dir_times(set(tree.dirs))
