"""Weights for the engines: files with a manifest, broadcasts, and direct transfers."""
