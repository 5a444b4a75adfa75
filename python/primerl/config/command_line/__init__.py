"""From files and flags to a checked config."""
