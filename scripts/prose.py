"""Counts how hard the project's English is: its documents, its comments, the words of its commands.

    python3 scripts/prose.py [--all] [PATH...]

The rule is in CONTRIBUTING.md: at most 25 words a sentence. The limits leave room for exceptions: per thousand words at most two
"what"; at most 2% of the sentences have more than 30 words, and none has more than 40. Without PATH it reads everything that git tracks.
It prints the worst sentences (with --all, each that is too long, and each "what"), and exits with 1 above a limit.
"""

import argparse
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

LONG, LONGEST = 30, 40
LONG_SHARE, WHATS = .02, 2.0
SENTENCE = 4
CODE_INDENT = 4
# Usage lines have columns: a command, and its effect.
COLUMNS = re.compile(r"\s{2,}")
# Published texts, and texts that tests compare.
LEFT_OUT = ("tests/corpus/", "tests/golden/", "fuzz/corpus/", "docs/papers/", "LICENSE")


def paragraphs_of_markdown(text):
    """(line, text) of each paragraph, list item and cell of a table or of columns; code is left out, fenced or indented."""
    number, lines, start, fenced, listed, before = 0, [], 0, False, False, ""
    for number, line in enumerate(text.split("\n"), 1):
        stripped, indent = line.strip(), len(line) - len(line.lstrip())
        if stripped.startswith("```"):
            fenced = not fenced
            stripped = ""
        starts = re.match(r"([-*+]|\d+[.)]|#+|>) ", stripped)
        listed = bool(starts) or listed and (not stripped or indent > 0)
        # An indented line is code after a blank line or other code, but not in a list.
        indented = indent >= CODE_INDENT and not listed and before in ("", "code")
        cells = [cell.strip() for cell in stripped.strip("|").split("|")] if stripped.startswith("|") else COLUMNS.split(stripped)
        if lines and (not stripped or starts or fenced or indented or len(cells) > 1):
            yield start, " ".join(lines)
            lines = []
        before = "code" if indented else stripped
        if fenced or indented or not stripped or re.fullmatch(r"[-|: ]+", stripped):
            continue
        if len(cells) > 1:
            yield from ((number, cell) for cell in cells)
            continue
        if not lines:
            start = number
        lines.append(stripped[starts.end():] if starts else stripped)
    if lines:
        yield start, " ".join(lines)


def blocks(lines):
    """Joins comment lines that follow each other: (line, text) of each block, read as markdown."""
    start, block = None, []
    for number, text in [*lines, (None, "")]:
        if block and number != start + len(block):
            yield from ((start + at - 1, words) for at, words in paragraphs_of_markdown("\n".join(block)))
            block = []
        if number is not None:
            start = start if block else number
            block.append(text)


def comments_of_rust(text):
    found = re.compile(r"^\s*//[/!]? ?(.*)$")
    yield from blocks((n, m[1]) for n, m in ((n, found.match(line)) for n, line in enumerate(text.split("\n"), 1)) if m)


def comments_of_python(text):
    comments, before = [], None
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            words = token.string.lstrip("#! ")
            # A comment behind code is about this line alone.
            if token.line.lstrip().startswith("#"):
                comments.append((token.start[0], words))
            else:
                yield token.start[0], words
        elif token.type == tokenize.STRING and before in (None, tokenize.NEWLINE, tokenize.INDENT, tokenize.NL, tokenize.DEDENT):
            lines = token.string.strip("rb").strip('"').strip("'").split("\n")
            yield from ((token.start[0] + at - 1, words) for at, words in paragraphs_of_markdown("\n".join(lines)))
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            before = token.type
    yield from blocks(comments)


def comments_of_shell(text):
    found = ((n, re.match(r"^\s*#(?!!) ?(.*)$", line)) for n, line in enumerate(text.split("\n"), 1))
    yield from blocks((n, m[1]) for n, m in found if m)


READERS = {".md": paragraphs_of_markdown, ".rs": comments_of_rust, ".py": comments_of_python, ".sh": comments_of_shell,
           ".toml": comments_of_shell}


def sentences(paragraph):
    """The sentences of a paragraph, each as its words. A piece of code, a link and a reference in brackets are a word, or none."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", paragraph)
    text = re.sub(r"`[^`]*`", "code", text)
    # References to tests and code, as SEMANTICS has them.
    text = re.sub(r"\[[^\]]*[/:_][^\]]*\]", "", text)
    text = re.sub(r"\b(e\.g|i\.e|vs|cf|etc)\.", r"\1", text)
    for sentence in re.split(r"(?<=[.!?])[\"')*_]*\s+", text):
        words = re.findall(r"[A-Za-z][A-Za-z'’-]*|\d[\d.,%]*", sentence)
        if words:
            yield words


def read(path):
    """(line, words) of each sentence of a file."""
    text = path.read_text(encoding="utf-8")
    for line, paragraph in READERS[path.suffix](text):
        yield from ((line, words) for words in sentences(paragraph))


def tracked(paths):
    listed = subprocess.run(["git", "ls-files", "--", *paths], check=True, capture_output=True, text=True).stdout.split("\n")
    return [Path(name) for name in listed if Path(name).suffix in READERS and not name.startswith(LEFT_OUT)]


class Count:
    """The counts of one kind of text."""

    def __init__(self):
        self.words = self.whats = self.sentences = self.long = self.longest = 0

    def add(self, words):
        self.words += len(words)
        self.whats += sum(word.lower() == "what" for word in words)
        # A cell of a table or a heading is no sentence.
        self.sentences += len(words) >= SENTENCE
        self.long += len(words) > LONG
        self.longest += len(words) > LONGEST

    def whats_per_thousand(self):
        return 1000 * self.whats / max(self.words, 1)

    def long_share(self):
        return self.long / max(self.sentences, 1)

    def is_good(self):
        return self.whats_per_thousand() <= WHATS and self.long_share() <= LONG_SHARE and self.longest == 0

    def __str__(self):
        return (f"{self.words:7} words, {self.whats_per_thousand():5.2f} what per thousand, {self.sentences:5} sentences, "
                f"{100 * self.long_share():4.1f}% above {LONG} words, {self.longest} above {LONGEST}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help='show each sentence that is too long, and each "what"')
    parser.add_argument("paths", nargs="*", help="files and directories")
    args = parser.parse_args()
    documents, comments, worst = Count(), Count(), []
    for path in tracked(args.paths):
        count = documents if path.suffix == ".md" else comments
        for line, words in read(path):
            count.add(words)
            if len(words) > LONG or (args.all and any(word.lower() == "what" for word in words)):
                worst.append((len(words), f"{path}:{line}", " ".join(words)))
    worst.sort(reverse=True)
    for length, place, text in worst if args.all else worst[:10]:
        print(f"{place}: {length} words: {text}")
    for name, count in [("documents", documents), ("comments", comments)]:
        print(f"{name}: {count}")
    if not (documents.is_good() and comments.is_good()):
        sys.exit(f"limits: {WHATS} what per thousand words, {100 * LONG_SHARE:.0f}% above {LONG} words, none above {LONGEST}")


if __name__ == "__main__":
    main()
