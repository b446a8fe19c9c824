"""Reproduces the figures of the papers whose systems are profiles of stepfs: one module per paper, and one for stepfs.

Each module has three functions. `measure(lab)` gives the results (None for a figure that was not run). `markdown(found)` gives
its lines of docs/COMPARISON.md. `pictures(found, out)` draws.
"""
