"""Everything that can be known to be wrong before a process starts or a file is written."""
