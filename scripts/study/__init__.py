"""The study of training that goes on from checkpoints of a store: see scripts/resume_study.py."""
