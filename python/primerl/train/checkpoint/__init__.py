"""Checkpoints: the state a training resumes from, and folders that appear whole or not at all."""
