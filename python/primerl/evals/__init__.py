"""Evaluations apart from training: what they start, and what they write."""
