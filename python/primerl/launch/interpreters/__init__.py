"""Interpreters and virtual environments for environments that have their own."""
