"""The pages of the site, in mdBook's form, and a check of its links. scripts/docs.sh calls it.

    site.py pages DIR    writes the pages and their order, which docs/README.md gives
    site.py check DIR    exits with 1 if a link in the site leads nowhere
"""

import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parent.parent
# Pages at the root of the repository, with their titles.
OF_ROOT = {"README.md": "stepfs", "CONTRIBUTING.md": "Contributing", "SECURITY.md": "Security", "CHANGELOG.md": "Changes"}
BOOK = """[book]
title = "stepfs"
language = "en"
src = "src"

[output.html]
default-theme = "light"
smart-punctuation = false
"""


def title(path):
    return re.search(r"^# (.*)", path.read_text(), re.MULTILINE)[1].replace("`", "")


def summary(source):
    """The order of the pages: those of docs/README.md by its sections, each followed by the pages below its folder."""
    lines = ["# Summary", "", "[stepfs](index.md)", "[The documents](docs/index.md)"]
    below = {"QUALITY.md": sorted((source / "docs/study").glob("*.md"))}
    for line in (source / "docs/index.md").read_text().split("\n"):
        if line.startswith("## "):
            lines += ["", f"# {line[3:]}", ""]
        elif row := re.match(r"\| \[.*?\]\((.*?)\)", line):
            lines.append(f"- [{title(source / 'docs' / row[1])}](docs/{row[1]})")
            lines += [f"  - [{title(page)}]({page.relative_to(source)})" for page in below.get(row[1], [])]
    lines += ["", "# The project", "", *(f"- [{name}]({path})" for path, name in OF_ROOT.items() if path != "README.md")]
    return "\n".join(lines) + "\n"


def pages(book):
    shutil.rmtree(book, ignore_errors=True)
    source = book / "src"
    listed = subprocess.run(["git", "ls-files", "docs", *OF_ROOT], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in listed.split():
        # A directory's page is index.html, so its source is index.md, also in links.
        page = source / name.replace("README.md", "index.md")
        page.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".md"):
            page.write_text(re.sub(r"README\.md([)#])", r"index.md\1", (ROOT / name).read_text()))
        elif name.endswith(".png"):
            shutil.copy(ROOT / name, page)
    (source / "SUMMARY.md").write_text(summary(source))
    (book / "book.toml").write_text(BOOK)


class Page(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, path):
        super().__init__()
        self.links, self.anchors = [], set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.anchors.add(attributes.get("id"))
        self.links += [attributes[name] for name in ("href", "src") if attributes.get(name)]


def check(site):
    found = {path: Page(path) for path in sorted(site.rglob("*.html"))}
    wrong, count = [], 0
    for path, page in found.items():
        # Links of this page are relative to the root of the site's server.
        for link in page.links if path.name != "404.html" else []:
            link = urlsplit(link)
            if link.scheme or link.netloc:
                continue
            count += 1
            target = (path.parent / unquote(link.path)).resolve() if link.path else path
            if target.is_dir():
                target /= "index.html"
            is_there = target.exists() and (not link.fragment or target not in found or unquote(link.fragment) in found[target].anchors)
            if not is_there:
                wrong.append(f"{path.relative_to(site)}: {link.geturl()}")
    print("\n".join(wrong) or f"{len(found)} pages, {count} links, none leads nowhere")
    return bool(wrong) or not count


if __name__ == "__main__":
    action, directory = sys.argv[1], Path(sys.argv[2]).resolve()
    sys.exit({"pages": pages, "check": check}[action](directory))
