"""Placement on the nodes of a Slurm job: one `srun` step a role, with an agent of ours in each of its tasks."""
