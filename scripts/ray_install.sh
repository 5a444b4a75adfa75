#!/usr/bin/env bash
# Ray, for tests/test_ray_runs.py and test_ray_jobs.py, into .venv; constraints.txt leaves it out. The tests start clusters
# of their own. `default` brings the server of `ray job submit`.
set -euo pipefail
cd "$(dirname "$0")/.."
uv=.venv/bin/uv
test -x "$uv" || { echo "ray_install.sh: there is no .venv; run make build first" >&2; exit 1; }
# Ray's own dependencies stay as they are pinned, where they are.
sed -e 's/ *\\$//' -e '/^ *--hash/d' constraints.txt > .make/versions.txt
"$uv" pip install --quiet --python .venv/bin/python -c .make/versions.txt "ray[default]==2.60.0"
.venv/bin/python -c 'import ray; print("ray", ray.__version__)'
