#!/usr/bin/env bash
# Slurm, for tests/test_slurm_runs.py (Debian, Ubuntu; as root). The tests start daemons of their own.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive
if command -v slurmctld slurmd sbatch munged > /dev/null; then
    echo "Slurm is installed: $(slurmctld -V)"
    exit 0
fi
apt-get update -qq
apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge > /dev/null
# Packages of a system with systemd start munge; the tests have a daemon of their own.
service munge stop > /dev/null 2>&1 || true
slurmctld -V
