"""Runs whose steps are of so many tokens."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest
import tomli_w
from end_to_end import primerl, steps_of
from primerl.train.data.batch import Batch, decode_batch
from run_helpers import CONFIG, write_run

pytestmark = [
    pytest.mark.end_to_end,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="starts whole runs"),
]
TOKENS, GROUP, LONGEST = 600, 4, 128


@pytest.mark.parametrize("max_async_level", [0, 2])
def test_a_step_is_full_with_the_group_that_reaches_its_tokens(tmp_path: Path, max_async_level: int) -> None:
    file, output = write_run(tmp_path), tmp_path / "run"
    values = tomllib.loads(CONFIG)
    values |= {"output_dir": str(output), "max_steps": 4, "keep_broadcasts": True}
    values["model"]["path"] = str(tmp_path / "tiny")
    del values["orchestrator"]["batch_size"]
    values["orchestrator"] |= {"token_batch_size": TOKENS, "max_async_level": max_async_level}
    file.write_text(tomli_w.dumps(values))
    primerl("rl", "@", str(file))
    assert steps_of(output) == [1, 2, 3, 4]
    assert "every invariant holds" in primerl("trace", str(output), "--check")
    for path in sorted((output / "spool").glob("*/*.msgpack")):
        batch = decode_batch(path.read_bytes())
        lengths = lengths_of(batch)
        # Whole groups; the last one may reach beyond, and a synchronous step has all that were begun for it.
        assert sum(lengths) >= TOKENS
        assert len(lengths) % GROUP == 0
        if max_async_level:
            assert sum(lengths) < TOKENS + GROUP * LONGEST
    assert "token-exact" in primerl("verify", str(output))


def lengths_of(batch: Batch) -> list[int]:
    return [length for micro_batch in batch.micro_batches for length in micro_batch.sequence_lengths]
