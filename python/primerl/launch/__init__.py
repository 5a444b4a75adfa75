"""Starts the processes of a run, watches them, and leaves none behind."""
