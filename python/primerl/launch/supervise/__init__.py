"""Processes of a run: started, named, watched, and ended with everything they started."""
