"""The table in words: a line for the terminal, and docs/FRAMEWORKS.md."""

import re
import textwrap

from job import KEEP, MORE, NEWEST, OLD, SAVES

HEAD = "| writer | version | format | MiB | kept | stored %: all / differences | loss from an old one: mount / directory / other batches | newest | rotation |"


def percent(share):
    return "-" if share is None else f"{100 * share:.1f}"


def kept(row):
    if row.whole and row.stored > 0.99:
        return "whole"
    words = f"quantized, {100 * row.quantized:.0f}% of the bytes" if row.quantized else "lossless"
    return words + (", in part whole" if row.whole else "")


def cells(entry, row):
    if row.failed:
        return [entry.says, version(row), "failed: " + row.failed.replace("|", "/")]
    old = " / ".join(f"{loss:.4f}" for loss in row.old)
    newest = "equal" if row.newest[0] == row.newest[1] else f"{row.newest[0]} instead of {row.newest[1]}"
    return [entry.says, version(row), ", ".join(row.formats), f"{row.mib:.1f}", kept(row), f"{percent(row.stored)} / {percent(row.differences)}",
            old, newest, row.rotation or "equal"]


def version(row):
    return next((f"{name} {version}" for name, version in row.versions.items()), "")


def line_of(entry, row):
    words = " | ".join(cells(entry, row))
    extra = [f"whole: {reason} ({len(paths)})" for reason, paths in row.whole.items()] + row.log + ([row.damage] if row.damage else [])
    return "\n      ".join([words, *extra])


INTRO = f"""# Libraries, and what stepfs makes of their checkpoints

`scripts/frameworks.sh --page` makes this page. Each library trains something small and saves {SAVES} checkpoints with its own code, once into a mount
and once into a plain directory. Its own rotation leaves {KEEP}; where a library has none, the script removes the oldest. stepfs releases the
older ones while the training goes on. Then the mount is taken down and mounted again. The library resumes with its own code from the
checkpoint of step {OLD}, which is released, and from the newest, of step {NEWEST}, and trains {MORE} steps more.

    scripts/frameworks.sh --page            # all, and this page; under an hour on two idle cores
    scripts/frameworks.sh trainer keras     # these only, and no page
    scripts/frameworks.sh --page megatron   # this one anew, in the page
    scripts/frameworks.sh --list            # their names

The first run makes a second Python environment in `.venv-frameworks/` beside that of the tests, some 3 GB from PyPI.

How to read a row:

- **format** is what `stepfs inspect` says of the files of 64 KiB and more. **MiB** is the size of one checkpoint.
- **kept** says what became of the older checkpoints. `quantized`: so much of their bytes lost a little. `lossless`: nothing was lost. `whole`:
  they take the room that they had.
- **stored %** counts all files of all checkpoints but the newest, with stubs and small files. The first of a chain has nothing to be a
  difference to, and weighs most of it in so short a run. So the second number leaves the oldest checkpoint out: a longer run tends to it.
- **loss** is on held-out data, after the resume from the old checkpoint. The third number is that of the plain directory, trained on other batches:
  it says how much the loss varies without any loss of bytes.
- **newest**: `equal` says that the loss after a resume from the newest is the same to the last bit.
- **rotation**: `equal` says that `ls -R` names the same files in both.
"""


def write_page(path, entries, rows):
    """A writer that no run here has measured keeps what the page says of it."""
    lines = [INTRO, HEAD, "|" + "---|" * HEAD.count(" | ") + "---|"]
    notes, before = [], path.read_text() if path.exists() else ""
    for entry in entries.values():
        row = rows.get(entry.name)
        if row is None:
            kept = re.search(rf"^\| {re.escape(entry.says)} \|.*", before, re.M)
            lines.append(kept[0] if kept else f"| {entry.says} | | not run yet: `scripts/frameworks.sh --page {entry.name}` |")
            notes += re.findall(rf"^- \*\*[^*]*\*\* \(`{re.escape(entry.name)}`\): .*(?:\n  .*)*", before, re.M)
            continue
        lines.append("| " + " | ".join(cells(entry, row)) + " |")
        if words := note(entry, row):
            notes.append(textwrap.fill(f"- **{entry.says}** (`{entry.name}`): {words}", 140, subsequent_indent="  ", break_on_hyphens=False))
    path.write_text("\n".join([*lines, "", "## Notes", "", *notes, ""]))


def note(entry, row):
    # The old checkpoint's files are named; the same reason stands there without a name for the others.
    is_named = lambda reason: any(reason.endswith(f": {other}") for other in row.whole)
    reasons = sorted(reason for reason in row.whole if not is_named(reason))
    said = f'What stays whole, by `user.stepfs.why`: {"; ".join(reasons)}.' if reasons else ""
    return " ".join(filter(None, [entry.note, said]))
