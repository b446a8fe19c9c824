"""The counter of hard English, scripts/prose.py: its sentences, and the code that it leaves out."""

import pytest
from prose import READERS, Count, sentences

LONG = "word " * 31


def lengths(ending, text):
    return [len(words) for _, paragraph in READERS[ending](text) for words in sentences(paragraph)]


def test_code_is_no_prose():
    assert lengths(".md", "Save this:\n\n    import a\n\n    import b\n\nThen run it.\n") == [2, 3]
    assert lengths(".md", "Run\n```\nmany words of code\n```\nand `so on` (see [this](page.md#place)).\n") == [1, 4]
    assert lengths(".md", "- An item goes on\n\n    in its second paragraph.\n") == [4, 4]


@pytest.mark.parametrize(("ending", "text", "expected"), [
    (".rs", "/// One sentence. And\n/// another one.\nfn code() {}\n// A third.\n", [2, 3, 2]),
    (".rs", "//! Usage:\n//!\n//!     program FILE...\n//!\n//! It ends.\n", [1, 2]),
    (".py", '"""A sentence\nof a module."""\nx = 1  # about x\ny = 2  # about y\n# One comment\n# in two lines.\n', [5, 2, 2, 5]),
    (".sh", "#!/bin/sh\n# What it does.\n#   script.sh      does all\n#   script.sh -n   does nothing\n", [3, 2, 2, 3, 2]),
])
def test_comments_are_read(ending, text, expected):
    assert lengths(ending, text) == expected


@pytest.mark.parametrize(("text", "is_good"), [
    ("word " * 30 + ". " + "Plain words. " * 300, True),
    (LONG + ". " + "Plain words. " * 3, False),
    (LONG * 2 + ". " + "Plain words are good. " * 300, False),
    ("What is meant is unclear. " + "Plain words are good. " * 10, False),
    ("What is meant is unclear. " + "Plain words are good. " * 300, True),
])
def test_limits(text, is_good):
    count = Count()
    for words in sentences(text):
        count.add(words)
    assert count.is_good() is is_good
