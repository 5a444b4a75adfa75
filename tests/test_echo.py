"""A run that also learns what the environment says: which tokens, with which weight, and their loss."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest
import tomli_w
from end_to_end import column, primerl
from primerl.train.data.batch import Batch, decode_batch
from run_helpers import CONFIG, write_run
from train_helpers import cross_entropy
from transformers import AutoTokenizer

pytestmark = [
    pytest.mark.end_to_end,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="starts whole runs"),
]
WEIGHT = 0.5


def test_what_the_user_says_to_an_answer_is_learnt(tmp_path: Path) -> None:
    file, output = write_run(tmp_path), tmp_path / "run"
    values = tomllib.loads(CONFIG)
    values |= {"output_dir": str(output), "max_steps": 2, "keep_broadcasts": True, "seq_len": 512}
    values["model"]["path"] = str(tmp_path / "tiny")
    turns = {"split": "train", "min_turns": 3, "max_turns": 3}
    values["orchestrator"] |= {
        "train": {"env": [{"id": "sort-letters", "taskset": turns}]},
        "eval": {"env": []},
        "algorithm": {"echo": {"user": WEIGHT, "tool": 0.0}},
    }
    file.write_text(tomli_w.dumps(values))
    primerl("rl", "@", str(file))
    assert "every invariant holds" in primerl("trace", str(output), "--check")
    batches = [decode_batch(path.read_bytes()) for path in sorted((output / "spool").glob("*/*.msgpack"))]
    assert len(batches) == 2
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tiny")
    said = [text for batch in batches for text in texts(batch, tokenizer)]
    # The first prompt of a rollout is `Sort: ...`; what follows each answer but the last is learnt.
    assert said
    assert all(text.startswith("Add: ") and text[5:].isalpha() for text in said), said
    assert column(output, "loss/ce/mean")[0] == pytest.approx(cross_entropy(tmp_path / "tiny", batches[:1]), rel=1e-4)
    assert "token-exact" in primerl("verify", str(output))


def texts(batch: Batch, tokenizer: AutoTokenizer) -> list[str]:
    """Neighbouring tokens with a weight, as text."""
    found = []
    for micro_batch in batch.micro_batches:
        weights = micro_batch.extra["ce_weights"]
        assert set(weights.unique().tolist()) <= {0.0, WEIGHT}
        assert not (weights * micro_batch.loss_mask).any()
        begins = ((weights > 0) & (weights.roll(1) == 0)).nonzero().squeeze(1).tolist()
        for begin in begins:
            length = int((weights[begin:] == 0).nonzero()[0])
            found.append(tokenizer.decode(micro_batch.token_ids[begin : begin + length]))
    return found
