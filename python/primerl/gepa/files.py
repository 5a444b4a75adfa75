"""What a search leaves: the prompt, its candidates, who is best on which example, and a summary."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
from datetime import datetime
from pathlib import Path
from typing import Any

from primerl.config.process_files.files import write_text
from primerl.config.schema.gepa import GepaConfig
from primerl.gepa.rollouts import COMPONENT

SCHEMA = "verifiers.gepa.v1"
"""The published form of these files."""
SUMMARY = "metadata.json"


def write(folder: Path, result: Any, config: GepaConfig) -> None:
    """Writes all four, the summary last. That of a search which was over already stays as it is."""
    prompts = [candidate[COMPONENT] for candidate in result.candidates]
    write_text(folder / "system_prompt.txt", prompts[result.best_idx])
    write_text(folder / "results.jsonl", _lines(_candidate(result, number, prompts) for number in range(len(prompts))))
    write_text(folder / "pareto_frontier.jsonl", _lines(_frontier(result, prompts)))
    summary = _summary(folder, result, prompts, config)
    if _found(_read(folder / SUMMARY)) != _found(summary):
        write_text(folder / SUMMARY, json.dumps(summary, indent=2, ensure_ascii=False) + "\n")


def _read(file: Path) -> Any:
    with contextlib.suppress(OSError, ValueError):
        return json.loads(file.read_text(encoding="utf-8"))
    return None


def _found(summary: Any) -> Any:
    """What a search has found, without when, and how much it was allowed to ask."""
    if not isinstance(summary, dict) or not isinstance(summary.get("config"), dict):
        return None
    own = {name: value for name, value in summary["config"].items() if name != "max_metric_calls"}
    return {**{name: value for name, value in summary.items() if name != "completed_at"}, "config": own}


def _lines(values: Any) -> str:
    return "".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _candidate(result: Any, number: int, prompts: list[str]) -> dict[str, Any]:
    subscores = {str(row): score for row, score in result.val_subscores[number].items()}
    score = result.val_aggregate_scores[number] if subscores else None
    parents = [parent for parent in result.parents[number] if parent is not None]
    names = ("initial/system_prompt.txt", "candidate/system_prompt.txt")
    diff = difflib.unified_diff(prompts[0].splitlines(), prompts[number].splitlines(), *names, lineterm="")
    return {
        "example_id": number,
        "reward": score or 0.0,
        "score": score,
        "info": {
            "schema_version": SCHEMA,
            "eval_kind": "gepa",
            "sample_type": "gepa_candidate",
            "optimization_target": COMPONENT,
            "candidate_idx": number,
            "is_best": number == result.best_idx,
            "system_prompt": prompts[number],
            "system_prompt_sha256": _sha256(prompts[number]),
            "diff_from_initial": "\n".join(diff),
            "parent_candidate_idxs": parents,
            "val_subscores": subscores,
            "num_val_examples": len(subscores),
            "discovery_metric_calls": result.discovery_eval_counts[number],
        },
    }


def _frontier(result: Any, prompts: list[str]) -> list[dict[str, Any]]:
    found = []
    for row in sorted({row for scores in result.val_subscores for row in scores}):
        scores = {number: own[row] for number, own in enumerate(result.val_subscores) if row in own}
        best = max(scores.values())
        ties = [
            {"candidate_idx": number, "system_prompt_sha256": _sha256(prompts[number]), "score": score}
            for number, score in scores.items()
            if score == best
        ]
        found.append(
            {
                "schema_version": SCHEMA,
                "valset_row": row,
                "best_score": best,
                "num_best_candidates": len(ties),
                "best_candidates": ties,
            }
        )
    return found


def _summary(folder: Path, result: Any, prompts: list[str], config: GepaConfig) -> dict[str, Any]:
    entry, reflection_model = config.env[0], config.teacher().model
    own = config.gepa.model_dump(mode="json", exclude={"max_calls", "max_concurrent"})
    env = {"env_id": entry.id, "env_args": {**entry.args, "taskset": entry.taskset}, "extra_env_kwargs": {}}
    same = {"env_id": entry.id, "model": config.model, "reflection_model": reflection_model}
    return {
        "schema_version": SCHEMA,
        "eval_kind": "gepa",
        "framework": "primerl",
        "optimizer": "gepa",
        "optimization_target": COMPONENT,
        **same,
        "num_candidates": len(prompts),
        "best_idx": result.best_idx,
        "best_score": result.val_aggregate_scores[result.best_idx],
        "total_metric_calls": result.total_metric_calls,
        "initial_prompt_sha256": _sha256(prompts[0]),
        "best_prompt_sha256": _sha256(prompts[result.best_idx]),
        "system_prompt_path": str(folder / "system_prompt.txt"),
        "results_path": str(folder / "results.jsonl"),
        "completed_at": datetime.now().isoformat(timespec="seconds"),
        "config": {
            **same,
            "envs": [env],
            "env_args": env["env_args"],
            "max_metric_calls": config.gepa.max_calls,
            **own,
        },
    }
