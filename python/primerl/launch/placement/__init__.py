"""Where the processes of a run are started: a protocol, and this machine's implementation of it."""
