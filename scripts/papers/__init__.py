"""The figures of the papers whose systems stepfs has as profiles, measured again: one module per paper, and one for stepfs.

Each module has `measure(lab)`, which gives what was found (None for what was not run), `markdown(found)`, its lines of
docs/COMPARISON.md, and `pictures(found, out)`.
"""
