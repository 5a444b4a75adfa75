"""`verify` agrees with an engine that is written here token by token, and disagrees with everything else."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import EOS, VOCABULARY
from primerl._core import GrammarMasks
from primerl.models.tiny import write_model
from primerl.train.checkpoint.model_folder import save_model
from primerl.train.model.packed_model import load_model
from primerl.train.objective.bitmasks import unpacked
from primerl.train.weights.publish import WeightsPublisher
from primerl.verify import VerifyError, main, verify
from primerl.verify.report import ranges
from safetensors.torch import load_file, save_file
from train_helpers import encode_batch
from transformers import AutoModelForCausalLM, DynamicCache

VERSIONS = 4


@dataclass
class Sample:
    """Columns of one sample, built turn by turn by `Engine.turn`."""

    rollout: int
    temperature: float = 1.0
    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    extra: dict[str, list[float]] = field(default_factory=dict)
    environment: int = 0

    def prompt(self, token_ids: list[int]) -> None:
        for token in token_ids:
            self._append(token, 0, 0.0, -1)

    def _append(self, token: int, mask: int, logprob: float, version: int) -> None:
        self.token_ids.append(token)
        self.loss_mask.append(mask)
        self.logprobs.append(logprob)
        self.versions.append(version)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def sampled(self) -> list[int]:
        return [token for token, mask in zip(self.token_ids, self.loss_mask, strict=True) if mask]

    def columns(self) -> dict[str, list[Any]]:
        return {
            "token_ids": self.token_ids,
            "loss_mask": self.loss_mask,
            "logprobs": self.logprobs,
            "advantages": [0.5] * len(self),
            "versions": self.versions,
            "temperatures": [self.temperature] * len(self),
        }


class Engine:
    """Samples one token at a time, and keeps its KV cache when the weights change."""

    def __init__(self, folder: Path, broadcasts: Path) -> None:
        self.models = []
        for version in range(VERSIONS):
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
            model.load_state_dict(load_file(broadcasts / f"step_{version}" / "model.safetensors"), strict=False)
            self.models.append(model.eval())
        self.generator = torch.Generator().manual_seed(5)

    @torch.inference_mode()
    def turn(self, sample: Sample, *plan: tuple[int, int]) -> None:
        """Sample a turn: for each (version, n) of the plan, n tokens under that version."""
        inputs, cache = sample.token_ids[:], DynamicCache()
        for version, count in plan:
            for _ in range(count):
                output = self.models[version](input_ids=torch.tensor([inputs]), past_key_values=cache, use_cache=True)
                logprobs = (output.logits[0, -1] / sample.temperature).log_softmax(-1)
                token = int(torch.multinomial(logprobs.exp(), 1, generator=self.generator))
                sample._append(token, 1, float(logprobs[token]), version)
                inputs = [token]

    def random_prompt(self, length: int) -> list[int]:
        return torch.randint(0, 256, (length,), generator=self.generator).tolist()


@dataclass
class Run:
    folder: Path
    engine: Engine
    samples: list[Sample]

    def write_spool(self) -> None:
        """Two steps, the first of two ranks."""
        half, rest = self.samples[:4], self.samples[4:]
        batches = {
            "step_10/rank_0": encode_batch(10, [half[:2], half[2:3]], ranks=2),
            "step_10/rank_1": encode_batch(10, [half[3:], []], rank=1, ranks=2),
            "step_9/rank_0": encode_batch(9, [rest]),
        }
        for name, body in batches.items():
            path = self.folder / "spool" / f"{name}.msgpack"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(body)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Engine]:
    """A run's folder with four policies that differ clearly, and the engine that has them."""
    folder = tmp_path_factory.mktemp("run")
    write_model(folder / "model", seed=1)
    model = load_model(folder / "model")
    publisher = WeightsPublisher(folder, keep_last=2, keep_all=True)
    torch.manual_seed(0)
    for version in range(VERSIONS):
        publisher.publish(model, version)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
    save_model(model, folder / "model", folder, 9)
    return folder, Engine(folder / "model", folder / "broadcasts")


@pytest.fixture
def run(published: tuple[Path, Engine], tmp_path: Path) -> Run:
    source, engine = published
    for name in ("weights", "broadcasts"):
        (tmp_path / name).mkdir()
        for path in (source / name).iterdir():
            if path.is_dir():
                (tmp_path / name / path.name).mkdir()
                for file in path.iterdir():
                    (tmp_path / name / path.name / file.name).write_bytes(file.read_bytes())
    turns: list[tuple[float, list[list[tuple[int, int]]]]] = [
        (1.0, [[(0, 9)]]),
        (0.7, [[(2, 1), (3, 6)]]),  # crosses an update after its first token
        (1.0, [[(0, 3), (1, 4), (3, 2)]]),  # crosses twice, skipping a version
        (1.0, [[(1, 5)], [(1, 6)]]),  # two turns of one version
        (1.3, [[(0, 4)], [(1, 3), (2, 5)], [(2, 2)]]),  # three turns, the second one crosses
        (1.0, [[(3, 30)]]),
        (1.0, [[(0, 2), (1, 1)], [(1, 1)]]),
    ]
    engine.generator.manual_seed(5)
    samples = []
    for rollout, (temperature, plans) in enumerate(turns):
        sample = Sample(rollout, temperature)
        for plan in plans:
            sample.prompt(engine.random_prompt(3 + 4 * rollout))
            engine.turn(sample, *plan)
        sample.prompt(engine.random_prompt(rollout % 2))  # what follows the last turn is never forwarded
        samples.append(sample)
    untrained = Sample(99)
    untrained.prompt([1, 2, 3])
    result = Run(tmp_path, engine, [*samples, untrained])
    result.write_spool()
    return result


SPEC = json.dumps(
    {
        "structured_outputs": {"json": {"type": "array", "items": {"enum": ["a", "bc"]}, "minItems": 2, "maxItems": 4}},
        "ends": [EOS],
    }
)


@torch.inference_mode()
def structured(engine: Engine, sample: Sample, masks: GrammarMasks, plan: list[int]) -> tuple[int, int]:
    """An answer by SPEC, its tokens sampled by the versions of the plan in turn, the last of them to its end. Returns
    where it begins and ends."""
    begin, inputs, cache = len(sample), sample.token_ids[:], DynamicCache()
    while not sample.token_ids[begin:] or sample.token_ids[-1] != EOS:
        tokens = sample.token_ids[begin:]
        version = plan[min(len(tokens), len(plan) - 1)]
        output = engine.models[version](input_ids=torch.tensor([inputs]), past_key_values=cache, use_cache=True)
        logits = output.logits[0, -1]
        bits = torch.frombuffer(bytearray(masks.after(SPEC, tokens)), dtype=torch.uint8)
        allowed = unpacked(bits.unsqueeze(0), len(logits))[0]
        logprobs = (logits.masked_fill(~allowed, -torch.inf) / sample.temperature).log_softmax(-1)
        token = int(torch.multinomial(logprobs.exp(), 1, generator=engine.generator))
        sample._append(token, 1, float(logprobs[token]), version)
        inputs = [token]
    return begin, len(sample)


@pytest.mark.parametrize("plan", [[0], [1, 1, 2]])
def test_structured_outputs_are_replayed(run: Run, plan: list[int]) -> None:
    masks = GrammarMasks(run.folder / "weights" / "step_9", VOCABULARY)
    samples, runs = [], []
    for rollout, temperature in enumerate((1.0, 0.7)):
        sample = Sample(rollout, temperature)
        sample.prompt(run.engine.random_prompt(6))
        run.engine.turn(sample, (plan[0], 3))
        sample.prompt(run.engine.random_prompt(2))
        begin, end = structured(run.engine, sample, masks, plan)
        before = sum(map(len, samples))
        runs.append([before + begin, before + end, 0])
        samples.append(sample)
    grammars = {"kinds": [{"masks": masks.identity, "spec": SPEC}], "runs": runs}
    path = run.folder / "spool" / "step_10" / "rank_0.msgpack"
    path.write_bytes(encode_batch(10, [samples], grammars={0: grammars}))
    report = verify(run.folder)
    assert report.passed, report
    assert report.max_difference < 1e-5
    assert report.structured == sum(end - begin for begin, end, _ in runs)
    assert f"{report.structured} tokens sampled by the grammar" in str(report)
    # Without the grammars the same numbers are of another distribution.
    path.write_bytes(encode_batch(10, [samples]))
    assert not verify(run.folder).passed
    other = {"kinds": [{"masks": "another/library", "spec": SPEC}], "runs": runs}
    path.write_bytes(encode_batch(10, [samples], grammars={0: other}))
    with pytest.raises(VerifyError, match="another/library"):
        verify(run.folder)


def test_agrees_with_an_engine_that_keeps_its_cache(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    report = verify(run.folder)
    assert report.passed
    assert report.max_difference < 1e-5
    assert report.tokens == sum(len(sample.sampled) for sample in run.samples)
    assert (report.samples, report.steps, report.versions, report.crossed) == (8, 2, 4, 4)
    assert main(run.folder) == 0
    assert capsys.readouterr().out.endswith("token-exact\n")


def sampled_at(sample: Sample, index: int) -> int:
    """Index within the sample of its n-th sampled token."""
    return [position for position, mask in enumerate(sample.loss_mask) if mask][index]


def wrong_logprob(run: Run) -> None:
    sample = run.samples[5]
    sample.logprobs[sampled_at(sample, 17)] -= 0.004


def wrong_token(run: Run) -> None:
    sample = run.samples[0]
    sample.token_ids[sampled_at(sample, 3)] ^= 1


def later_boundary(run: Run) -> None:
    """The weights changed one token earlier than recorded."""
    sample = run.samples[2]
    sample.versions[sampled_at(sample, 3)] = 0


def one_version_for_all(run: Run) -> None:
    """As if the version were that of the end of the request."""
    sample = run.samples[1]
    for index in range(7):
        sample.versions[sampled_at(sample, index)] = 3


def wrong_temperature(run: Run) -> None:
    run.samples[4].temperature = 1.0


def wrong_prompt(run: Run) -> None:
    run.samples[3].token_ids[0] ^= 1


@pytest.mark.parametrize(
    ("harm", "rollout"),
    [
        (wrong_logprob, 5),
        (wrong_token, 0),
        (later_boundary, 2),
        (one_version_for_all, 1),
        (wrong_temperature, 4),
        (wrong_prompt, 3),
    ],
)
def test_sees_what_is_not_exact(
    run: Run, capsys: pytest.CaptureFixture[str], harm: Callable[[Run], None], rollout: int
) -> None:
    harm(run)
    run.write_spool()
    report = verify(run.folder)
    assert not report.passed
    assert report.worst is not None
    assert report.worst.rollout == rollout
    assert main(run.folder) == 1
    assert "NOT token-exact" in capsys.readouterr().out


def test_worst_token_is_named(run: Run) -> None:
    wrong_logprob(run)
    run.write_spool()
    worst = verify(run.folder).worst
    assert worst is not None
    assert (worst.step, worst.rollout, worst.version) == (9, 5, 3)
    assert worst.token == sampled_at(run.samples[5], 17)
    assert worst.reference - worst.engine == pytest.approx(0.004, abs=1e-4)


def test_recomputing_the_cache_under_new_weights_is_not_the_same(run: Run) -> None:
    """The engine of this test would fail its own verification if it forgot its cache at an update."""
    sample = Sample(7)
    sample.prompt([10, 20, 30, 40])
    run.engine.turn(sample, (0, 4))
    run.engine.turn(sample, (3, 4))  # a new turn: the cache is made anew, under version 3
    run.samples[0] = sample
    run.write_spool()
    assert verify(run.folder).worst.rollout == 7  # type: ignore[union-attr]
    assert not verify(run.folder).passed


def test_missing_weights_are_listed(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    for version in (1, 3):
        (run.folder / "broadcasts" / f"step_{version}").rename(run.folder / f"gone_{version}")
    assert main(run.folder) == 2
    message = capsys.readouterr().err
    assert "lacks the weights of policy versions 1, 3" in message
    assert "--keep-broadcasts" in message


def test_steps_that_cannot_be_checked_are_counted(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert "NOT checked" not in str(verify(run.folder))
    (run.folder / "metrics.jsonl").write_text('{"step": 8}\n{"step": 9}\n')
    kept = {int(path.name.removeprefix("step_")) for path in (run.folder / "spool").iterdir()}
    assert main(run.folder) == 0
    said = capsys.readouterr().out
    assert f"NOT checked: {9 - len(kept & set(range(1, 10)))} of the 9 steps that were trained" in said
    assert "--keep-broadcasts" in said


def test_changed_weights_are_not_believed(run: Run) -> None:
    file = run.folder / "broadcasts" / "step_1" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][0] += 1e-3
    save_file(tensors, file)
    with pytest.raises(VerifyError, match=r"step_1: the weights have digest [0-9a-f]{32}, manifest.json says"):
        verify(run.folder)


def test_damaged_and_empty_spools_are_named(run: Run, tmp_path: Path) -> None:
    (run.folder / "spool" / "step_9" / "rank_0.msgpack").write_bytes(b"\x81")
    with pytest.raises(VerifyError, match=r"rank_0\.msgpack: not a batch"):
        verify(run.folder)
    # A folder that was mistyped.
    with pytest.raises(VerifyError, match="holds no trained sample; give the output_dir of a run that has trained"):
        verify(tmp_path / "nowhere")
    (tmp_path / "trained" / "configs").mkdir(parents=True)
    (tmp_path / "trained" / "configs" / "rl.toml").write_text("max_steps = 4\n")
    with pytest.raises(VerifyError, match=r"holds no trained sample; they are deleted .* start one with that"):
        verify(tmp_path / "trained")
    kept = tmp_path / "kept" / "configs"
    kept.mkdir(parents=True)
    (kept / "rl.toml").write_text("keep_broadcasts = true\n")
    with pytest.raises(VerifyError, match="holds no trained sample; give the output_dir of a run that has trained"):
        verify(kept.parent)


def test_model_config_comes_from_the_trainers_settings_without_a_checkpoint(run: Run, published: Any) -> None:
    (run.folder / "weights" / "step_9").rename(run.folder / "gone")
    with pytest.raises(VerifyError, match="no model config"):
        verify(run.folder)
    (run.folder / "configs").mkdir()
    (run.folder / "configs" / "trainer.toml").write_text(f'[model]\npath = "{published[0] / "model"}"\n')
    assert verify(run.folder).passed


@pytest.mark.parametrize(
    ("numbers", "text"), [([4], "4"), ([1, 2], "1-2"), ([0, 1, 2, 5, 7, 8], "0-2, 5, 7-8"), (range(57), "0-56")]
)
def test_missing_versions_are_named_in_one_line(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text
