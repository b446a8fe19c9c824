"""The commands' texts for the shell and man(1)."""

import os
import re
import shutil
import subprocess

import pytest
from harness import BIN, FAILURE, OK, Mount, run, shell

pytestmark = pytest.mark.stepfs


def commands():
    """As `stepfs help` lists them, in groups."""
    listed = run("help").stdout.split("Usage:")[1].split("Options:")[0]
    return set(re.findall(r"(?m)^  ([a-z]+) ", listed))


def test_every_command_has_a_page(plain):
    run("man", plain / "man")
    names = {page.name for page in (plain / "man").iterdir()}
    assert {"mount", "doctor"} <= commands()
    assert names == {"stepfs.1", "mount.stepfs.8", *(f"stepfs-{name}.1" for name in commands())}
    for page in (plain / "man").iterdir():
        text = page.read_text()
        assert text.startswith((".ie", ".TH")) and ".SH DESCRIPTION" in text, page
    assert "--child" not in (plain / "man/stepfs-mount.1").read_text()
    if shutil.which("man"):
        assert "mount.stepfs" in shell(f"man -l {plain}/man/mount.stepfs.8").stdout
    (plain / "file").write_text("in the way")
    assert run("man", plain / "file", check=False).returncode == FAILURE


def test_bash_completes_commands_and_options():
    typed = lambda *words: shell(f"""source <('{BIN}' completions bash); COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}
        _stepfs stepfs '{words[-1]}' '{words[-2]}'; echo "${{COMPREPLY[@]}}" """).stdout.split()
    assert typed("stepfs", "doc") == ["doctor"]
    assert "--allow-other" in typed("stepfs", "mount", "--a")


@pytest.mark.parametrize("name", ["bash", "zsh", "fish"])
def test_completions_are_read_by_their_shell(name):
    text = run("completions", name).stdout
    assert all(command in text for command in commands())
    if shell_path := shutil.which(name):
        subprocess.run([shell_path, "-n"], input=text, text=True, check=True)


def test_who_reads_no_further_ends_it():
    assert shell(f"set +o pipefail; '{BIN}' completions zsh | head -1; echo ${{PIPESTATUS[0]}}").stdout.split()[-1] == str(OK)


@pytest.mark.parametrize("command", ["status", "status --json", "verify", "verify --json", "doctor", "gc --json", "ls"])
def test_output_that_cannot_be_written_ends_a_command_in_words(plain, command):
    mount = Mount(plain / "base")
    mount.mount()
    try:
        (mount / "x").write_bytes(b"x")
        mount.sync()
        name, *options = command.split()
        place = mount.store if name == "verify" else mount.dir
        with open("/dev/full", "w") as full:
            done = subprocess.run([BIN, name, place, *options], stdout=full, stderr=subprocess.PIPE, text=True)
        assert done.returncode == FAILURE and "No space left" in done.stderr and "panicked" not in done.stderr, done
        # As `| head -1` does.
        read, write = os.pipe()
        os.close(read)
        done = subprocess.run([BIN, name, place, *options], stdout=write, stderr=subprocess.PIPE, text=True)
        os.close(write)
        assert done.returncode == OK and not done.stderr, done
    finally:
        mount.close()


def test_a_command_fails_in_order_when_nobody_reads_its_errors(plain):
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([BIN, "inspect", plain / "missing.pt"], stdout=subprocess.PIPE, stderr=write)
    os.close(write)
    assert done.returncode == FAILURE and not done.stdout, done
