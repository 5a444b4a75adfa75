"""HTTP between the processes of a run. Standard library only, but for `prometheus`."""
