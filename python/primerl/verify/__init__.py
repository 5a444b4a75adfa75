"""`primerl verify`: recompute the log-probability of every sampled token of a run with the weights that sampled it.

Reference: `transformers` in fp32, from the published weights alone; nothing of the engine or of the trainer's packed
attention takes part. The spool holds what was trained (token ids, the engine's log-probabilities, the version of each
token), `broadcasts/` the weights of each version (a run keeps all of them with `trainer.weights.keep_all`).

A turn whose request crossed a weight update keeps the KV cache of its earlier tokens, so the reference does too:

    tokens     p0 p1 p2 | a0 a1 a2 END      prompt, then sampled tokens
    versions             3  3  4  4         version that sampled each token
    forwarded under  3: p0 p1 p2 a0         the input before a token runs under the token's version,
                     4: a1 a2               the prompt under that of the first; earlier KV is kept

Log-probabilities are those of what was sampled from: at the recorded temperature, among the tokens that the recorded
truncation keeps of the reference's own.

Turns are independent of each other: each one's prompt, earlier turns included, is computed under its first version.
Turns are forwarded in batches of one version, versions in ascending order, so each version is loaded once.
"""

from __future__ import annotations

import json
import re
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from primerl.launch.resume.position import trained_steps
from primerl.train.adapters.files import BASE_DIGEST
from primerl.train.data.batch import Batch, BatchError, decode_batch
from primerl.train.loss.grammar import Allowed, Replay
from primerl.train.loss.truncation import Truncation
from primerl.train.weights.publish import manifest
from primerl.verify.reference import adapted_model, truncated_logprobs
from primerl.verify.report import MAX_LIMIT, Difference, Report

KeyValues = list[tuple[Tensor, Tensor]]
"""Of each layer, keys and values of one turn's forwarded tokens: [KV heads, tokens, head size]."""


class VerifyError(Exception):
    """The run cannot be verified: something it needs is missing or damaged. The message names it."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Inputs `begin`..`end` (exclusive) of a turn, forwarded under `version`."""

    version: int
    begin: int
    end: int


@dataclass(slots=True)
class Turn:
    """Tokens up to the end of one turn, and how they were forwarded. A sample of one version is one `Turn` with the
    targets of all its turns: its prompts are then the same computation."""

    step: int
    rollout: int
    token_ids: Tensor  # [n] int64, up to the last target
    targets: Tensor  # [m] int64, indices of the sampled tokens, ascending
    logprobs: Tensor  # [m] fp32, the engine's
    temperatures: Tensor  # [m] fp32
    truncation: Truncation | None  # [m]
    allowed: Allowed | None  # [m]
    segments: list[Segment]
    done: int = 0
    """Segments forwarded so far."""
    cache: KeyValues = field(default_factory=list)


def main(output_dir: str | Path) -> int:
    """Verify a run and print the report. Returns the exit code: 0 exact, 1 not exact, 2 cannot be verified."""
    try:
        report = verify(output_dir)
    except VerifyError as error:
        print(f"primerl verify: {error}", file=sys.stderr)
        return 2
    print(report)
    return 0 if report.passed else 1


def verify(output_dir: str | Path) -> Report:
    """Recompute every sampled token in the spool of a run.

    Raises:
        VerifyError: no spool, a damaged one, missing or damaged weights, or a model this reference cannot run.
    """
    started = time.perf_counter()
    folder = Path(output_dir)
    report = Report()
    turns = _read_spool(folder, report)
    report.crossed = sum(len(turn.segments) > 1 for turn in turns)
    needed = sorted({segment.version for turn in turns for segment in turn.segments})
    report.versions = len(needed)
    missing = [version for version in needed if not (folder / "broadcasts" / f"step_{version}").is_dir()]
    if missing:
        raise VerifyError(
            f"{folder / 'broadcasts'} lacks the weights of policy versions {', '.join(map(str, missing))}; "
            "run with --keep-broadcasts to keep them"
        )
    reference = Reference(folder)
    with torch.inference_mode():
        _forward_all(turns, reference, report)
    report.seconds = time.perf_counter() - started
    return report


def _read_spool(folder: Path, report: Report) -> list[Turn]:
    paths = sorted(
        (folder / "spool").glob("step_*/rank_*.msgpack"),
        key=lambda path: tuple(int(number) for number in re.findall(r"\d+", f"{path.parent.name} {path.name}")),
    )
    replay = Replay(_tokenizer_folder(folder))
    turns: list[Turn] = []
    steps = set()
    for path in paths:
        try:
            batch = decode_batch(path.read_bytes())
        except (OSError, BatchError) as error:
            raise VerifyError(f"{path}: {error}") from error
        steps.add(batch.step)
        for sample in _samples(batch, replay):
            report.samples += 1
            turns += sample
    report.steps = len(steps)
    report.trained = trained_steps(folder)
    report.unchecked = len(set(range(1, report.trained + 1)) - steps)
    if not turns and report.samples:
        raise VerifyError(
            f"{folder} trained what a teacher wrote, and nothing that its policy sampled: no engine gave it "
            "log-probabilities that could be verified"
        )
    if not turns:
        raise VerifyError(f"{folder / 'spool'} holds no trained sample; give the output_dir of a run")
    return turns


def _samples(batch: Batch, replay: Replay) -> Iterator[list[Turn]]:
    for micro_batch in batch.micro_batches:
        try:
            allowed = replay.allowed(micro_batch)
        except BatchError as error:
            raise VerifyError(str(error)) from error
        start = 0
        for length, rollout in zip(micro_batch.sequence_lengths, micro_batch.rollouts, strict=True):
            columns = slice(start, start + length)
            yield _turns(
                batch.step,
                rollout,
                micro_batch.token_ids[columns].long(),
                micro_batch.loss_mask[columns].nonzero().squeeze(1),
                micro_batch.versions[columns],
                micro_batch.logprobs[columns],
                micro_batch.temperatures[columns],
                None if micro_batch.truncation is None else micro_batch.truncation[columns],
                None if allowed is None else allowed[columns],
            )
            start += length


def _turns(
    step: int,
    rollout: int,
    token_ids: Tensor,
    trained: Tensor,
    versions: Tensor,
    logprobs: Tensor,
    temperatures: Tensor,
    truncation: Truncation | None,
    allowed: Allowed | None,
) -> list[Turn]:
    """The turns of one sample, each a contiguous run of trained tokens; a single one if all have one version."""
    if not trained.numel():
        return []
    if bool((versions[trained] == versions[trained[0]]).all()):
        runs = [trained]
    else:
        gaps = (trained.diff() > 1).nonzero().squeeze(1) + 1
        runs = list(torch.tensor_split(trained, gaps))
    turns = []
    for targets in runs:
        end = int(targets[-1]) + 1
        turns.append(
            Turn(
                step,
                rollout,
                token_ids[:end],
                targets,
                logprobs[targets],
                temperatures[targets],
                None if truncation is None else truncation[targets],
                None if allowed is None else allowed[targets],
                _segments(targets.tolist(), versions[targets].tolist()),
            )
        )
    return turns


def _segments(targets: list[int], versions: list[int]) -> list[Segment]:
    """Input i - 1 runs under the version that sampled token i, the prompt under that of the first token."""
    segments = []
    begin, current = 0, versions[0]
    for target, version in zip(targets, versions, strict=True):
        if version != current:
            segments.append(Segment(current, begin, target - 1))
            begin, current = target - 1, version
    segments.append(Segment(current, begin, targets[-1]))
    return segments


class Reference:
    """The run's model in `transformers`, fp32, with the weights of one version at a time."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self._broadcasts = folder / "broadcasts"
        self._config = AutoConfig.from_pretrained(_model_folder(folder), local_files_only=True)
        self._base = _trained_from(folder) or _model_folder(folder)
        kinds = set(getattr(self._config.get_text_config(), "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"}:
            raise VerifyError(f"models with {', '.join(sorted(kinds))} layers cannot be verified")
        self._kind: Any = type(AutoModelForCausalLM.from_config(self._config))  # type: ignore[no-untyped-call]
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def load(self, version: int) -> Any:
        """The model of `version`, its weights checked against their manifest."""
        folder = self._broadcasts / f"step_{version}"
        try:
            recorded = json.loads((folder / "manifest.json").read_bytes())
            tensors: dict[str, Tensor] = {}
            for file in recorded["files"]:
                tensors |= load_file(folder / file["name"])
        except (OSError, ValueError, KeyError) as error:
            raise VerifyError(f"{folder}: {type(error).__name__}: {error}") from error
        found = manifest(version, tensors, "", 0)["digest"]
        if found != recorded["digest"] or recorded["policy_version"] != version:
            raise VerifyError(f"{folder}: the weights have digest {found}, manifest.json says {recorded['digest']}")
        if BASE_DIGEST in tensors:
            try:
                return adapted_model(self._base, folder, tensors).to(self.device).eval()
            except ValueError as error:
                raise VerifyError(f"{folder}: {error}") from None
        model, loaded = self._kind.from_pretrained(
            None,
            config=self._config,
            state_dict=tensors,
            dtype=torch.float32,
            attn_implementation="sdpa",
            output_loading_info=True,
        )
        problems = {kind: sorted(names) for kind, names in loaded.items() if names}
        if problems:
            raise VerifyError(f"{folder}: the weights do not fit the model: {problems}")
        return model.to(self.device).eval()

    @property
    def vocabulary(self) -> int:
        return int(self._config.get_text_config().vocab_size)


def _model_folder(folder: Path) -> Path:
    """A folder with the run's `config.json`: its checkpoint, or the model it started from."""
    candidates = sorted((folder / "weights").glob("step_*"), key=lambda path: path.stat().st_mtime, reverse=True)
    trained_from = _trained_from(folder)
    candidates += [] if trained_from is None else [trained_from]
    for candidate in candidates:
        if (candidate / "config.json").is_file():
            return candidate
    raise VerifyError(f"no model config: neither {folder}/weights/step_N nor the model folder in {folder}/configs")


def _tokenizer_folder(folder: Path) -> Path:
    """The folder whose tokenizer engines and trainer had, by which structured outputs are replayed."""
    checkpoints = sorted((folder / "weights").glob("step_*/tokenizer.json"), key=lambda path: path.stat().st_mtime)
    return _trained_from(folder) or (checkpoints[-1].parent if checkpoints else folder)


def _trained_from(folder: Path) -> Path | None:
    """The model folder that the run's trainer began with."""
    settings = folder / "configs" / "trainer.toml"
    if not settings.is_file():
        return None
    return Path(tomllib.loads(settings.read_text(encoding="utf-8"))["model"]["path"])


def _forward_all(turns: list[Turn], reference: Reference, report: Report) -> None:
    ready: dict[int, list[Turn]] = {}
    for turn in turns:
        ready.setdefault(turn.segments[0].version, []).append(turn)
    while ready:
        version = min(ready)
        model = reference.load(version)
        for batch in _batches(ready.pop(version), reference.vocabulary):
            _forward(model, batch, report)
            for turn in batch:
                turn.done += 1
                if turn.done < len(turn.segments):
                    ready.setdefault(turn.segments[turn.done].version, []).append(turn)
                else:
                    turn.cache = []


def _batches(turns: list[Turn], vocabulary: int) -> Iterator[list[Turn]]:
    """Turns of similar lengths together, so many that their logits, padding included, take about 256 MB."""
    limit = max(256, 2**26 // vocabulary)

    def shape(turn: Turn) -> tuple[int, int]:
        segment = turn.segments[turn.done]
        return segment.begin, segment.end - segment.begin

    batch: list[Turn] = []
    longest = 0
    for turn in sorted(turns, key=shape):
        longest = max(longest, sum(shape(turn)))
        # A first segment has no past: it is kept apart from later ones, and needs no mask.
        if batch and (longest * (len(batch) + 1) > limit or (shape(turn)[0] > 0) != (shape(batch[0])[0] > 0)):
            yield batch
            batch, longest = [], sum(shape(turn))
        batch.append(turn)
    yield batch


def _forward(model: Any, turns: list[Turn], report: Report) -> None:
    """Forward the next segment of each turn: past keys and values on the left, padded at their left; new tokens on the
    right, padded at their right, where no real token sees the padding."""
    from transformers import DynamicCache

    segments = [turn.segments[turn.done] for turn in turns]
    past = max(segment.begin for segment in segments)
    new = max(segment.end - segment.begin for segment in segments)
    token_ids = torch.zeros(len(turns), new, dtype=torch.int64)
    visible = torch.zeros(len(turns), past + new, dtype=torch.int64)
    positions = torch.zeros(len(turns), new, dtype=torch.int64)
    for row, (turn, segment) in enumerate(zip(turns, segments, strict=True)):
        count = segment.end - segment.begin
        token_ids[row, :count] = turn.token_ids[segment.begin : segment.end]
        visible[row, past - segment.begin : past + count] = 1
        positions[row] = torch.arange(new) + segment.begin
    cache: Any = None
    if past:
        cache = DynamicCache(_stack(turns, past))
    elif any(len(turn.segments) > 1 for turn in turns):
        cache = DynamicCache()
    # Beyond a row's last real token positions may pass the model's maximum; they are only padding.
    positions.clamp_(max=max(segment.end for segment in segments) - 1)
    output = model(
        input_ids=token_ids.to(model.device),
        attention_mask=visible.to(model.device) if past else None,
        position_ids=positions.to(model.device),
        past_key_values=cache,
        use_cache=cache is not None,
    )
    logits = output.logits.float().cpu()
    for row, (turn, segment) in enumerate(zip(turns, segments, strict=True)):
        if cache is not None and turn.done + 1 < len(turn.segments):
            real = slice(past - segment.begin, past + segment.end - segment.begin)
            turn.cache = [
                (layer.keys[row, :, real].clone(), layer.values[row, :, real].clone()) for layer in cache.layers
            ]
        _compare(turn, segment, logits[row], report)


def _stack(turns: list[Turn], past: int) -> KeyValues:
    """Each layer's keys and values of all turns, [turns, KV heads, past, head size], zeros at the left."""

    def padded(tensor: Tensor) -> Tensor:
        return torch.nn.functional.pad(tensor, (0, 0, past - tensor.shape[1], 0))

    layers = range(len(turns[0].cache))
    return [
        (
            torch.stack([padded(turn.cache[layer][0]) for turn in turns]),
            torch.stack([padded(turn.cache[layer][1]) for turn in turns]),
        )
        for layer in layers
    ]


def _compare(turn: Turn, segment: Segment, logits: Tensor, report: Report) -> None:
    """Add the segment's targets to the report; `logits` [new, V] belong to its inputs."""
    own = (turn.targets > segment.begin) & (turn.targets <= segment.end)
    targets = turn.targets[own]
    scaled = logits[targets - 1 - segment.begin] / turn.temperatures[own].unsqueeze(1)
    if turn.allowed is not None:
        scaled = scaled.masked_fill(~turn.allowed[own].masks(scaled.shape[1]), -torch.inf)
        report.structured += int((turn.allowed[own].index > 0).sum())
    engine = turn.logprobs[own]
    reference = scaled.log_softmax(dim=-1).gather(1, turn.token_ids[targets].unsqueeze(1)).squeeze(1)
    if turn.truncation is not None:
        reference = _truncated(scaled, turn.token_ids[targets], turn.truncation[own], engine, report)
    # A value that is not a number must fail the limits, and `inf` does where `nan` would not.
    difference = (engine.double() - reference.double()).abs().nan_to_num(nan=float("inf"))
    report.tokens += len(targets)
    report.sum_difference += float(difference.sum())
    worst = int(difference.argmax())
    if report.worst is None or float(difference[worst]) > report.max_difference:
        report.max_difference = float(difference[worst])
        token = int(targets[worst])
        report.worst = Difference(
            turn.step, turn.rollout, token, segment.version, float(engine[worst]), float(reference[worst])
        )


def _truncated(scaled: Tensor, tokens: Tensor, truncation: Truncation, engine: Tensor, report: Report) -> Tensor:
    """Log-probabilities among the tokens kept. At the edge of the kept set rounding decides: there the engine's own
    decision stands, and is counted."""
    references = []
    columns = (tokens, engine, truncation.top_p, truncation.top_k, truncation.min_p)
    values = zip(*(column.tolist() for column in columns), strict=True)
    for row, (token, own, top_p, top_k, min_p) in zip(scaled, values, strict=True):
        nominal, *moved = truncated_logprobs(row, token, top_p=top_p, top_k=top_k, min_p=min_p)
        nearest = min((nominal, *moved), key=lambda reference: abs(reference - own))
        report.truncated += top_p < 1 or top_k > 0 or min_p > 0
        report.edges += abs(nearest - own) <= MAX_LIMIT < abs(nominal - own)
        references.append(nearest)
    return torch.tensor(references, dtype=torch.float64)
