#!/usr/bin/env python3
"""Count code lines of each part of the house, and check the limits that keep it readable.

A code line holds code: no blank line, no comment, no test. Tests are items behind `#[cfg(test)]`, with their files, and
files and folders called `tests`. The check fails if a file has more than 450 code lines, if a type has more than 40
methods, or if two files import each other, directly or through others.

    house.py            lines of each part, and what breaks a limit
    house.py --files    also the largest files
"""

import argparse
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST_LINES = 450
MOST_METHODS = 40
# Blanks out string and character literals, and comments, so that braces can be counted.
TOKEN = re.compile(
    r'//[^\n]*|/\*.*?\*/|r(#*)".*?"\1|b?"(?:\\.|[^"\\])*"|b?\'(?:\\(?:x..|u\{[^}]*\}|.)|[^\'\\])\'', re.DOTALL
)
TEST = re.compile(r"#\[cfg\((?:all\()?test\b[^\n]*\]\s*")
# A field, which ends with a comma; other items end with a semicolon or a brace.
FIELD = re.compile(r"(?:pub(?:\([^)]*\))? )?\w+:[^:]")
TEST_FILE = re.compile(TEST.pattern + r"(?:pub(?:\([^)]*\))? )?mod (\w+);")


def spaces(text):
    """As many characters, of which the line ends stay."""
    return re.sub(r"[^\n]", " ", text)


def blanked(text):
    """The text without comments, and with empty literals; every other character stays at its place."""
    return TOKEN.sub(lambda found: spaces(found[0]) if found[0][0] == "/" else '""' + spaces(found[0][2:]), text)


def without_tests(code):
    """The text with blanks for items behind `#[cfg(test)]`."""
    while found := TEST.search(code):
        end, depth = len(code), 0
        ends = ",}" if FIELD.match(code, found.end()) else ";}"
        for mark in re.finditer(r"[][(){},;]", code[found.end() :]):
            depth += (mark[0] in "([{") - (mark[0] in ")]}")
            if depth <= 0 and mark[0] in ends:
                end = found.end() + mark.end()
                break
        code = code[: found.start()] + spaces(code[found.start() : end]) + code[end:]
    return code


def rust_files():
    """Each source file with its code, without tests."""
    for base in [ROOT / "src", *sorted((ROOT / "crates").glob("*/src"))]:
        texts = {path: path.read_text() for path in sorted(base.rglob("*.rs"))}
        tests = set()
        for path, text in texts.items():
            below = path.parent if path.stem in ("lib", "main", "mod") else path.with_suffix("")
            tests |= {below / name for name in ["tests", *TEST_FILE.findall(text)]}
        for path, text in texts.items():
            if tests.isdisjoint([path.with_suffix(""), *path.parents]):
                yield base, path, without_tests(blanked(text))


def lines(code):
    return sum(1 for line in code.splitlines() if line.strip())


def part(base, path):
    if base != ROOT / "src":
        return str(base.parent.relative_to(ROOT))
    first = path.relative_to(base).parts[0]
    return "src/" + first.removesuffix(".rs") if (base / first.removesuffix(".rs")).is_dir() else "src/*.rs"


def methods(code):
    """How many functions each type has in its own `impl` blocks."""
    count = Counter()
    for found in re.finditer(r"^impl(?:<[^{]*?>)? (?:crate::)?(\w+)[^{;]*?\{", code, re.MULTILINE):
        if re.search(r"\bfor\b", found[0]):
            continue
        at, depth = found.end(), 1
        start = at
        while depth and at < len(code):
            depth += (code[at] == "{") - (code[at] == "}")
            at += 1
        count[found[1]] += len(re.findall(r"^    (?:pub(?:\([^)]*\))? )?(?:const |unsafe |async )*fn ", code[start:at], re.M))
    return count


def module(base, path):
    """The path of a file's module, as a tuple."""
    parts = list(path.relative_to(base).with_suffix("").parts)
    if parts[-1] in ("mod", "lib", "main"):
        parts.pop()
    return (base, *parts)


def used(code):
    """Each path that the code names in `use`, with its groups written out."""

    def spread(text, before):
        depth, start, items = 0, 0, []
        for at, c in enumerate(text + ","):
            depth += (c == "{") - (c == "}")
            if c == "," and depth == 0:
                items.append(text[start:at].strip())
                start = at + 1
        for item in items:
            if "{" in item:
                head, inner = item.split("{", 1)
                yield from spread(inner.rstrip("}").rstrip(), before + [p for p in head.split("::") if p])
            elif item:
                yield before + item.split(" as ")[0].split("::")

    for found in re.finditer(r"\b(?:pub(?:\([^)]*\))? )?use ([^;]+);", code):
        yield from spread(re.sub(r"\s+", " ", found[1]), [])
    for found in re.finditer(r"\b(?:crate|super)(?:::\w+)+", re.sub(r"\buse [^;]+;", "", code)):
        yield found[0].split("::")


def imports(files):
    """The modules that each module imports: those that define the names, whatever passes them on."""
    known = {module(base, path) for base, path, _ in files}
    graph = defaultdict(set)
    for base, path, code in files:
        own = module(base, path)
        for names in used(code):
            if names[0] == "crate":
                to = [base, *names[1:]]
            elif names[0] == "super":
                ups = sum(1 for name in names if name == "super")
                to = [*own[: len(own) - ups], *names[ups:]]
            elif names[0] == "self" or (*own, names[0]) in known:
                continue
            else:
                continue
            while to and tuple(to) not in known:
                to.pop()
            if to and tuple(to) != own:
                graph[own].add(tuple(to))
    return graph


def circles(graph):
    """Groups of modules of which each imports each other one, by Tarjan's algorithm. A module and its parent are one."""
    index, low, stack, found = {}, {}, [], []

    def visit(node):
        index[node] = low[node] = len(index)
        stack.append(node)
        for to in graph.get(node, ()):
            if to not in index:
                visit(to)
                low[node] = min(low[node], low[to])
            elif to in stack:
                low[node] = min(low[node], index[to])
        if low[node] == index[node]:
            group = []
            while True:
                group.append(stack.pop())
                if group[-1] == node:
                    break
            if len(group) > 1:
                found.append(group)

    sys.setrecursionlimit(10_000)
    for node in list(graph):
        if node not in index:
            visit(node)
    return found


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--files", action="store_true", help="print the largest files")
    args = args.parse_args()
    files = list(rust_files())
    parts, sizes, of_types = Counter(), {}, Counter()
    for base, path, code in files:
        sizes[path] = lines(code)
        parts[part(base, path)] += sizes[path]
        for name, n in methods(code).items():
            of_types[part(base, path), name] += n
    for name, n in sorted(parts.items()):
        print(f"{n:7,}  {name}")
    print(f"{sum(parts.values()):7,}  in {len(files)} files; {sum(parts.values()) - parts['src/mirror']:,} without src/mirror")
    if args.files:
        for path, n in sorted(sizes.items(), key=lambda item: -item[1])[:25]:
            print(f"{n:7,}  {path.relative_to(ROOT)}")
    broken = [f"{path.relative_to(ROOT)}: {n} code lines" for path, n in sizes.items() if n > MOST_LINES]
    broken += [f"{where}: {name} has {n} methods" for (where, name), n in of_types.most_common() if n > MOST_METHODS]
    for group in circles(imports(files)):
        names = sorted("::".join(node[1:]) or "lib" for node in group)
        broken.append(f"{len(names)} files import each other: {', '.join(names)}")
    for line in broken:
        print(f"limit: {line}")
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
