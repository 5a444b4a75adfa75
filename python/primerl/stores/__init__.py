"""The checkpoint store: copies of what runs have saved, beyond their own folders."""
