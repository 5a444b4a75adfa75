"""A prompt on some examples, measured by `primerl eval` in a folder of its own, and asked for as the package asks.

The folders are numbered in the order in which the search asks. The search itself is a function of its seed and of
what it is answered: a search that resumes is run again from its beginning, and is answered from the folders that are
finished; the one that is not is resumed from its journal. So nothing that ended is measured twice, and no pickle of the
package is read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gepa.core.adapter import EvaluationBatch, ProposalFn

from primerl.config.process_files.files import write_text
from primerl.config.schema.evaluation import EvalConfig
from primerl.config.schema.gepa import GepaConfig
from primerl.evals import preflight, results
from primerl.gepa.engines import Engines, Measured, end_tokens
from primerl.gepa.teacher import StopError
from primerl.launch.preflight.output_folder import claimed
from primerl.launch.report.console import Console
from primerl.launch.secrets import Variables
from primerl.launch.supervise.failures import INTERRUPTED

COMPONENT = "system_prompt"


class Quiet(Console):
    """Drops the lines of an evaluation, which is one of many."""

    def say(self, message: str) -> None:
        pass


class Adapter:
    """What the package calls.

    Args:
        examples: Data of each example, by its place.
        engines: That serve the checkpoint; None where an endpoint is measured.
    """

    # None: the package's own way.
    propose_new_texts: ProposalFn | None = None

    def __init__(
        self,
        config: GepaConfig,
        folder: Path,
        examples: list[dict[str, Any]],
        variables: Variables,
        say: Callable[[str], None],
        engines: Engines | None = None,
    ) -> None:
        self._config = config
        self._folder = folder
        self._examples = examples
        self._variables = variables
        self._say = say
        self._engines = engines
        self._ends = () if engines is None else end_tokens(Path(config.model))
        self._asked = 0

    def evaluate(
        self, batch: list[int], candidate: dict[str, str], capture_traces: bool = False
    ) -> EvaluationBatch[dict[str, Any], dict[str, Any]]:
        """Scores of the examples at these places, in their order. Raises StopError, KeyboardInterrupt."""
        self._asked += 1
        places = list(dict.fromkeys(batch))
        lines = self._measured(candidate[COMPONENT], places)
        mean = sum(_score(lines[place]) for place in batch) / len(batch)
        self._say(f"evaluation {self._asked}: {len(places)} examples, mean reward {mean:.3f}")
        found = [lines[place] for place in batch]
        trajectories = [self._record(place, lines[place]) for place in batch] if capture_traces else None
        return EvaluationBatch(
            outputs=found,
            scores=[_score(line) for line in found],
            trajectories=trajectories,
            num_metric_calls=len(batch),
        )

    def make_reflective_dataset(
        self,
        candidate: dict[str, str],
        eval_batch: EvaluationBatch[dict[str, Any], dict[str, Any]],
        components_to_update: list[str],
    ) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        return {component: list(eval_batch.trajectories or []) for component in components_to_update}

    def _measured(self, prompt: str, places: list[int]) -> dict[int, dict[str, Any]]:
        folder = self._folder / "evaluations" / f"{self._asked:05}"
        request = folder.with_suffix(".json")
        asked = {"system_prompt_sha256": hashlib.sha256(prompt.encode()).hexdigest(), "examples": places}
        if not request.exists():
            write_text(request, json.dumps(asked) + "\n")
        elif json.loads(request.read_text(encoding="utf-8")) != asked:
            raise StopError(f"{request} was written for another prompt or other examples; start again in a new folder")
        if not is_measured(folder):
            self._run(self._config.evaluation(str(folder), prompt, places))
        lines = [json.loads(line) for line in (folder / results.RESULTS).read_text(encoding="utf-8").splitlines()]
        by_place: dict[int, dict[str, Any]] = {}
        for line in lines:
            by_place.setdefault(places[line["example"]], line)
        # Those that the evaluation's own time limit cut off.
        missing = {"reward": 0.0, "error": "timeout", "messages": [], "metrics": {}}
        return {place: by_place.get(place, missing) for place in places}

    def _run(self, config: EvalConfig) -> None:
        with claimed(config.output_dir, clean=False, kind="eval") as folder:
            evaluation = Measured(config, folder, Quiet(), self._variables, self._engines)
            code = evaluation.run()
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        if not is_measured(folder):
            raise StopError(f"{evaluation.reason} (logs in {folder / 'logs'})")

    def _record(self, place: int, line: dict[str, Any]) -> dict[str, Any]:
        """What the reflection model is shown of a rollout."""
        data = self._examples[place]
        record: dict[str, Any] = {"query": data.get("prompt", data.get("question", _rest(data)))}
        answers = [self._told(message.get("answer")) for message in line["messages"]]
        record["completion"] = answers[0] if len(answers) == 1 else answers
        if "answer" in data:
            record["expected_answer"] = data["answer"]
        record["reward"] = _score(line)
        record |= {name: line[name] for name in ("error", "message", "stop_condition") if line.get(name) is not None}
        known = {**line, **data, **line["metrics"]}
        return record | {name: known[name] for name in self._config.gepa.state_columns if name in known}

    def _told(self, answer: Any) -> Any:
        """An answer as an endpoint would give it."""
        if isinstance(answer, str):
            for end in self._ends:
                answer = answer.removesuffix(end)
        return answer


def is_measured(folder: Path) -> bool:
    """Whether the evaluation is over, with its results."""
    return (
        (folder / results.RESULTS).exists()
        and preflight.is_over(folder)
        and any(count.measured for count in results.counts(folder))
    )


def _score(line: dict[str, Any]) -> float:
    return 0.0 if line["error"] is not None else float(line["reward"] or 0.0)


def _rest(data: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in data.items() if name != COMPONENT}
