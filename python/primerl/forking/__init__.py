"""Processes that start fast: forks of a server that has imported their libraries once.

    owner (launcher)   ── starts, ends with it ──>  fork server of a kind (`server`): imports, then waits
    requester (guard)  ── command, descriptors ──>  fork server ── fork ──> the process, which says that it has begun
                       <── how it ended ──────────

`request` is the requester's half (standard library only: the guard uses it), `server` the server, `preload` what each
kind imports, `servers` the servers of one launch, `popen` a `subprocess.Popen` of a fork. Each process behaves as one
that was started the plain way; where that cannot be had, the server refuses, and the requester starts it the plain way.
"""

is_fork = False
"""Whether this process was forked by a server: its requester's death ends it, while its parent's must not."""
