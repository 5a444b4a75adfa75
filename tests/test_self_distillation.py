"""Runs in which the policy is its own teacher, having seen a demonstration."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from end_to_end import column, primerl
from primerl.train.data.batch import decode_batch
from run_helpers import CONFIG, write_run
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = [
    pytest.mark.end_to_end,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="starts whole runs"),
]
TEMPLATE = "An expert says {demonstration}."


def write(folder: Path, **orchestrator: Any) -> Path:
    file = write_run(folder)
    values = tomllib.loads(CONFIG)
    values |= {"output_dir": str(folder / "run"), "max_steps": 2, "keep_broadcasts": True}
    values["model"]["path"] = str(folder / "tiny")
    values["inference"]["max_model_len"] = 256
    # More groups at a time than there are idle connections to the engine.
    values["orchestrator"] |= {"training_mode": "opsd", "group_size": 1, "batch_size": 32, **orchestrator}
    file.write_text(tomli_w.dumps(values))
    return file


def test_the_policy_scores_itself_behind_the_demonstration(tmp_path: Path) -> None:
    file, output = write(tmp_path, demonstration={"key": "answer", "template": TEMPLATE}), tmp_path / "run"
    primerl("rl", "@", str(file))
    assert "every invariant holds" in primerl("trace", str(output), "--check")
    first, _ = (decode_batch(path.read_bytes()) for path in sorted((output / "spool").glob("*/*.msgpack")))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tiny")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "tiny", dtype=torch.float32)
    compared = 0
    for micro_batch in first.micro_batches:
        columns = (micro_batch.token_ids, micro_batch.extra["teacher_logprobs"], micro_batch.loss_mask)
        lengths = list(micro_batch.sequence_lengths)
        for ids, given, mask in zip(*(torch.split(values, lengths) for values in columns), strict=True):
            prompt = tokenizer.decode(ids[mask == 0])
            text = prompt.rsplit("<|im_start|>user\n", 1)[1].split("<|im_end|>")[0].split()[-1]
            shown = f"<|im_start|>system\n{TEMPLATE.format(demonstration=f'<r>{text[::-1]}</r>')}<|im_end|>\n"
            before = torch.tensor(tokenizer(shown, add_special_tokens=False)["input_ids"])
            whole = torch.cat([before, ids.long()])
            with torch.no_grad():
                logprobs = model(whole[None]).logits[0, :-1].log_softmax(-1)
            own = logprobs.gather(1, whole[1:, None]).squeeze(1)[len(before) :]
            torch.testing.assert_close(given[1:], own, atol=1e-4, rtol=1e-4)
            compared += int(mask.sum())
    assert compared > 20
    assert len(column(output, "loss/ref_kl/mean")) == 2
    assert "token-exact" in primerl("verify", str(output))


def test_an_example_without_a_demonstration_ends_the_run_with_where_it_was_looked_for(tmp_path: Path) -> None:
    said = primerl("rl", "@", str(write(tmp_path)), code=1)
    assert "needs a demonstration as text under 'demonstration'" in said
    assert "orchestrator.demonstration.key names another place" in said
