"""A run as a job of Slurm: its script, its submission, what is known of it, and what its launcher does within it.

`script` writes job.sbatch, `submission` checks and submits, `follow` waits for the end, `jobs` asks Slurm, `within` is
for the launcher in the job: addresses, the time limit, requeueing.
"""
