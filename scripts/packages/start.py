"""Runs docs/START.md as typed: writes its train.py, and gives its commands to one shell, each as it stands.

start.py START.md WHEELS: in the directory WHEELS lies the wheel, as in the document. The page's sections 1 to 6 have four kinds of
indented blocks: commands, the script, and what commands print.
"""

import re
import subprocess
import sys

PROGRAMS = ("pip", "stepfs", "mkdir", "python", "rm")


def main():
    text = open(sys.argv[1]).read().split("## Your framework")[0]
    blocks = [re.sub("(?m)^    ", "", block) for block in re.findall(r"(?m)(?:^    .*\n(?:\n(?=    ))?)+", text)]
    [script] = [block for block in blocks if block.startswith('"""')]
    commands = [line for block in blocks if block.split()[0] in PROGRAMS for line in block.splitlines()]
    assert len(commands) >= 12, commands
    with open("train.py", "w") as file:
        file.write(script)
    echoed = [f"printf '%s\\n' {quoted('$ ' + command)}\n{command}" for command in commands]
    sys.exit(subprocess.run(["bash", "-euo", "pipefail", "-c", "\n".join(echoed)]).returncode)


def quoted(text):
    return "'" + text.replace("'", "'\\''") + "'"


main()
