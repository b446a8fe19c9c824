#!/usr/bin/env python3
"""Lists the messages that commands can print, and shows that each was provoked and that its next step works.

The messages are literals in calls such as `bail!`, `#[error]` and `Error::Denied` of the source. The catalogue of mistakes in
tests/real/support/mistakes.py provokes them. `LEFT_OUT` gives the reason for each other one. Exits with 1 if a message is in neither, or
if docs/ERRORS.md is out of date.

    errors.py            messages without an entry
    errors.py --write    also writes docs/ERRORS.md
"""

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests/real/support"))

from house import TOKEN, rust_files  # noqa: E402
from mistakes import LEFT_OUT, MISTAKES, pattern  # noqa: E402

PAGE = ROOT / "docs/ERRORS.md"
HEAD = """# Error messages

This page is for you if stepfs has answered you with an error, and you look for the next step. `scripts/errors.py` writes it from the source
and from the catalogue that the tests run: each command line of the last column was tried, and works. A star stands for a name or a number
of the message. `st` is a store with checkpoints below `run`, `m` a mount point, `$M` a mount of the store `$S`, `mir` the directory of a
mirror, and `edl` a checkpoint of ElasticDL.

Every command prints errors on standard error, and begins them with `stepfs:`. [COMMANDS](COMMANDS.md) lists the exit codes.

"""
# The calls that make a message; the literals inside their brackets are one.
CALLS = re.compile(
    r"\b(?:(?:bail|anyhow|say_error)!|(?:with_)?context|Error::(?:new|other|Settings|Wrong|Away|Denied)|Damage|Err|denied"
    r"|ok_or(?:_else)?|problem|warning|Problem::new)\(|#\[error\(|\blet (?:next|words|wrong|why|long) = |\bwords \\+= "
)
# Words of a message, without its stars.
FEWEST_WORDS = 2


def end_of(code, start, closes):
    """Where the brackets that are open at `start` close, or where the statement ends."""
    depth = 1 if closes else 0
    for mark in re.compile(r"[][(){};]").finditer(code, start):
        depth += (mark[0] in "([{") - (mark[0] in ")]}")
        if depth <= 0 and (closes or mark[0] == ";"):
            return mark.start()
    return len(code)


def messages():
    """(file, message) for each literal that a command may print; a star stands for each value."""
    for _, path, code in rust_files():
        text, seen = path.read_text(), set()
        for call in CALLS.finditer(code):
            end = end_of(code, call.end(), call[0].endswith("("))
            for token in TOKEN.finditer(text, call.end(), end):
                if not token[0].startswith('"') or code[token.start()] != '"' or token.start() in seen:
                    continue
                seen.add(token.start())
                literal = re.sub(r"\\\n\s*", "", token[0][1:-1]).replace('\\"', '"').replace("\\n", "\n").replace("\\\\", "\\")
                message = re.sub(r"\{[^{}]*\}", "*", literal)
                if len(re.findall(r"[A-Za-z]{2,}", message)) >= FEWEST_WORDS:
                    yield str(path.relative_to(ROOT)), message


def reason(path, message):
    """Why the catalogue has no entry for a message."""
    found = (why for (where, words), why in LEFT_OUT.items() if re.match(where, path) and re.search(words, message))
    return next(found, None)


def entry_of(message):
    """The entry for a message, by the longest pattern that it has."""
    covering = [(len(text), mistake) for mistake in MISTAKES for text in mistake.patterns if pattern(text).search(message)]
    return max(covering, key=lambda found: found[0], default=(0, None))[1]


def cell(text):
    return text.replace("\n", " ").replace("|", "\\|")


def quoted(text):
    return f"`` {cell(text)} ``" if "`" in text else f"`{cell(text)}`"


def page():
    rows, seen = [], set()
    for _, message in messages():
        mistake = entry_of(message)
        if mistake and message not in seen:
            seen.add(message)
            then = re.sub(r"\$\{\d[^}]*\}|\$\d", "*", mistake.then)
            rows.append(f"| {quoted(message)} | {cell(mistake.when)} | {quoted(then)} |")
    return HEAD + "| message | situation | a next step that works |\n|---|---|---|\n" + "\n".join(sorted(rows)) + "\n"


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--write", action="store_true")
    options = options.parse_args()
    all_messages = list(dict.fromkeys(messages()))
    missing = [(path, message) for path, message in all_messages if not entry_of(message) and not reason(path, message)]
    for path, message in missing:
        print(f"{path}: no entry in mistakes.py: {message!r}")
    if options.write:
        PAGE.write_text(page())
    stale = not PAGE.exists() or PAGE.read_text() != page()
    if stale:
        print(f"{PAGE.relative_to(ROOT)} is out of date: run scripts/errors.py --write")
    count, provoked = len(all_messages), sum(entry_of(message) is not None for _, message in all_messages)
    print(f"{count} messages: {provoked} provoked, {count - provoked - len(missing)} left out, {len(missing)} missing")
    return int(bool(missing) or stale)


if __name__ == "__main__":
    sys.exit(main())
