"""The study of training that resumes from checkpoints of a store: see scripts/resume_study.py."""

import os

# As in gpt.py, and before torch is imported: waiting threads must not spin.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
