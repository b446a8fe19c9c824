"""The study of training that goes on from checkpoints of a store: see scripts/resume_study.py."""

import os

# As in gpt.py, and as there before torch is imported: threads that wait must not spin.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
