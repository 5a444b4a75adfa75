"""What a run left on disk, read again."""
