"""Where a run starts from: its own progress, an earlier checkpoint, or a store."""
