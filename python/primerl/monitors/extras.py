"""Samples and distributions of a step, made once, and kept until everybody has them: `monitor/extras/step_<k>.json`.

Samples are read from the journal, whose oldest events go when it has grown too large: so they are made when the step is
over, whether the services can be reached or not.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from primerl._core import PrimerlError, inspect_samples
from primerl.config.process_files.files import write_text
from primerl.config.schema.monitors import MonitorConfig, MonitorEntry
from primerl.monitors.monitor import Distribution, Sample
from primerl.monitors.records import Tail

log = logging.getLogger(__name__)

ATTEMPTS = 20
"""How often the journal is asked for a step before the step is reported without samples."""


class Extras:
    """The extras of one run; not for several threads."""

    def __init__(self, config: MonitorConfig) -> None:
        self.config = config
        self.output_dir = Path(config.output_dir)
        self._measured = Tail(self.output_dir / "distributions.jsonl")
        self._of_trainer: dict[int, dict[str, Any]] = {}
        self._attempts: dict[int, int] = {}
        self._renderer: Any = None
        self._share = max((entry.sample_ratio for entry in config.monitors if entry.samples_interval), default=0.0)

    def are_due(self, step: int) -> bool:
        """Whether any monitor wants extras of the step."""
        return any(is_due(every, step) for entry in self.config.monitors for every in intervals(entry))

    def make(self, steps: list[int]) -> list[int]:
        """Writes those of `steps`, ascending; returns the steps that are done. Others can be had later.

        Raises OSError.
        """
        for line in self._measured.lines():
            if isinstance(line.get("step"), int):
                counted = {name: value for name, value in line.items() if isinstance(value, dict)}
                self._of_trainer[line["step"]] = counted
        wanted = [step for step in steps if self._reads_journal(step)]
        found = self._trained(wanted) if wanted else {}
        done = []
        for step in steps:
            if step in wanted and found.get(step) is None:
                self._attempts[step] = self._attempts.get(step, 0) + 1
                if self._attempts[step] < ATTEMPTS:
                    continue
                log.warning("step %d is reported without samples: the journal does not hold it", step)
            content = {"samples": found.get(step) or [], "of_trainer": self._of_trainer.pop(step, {})}
            write_text(path_of(self.output_dir, step), json.dumps(content))
            done.append(step)
        return done

    def _reads_journal(self, step: int) -> bool:
        entries = self.config.monitors if self.config.kind == "rl" else []
        every = [(entry.samples_interval, entry.distributions_interval) for entry in entries]
        return any(is_due(one, step) for pair in every for one in pair)

    def _trained(self, steps: list[int]) -> dict[int, list[dict[str, Any]]]:
        try:
            answer = inspect_samples(self.output_dir, steps, self._share)
        except PrimerlError as error:  # a resumed run may just be removing its oldest events
            log.info("the journal cannot be read now: %s", error)
            return {}
        return {int(step): [self._line(sample) for sample in samples] for step, samples in answer["steps"].items()}

    def _line(self, sample: dict[str, Any]) -> dict[str, Any]:
        """With text in place of tokens."""
        text = sample.pop("text")
        if text is not None:
            first = text["learnt"].index(1) if 1 in text["learnt"] else len(text["learnt"])
            sample["prompt"] = self._decode(text["token_ids"][:first])
            sample["completion"] = self._decode(text["token_ids"][first:])
        return sample

    def _decode(self, token_ids: list[int]) -> str:
        if self._renderer is None:
            from primerl.render import Renderer

            self._renderer = Renderer(self.config.model_path or "")
        return str(self._renderer.decode(token_ids))


def path_of(output_dir: Path, step: int) -> Path:
    return output_dir / "monitor" / "extras" / f"step_{step}.json"


def intervals(entry: MonitorEntry) -> tuple[int | None, int | None, int | None]:
    return entry.samples_interval, entry.distributions_interval, entry.trainer_interval


def is_due(every: int | None, step: int) -> bool:
    return every is not None and step > 0 and step % every == 0


def samples_for(entry: MonitorEntry, step: int, content: dict[str, Any]) -> list[Sample]:
    """The monitor's share of each environment's samples, at least one; none where it wants none of this step."""
    if not is_due(entry.samples_interval, step):
        return []
    by_environment: dict[str, int] = {}
    for line in content["samples"]:
        by_environment[line["environment"]] = by_environment.get(line["environment"], 0) + 1
    shown = []
    for line in content["samples"]:
        # Places count from 0: a share above 0 has the first one.
        if "prompt" in line and line["place"] < entry.sample_ratio * by_environment[line["environment"]]:
            shown.append(_sample(line))
    return shown


def distributions_for(entry: MonitorEntry, step: int, content: dict[str, Any]) -> dict[str, Distribution]:
    found: dict[str, Distribution] = {}
    lines = content["samples"]
    if is_due(entry.distributions_interval, step) and lines:
        columns = {"rewards": "reward", "advantages": "advantage", "lengths": "loss_tokens", "staleness": "staleness"}
        for name, key in columns.items():
            values = [float(line[key]) for line in lines if line[key] is not None]
            if not values:
                continue
            try:
                found[name] = Distribution.of(values)
            except ValueError as error:  # which the same values would raise for ever
                log.warning("step %d is reported without the distribution of %s: %s", step, name, error)
    if is_due(entry.trainer_interval, step):
        for name, counted in content["of_trainer"].items():
            found[name] = Distribution(counted["edges"], counted["counts"])
    return found


def read(output_dir: Path, step: int) -> dict[str, Any]:
    """Raises OSError, ValueError."""
    content: dict[str, Any] = json.loads(path_of(output_dir, step).read_text(encoding="utf-8"))
    return content


def _sample(line: dict[str, Any]) -> Sample:
    names = {"learnt_tokens": "loss_tokens"}
    return Sample(**{name: line[names.get(name, name)] for name in Sample.__dataclass_fields__})
