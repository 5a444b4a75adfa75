"""One run on this machine, on two nodes of a real Slurm and on two of a real Ray: the same weights, bit for bit."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import forks
import pytest
import ray_helpers
import slurm_helpers
from end_to_end import primerl, read_lines, start, until
from run_helpers import write_run

NODES = "[deployment]\nnum_infer_nodes = 1\n"
SLURM, RAY = f"{NODES}[slurm]\nexclusive = false\n", f"{NODES}[ray]\n"
# Each batch is sampled by the weights before it, so that what is sampled follows from the seed; and one sequence at a
# time, since the last bits of sums depend on what is computed with them.
SYNCHRONOUS = ("--orchestrator.max-async-level", "0", "--inference.max-num-seqs", "1", "--seed", "11")
SIZE = ("--max-steps", "3", "--keep-broadcasts")
WAIT_S = 600


@contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    with slurm_helpers.cluster(folder / "cluster") as cluster:
        yield cluster.variables
        until(lambda: cluster.run("squeue", "-h") == "", WAIT_S, "the end of all jobs")


@contextmanager
def ray(folder: Path) -> Iterator[dict[str, str]]:
    with ray_helpers.cluster() as cluster:
        yield cluster.variables


@contextmanager
def here(folder: Path) -> Iterator[dict[str, str]]:
    yield {}


def trained(folder: Path, section: str, cluster: Callable[[Path], object]) -> tuple[list[str], float]:
    """Digests of all versions, and seconds from the command to its first step."""
    folder.mkdir()
    file = write_run(folder)
    file.write_text(file.read_text() + section)
    output = folder / "o"
    with cluster(folder) as variables:  # type: ignore[attr-defined]
        began = time.monotonic()
        run = start(
            output, "@", str(file), "--model.path", str(folder / "tiny"), "--output-dir", str(output), *SYNCHRONOUS,
            *SIZE,
            variables=variables,
        )  # fmt: skip
        try:
            until(
                lambda: read_lines(output / "metrics.jsonl") or run.launcher.poll() is not None,
                WAIT_S,
                "its first step",
            )
            first_s = time.monotonic() - began
            code, printed = run.ended(WAIT_S)
        finally:
            run.kill()
    assert code == 0, printed
    primerl("verify", str(output))
    manifests = [json.loads((output / "broadcasts" / f"step_{k}" / "manifest.json").read_text()) for k in range(4)]
    return [manifest["digest"] for manifest in manifests], first_s


@pytest.mark.end_to_end
@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.skipif(slurm_helpers.missing() is not None, reason=str(slurm_helpers.missing()))
@pytest.mark.skipif(ray_helpers.missing() is not None, reason=str(ray_helpers.missing()))
def test_a_synchronous_run_has_the_same_weights_wherever_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with forks.own_servers():
        found = {
            name: trained(tmp_path / name, section, cluster)
            for name, section, cluster in [("here", "", here), ("slurm", SLURM, slurm), ("ray", RAY, ray)]
        }
    for name, (_, first_s) in found.items():
        print(f"{name}: {first_s:.1f} s from the command to the first step")
    digests = {name: digests for name, (digests, _) in found.items()}
    assert len(set(digests["here"])) == 4
    assert digests["slurm"] == digests["here"]
    assert digests["ray"] == digests["here"]
