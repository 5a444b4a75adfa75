"""A real Ray on this machine for tests: two nodes, which share the host and have an address of its loopback each.

It installs nothing: `missing()` says what is not there, and tests skip with that (`scripts/ray_install.sh` installs
it). `python tests/ray_helpers.py` is the process that has the cluster, so that Ray's modules, threads and variables are
not the tests' own; Ray's reaper ends all of it with that process. One JSON object a line:

    test -> it      {"kill": address} {"add": address} {"nodes": true}
    it -> test      {"address": "127.0.0.2:port", "dashboard": URL or ""}
                    {"nodes": [[address, free CPUs], ..]}   after each line
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HEAD, SECOND = "127.0.0.2", "127.0.0.3"
CPUS = 6
START_S = 120
VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}


def missing() -> str | None:
    """Why there is no Ray here, as a reason to skip; None where there is one."""
    return None if importlib.util.find_spec("ray") is not None else "no ray here: run scripts/ray_install.sh"


def no_jobs() -> str | None:
    """The same of a server that `ray job submit` talks to."""
    absent = missing()
    if absent is None and importlib.util.find_spec("opencensus") is None:
        absent = "no ray[default] here: run scripts/ray_install.sh"
    return absent


@dataclass
class Cluster:
    process: subprocess.Popen[str]
    folder: Path
    address: str = ""
    dashboard: str = ""
    """URL of the server for jobs, where there is one."""

    @property
    def variables(self) -> dict[str, str]:
        """For programs that are to use this Ray."""
        return {"RAY_ADDRESS": self.address, "RAY_TMPDIR": str(self.folder), **VARIABLES}

    def ask(self, **what: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        return self.hear()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the cluster has ended"
        return dict(json.loads(line))

    def free(self) -> dict[str, float]:
        """Free CPUs by the address of the node."""
        return dict(self.ask(nodes=True)["nodes"])


@contextlib.contextmanager
def cluster(*, takes_jobs: bool = False) -> Iterator[Cluster]:
    # Sockets below it have paths of at most 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="ray.", dir="/tmp"))
    process = subprocess.Popen(
        [sys.executable, __file__, *(["--jobs"] if takes_jobs else [])],
        env={**os.environ, **VARIABLES, "RAY_TMPDIR": str(folder)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        found = Cluster(process, folder)
        told = found.hear()
        found.address, found.dashboard = told["address"], told["dashboard"]
        yield found
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=60)
        process.kill()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    out = os.dup(1)
    os.dup2(2, 1)
    import ray
    from ray.cluster_utils import Cluster as RayCluster

    def tell(**what: Any) -> None:
        os.write(out, json.dumps(what).encode() + b"\n")

    def nodes() -> list[tuple[str, float]]:
        from ray._private import state

        free = state.available_resources_per_node()
        return [
            (one["NodeManagerAddress"], free.get(one["NodeID"], {}).get("CPU", 0.0))
            for one in ray.nodes()
            if one["Alive"]
        ]

    def options(address: str) -> dict[str, Any]:
        return {"node_ip_address": address, "num_cpus": CPUS, "num_gpus": 0, "object_store_memory": 80_000_000}

    takes_jobs = "--jobs" in sys.argv
    head = {"include_dashboard": takes_jobs, **({"dashboard_host": HEAD, "dashboard_port": 0} if takes_jobs else {})}
    made = RayCluster(initialize_head=True, head_node_args={**options(HEAD), **head})
    # Where two nodes share a folder, the second one deletes what was uploaded for a job, and unpacks it again.
    own = {"temp_dir": os.path.join(os.environ["RAY_TMPDIR"], "2")} if takes_jobs else {}
    by_address = {HEAD: made.head_node, SECOND: made.add_node(**options(SECOND), **own)}
    ray.init(address=made.address, log_to_driver=False)
    tell(address=made.address, dashboard=f"http://{made.head_node.webui_url}" if takes_jobs else "")
    for line in sys.stdin:
        request = json.loads(line)
        if "kill" in request:
            made.remove_node(by_address[request["kill"]], allow_graceful=False)
        elif "add" in request:
            by_address[request["add"]] = made.add_node(**options(request["add"]))
        tell(nodes=nodes())
    ray.shutdown()
    made.shutdown()


if __name__ == "__main__":
    main()
