"""The Prime platform: an external training run there.

The calls are those of prime-rl's monitor and of the `prime-runs` SDK, which keep what cannot be sent in memory only and
drop it; here it waits in `records.jsonl`. JSON, with the key as a bearer token:

| call, under `base_url` | body |
|---|---|
| `POST /external-runs` | `base_model, max_steps, environments, run_config, name, team_id, ..` -> `{"run": {"id"}}` |
| `POST /metrics` | `{run_id, metrics: {"step": .., name: value}}` |
| `POST /distributions` | `{run_id, step, distributions: {name: [value]}}` |
| `POST /samples/presign` | `{run_id, step}` -> `{"data": {"presignedUrl", "s3Key"}}`; Parquet is `PUT` there |
| `POST /samples/confirm` | `{run_id, step, s3_key}` |
| `POST /finalize` | `{run_id, summary, exit_code: 0}` |
| `PUT /external-runs/{run_id}/status` | `{status: "failed", error_message}` where the run did not finish |

Each carries an `Idempotency-Key`, the same when it is repeated: `<run_id>-<number><path>`, and before there is a run's
id one that is made up, and remembered.
"""

from __future__ import annotations

import io
import json
import os
import urllib.error
import urllib.request
import uuid
from pathlib import Path
from typing import Any

from primerl.monitors.keys import usable
from primerl.monitors.monitor import Distribution, Monitor, RefusedError, Run, Sample, Status

BASE_URL = "https://api.primeintellect.ai/api/v1/rft"
DASHBOARD = "https://app.primeintellect.ai/dashboard/training/"
ANSWER_S = 30.0
UPLOAD_S = 300.0
REFUSED = {400, 401, 402, 403, 404, 405, 422}
"""Status codes that do not change when the call is repeated."""


class PrimeMonitor(Monitor):
    """The key is PRIME_API_KEY in the environment, or that of `prime login`."""

    def __init__(self, run_name: str | None = None, base_url: str | None = None, team_id: str | None = None) -> None:
        self.run_name = run_name
        self.base_url = (base_url or os.environ.get("PRIME_API_BASE") or BASE_URL).rstrip("/")
        self.team_id = team_id or os.environ.get("PRIME_TEAM_ID") or login().get("team_id")
        self._key: str | None = None
        self._run_id = self._asked = ""
        self._last: dict[str, Any] = {}

    def start(self, run: Run) -> int | None:
        try:
            self._key = api_key()
        except ValueError as error:
            raise RefusedError(str(error)) from None
        if self._key is None:
            raise RefusedError("there is no key: set PRIME_API_KEY, or run `prime login`")
        if "id" not in run.state:
            if "asked" not in run.state:
                # Before the request: if the answer is lost, the request is repeated and must get the same run.
                run.remember(asked=uuid.uuid4().hex)
            self._asked = run.state["asked"]
            answer = self._call("POST", "/external-runs", self._describe(run))
            try:
                run.remember(id=str(answer["run"]["id"]))
            except (LookupError, TypeError):
                raise RefusedError(f"{self.base_url}/external-runs did not answer with a run's id") from None
        self._run_id = run.state["id"]
        run.say(where=DASHBOARD + self._run_id)
        return None

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._last = {"step": step, **metrics}
        self._call("POST", "/metrics", {"run_id": self._run_id, "metrics": self._last})

    def samples(self, step: int, samples: list[Sample]) -> None:
        place = self._call("POST", "/samples/presign", {"run_id": self._run_id, "step": step})
        place = place.get("data") or place
        upload = urllib.request.Request(place["presignedUrl"], parquet(self._run_id, step, samples), method="PUT")
        # The upload URL is for this one file, and must not get the key.
        upload.add_header("Content-Type", "application/parquet")
        with urllib.request.urlopen(upload, timeout=UPLOAD_S):
            pass
        body = {"run_id": self._run_id, "step": step, "s3_key": place["s3Key"]}
        self._call("POST", "/samples/confirm", body)

    def distributions(self, step: int, distributions: dict[str, Distribution]) -> None:
        """Distributions of samples: the platform takes values, not histograms."""
        values = {name: found.values for name, found in distributions.items() if found.values is not None}
        if values:
            self._call("POST", "/distributions", {"run_id": self._run_id, "step": step, "distributions": values})

    def finish(self, status: Status, reason: str) -> None:
        if status == "finished":
            self._call("POST", "/finalize", {"run_id": self._run_id, "summary": self._last, "exit_code": 0})
            return
        body = {"status": "failed", "error_message": f"{status}: {reason}"[:4096]}
        self._call("PUT", f"/external-runs/{self._run_id}/status", body)

    def _describe(self, run: Run) -> dict[str, Any]:
        orchestrator = run.config.get("orchestrator", {})
        environments = orchestrator.get("train", {}).get("env", [])
        found = {
            "base_model": run.model,
            "max_steps": run.max_steps or 0,
            "batch_size": orchestrator.get("batch_size"),
            "rollouts_per_example": orchestrator.get("group_size"),
            "seq_len": run.config.get("seq_len"),
            "environments": [{"id": environment["id"]} for environment in environments],
            "run_config": run.config,
            "name": self.run_name or run.name,
            "wandb_project": run.config.get("wandb", {}).get("project"),
            "team_id": self.team_id,
        }
        return {name: value for name, value in found.items() if value is not None}

    def _call(self, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Raises RefusedError, OSError."""
        request = urllib.request.Request(self.base_url + path, json.dumps(body, allow_nan=False).encode())
        request.method = method
        request.add_header("Content-Type", "application/json")
        request.add_unredirected_header("Authorization", f"Bearer {self._key}")
        request.add_unredirected_header("x-api-key", self._key or "")
        # A record may be several calls, and the end of a run has the number of what follows when it resumes.
        key = f"{self._run_id}-{self.number}{path}" if self._run_id else self._asked
        request.add_header("Idempotency-Key", key)
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
                content = response.read()
        except urllib.error.HTTPError as error:
            said = error.read(2000).decode(errors="replace")
            if error.code == 409 and path.endswith("/status"):
                return {}  # closed already, which is what was wanted
            problem = f"{method} {self.base_url}{path} was answered with {error.code}: {said}"
            if error.code in REFUSED:
                raise RefusedError(problem) from None
            raise OSError(problem) from None
        answer = json.loads(content or b"{}")
        return answer if isinstance(answer, dict) else {}


def api_key() -> str | None:
    """Raises ValueError, which does not show it."""
    found = usable(os.environ.get("PRIME_API_KEY"), "PRIME_API_KEY")
    return found or usable(str(login().get("api_key") or ""), "~/.prime/config.json (`prime login`)")


def login() -> dict[str, Any]:
    """What `prime login` has stored."""
    try:
        found = json.loads(Path(os.path.expanduser("~/.prime/config.json")).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def parquet(run_id: str, step: int, samples: list[Sample]) -> bytes:
    """The platform's table: a row a sample, messages as JSON."""
    import pyarrow
    from pyarrow import parquet as files

    text, number, real = pyarrow.string(), pyarrow.int64(), pyarrow.float64()
    schema = pyarrow.schema(
        [("run_id", text), ("step", number), ("tag", text), ("problem_id", number), ("sample_id", number)]
        + [(name, text) for name in ("prompt", "completion", "trajectory", "answer", "env_name", "task", "info")]
        + [("reward", real), ("advantage", real), ("metrics", text), ("timing", text)]
        + [("num_input_tokens", number), ("num_output_tokens", number), ("created_at", pyarrow.timestamp("us", "UTC"))]
    )
    rows = [_row(run_id, step, number, sample) for number, sample in enumerate(samples)]
    output = io.BytesIO()
    files.write_table(pyarrow.Table.from_pylist(rows, schema=schema), output)
    return output.getvalue()


def _row(run_id: str, step: int, number: int, sample: Sample) -> dict[str, Any]:
    from datetime import UTC, datetime

    counts = {
        "num_input_tokens": sample.tokens - sample.learnt_tokens,
        "num_output_tokens": sample.learnt_tokens,
    }
    values = {"reward": sample.reward, "advantage": sample.advantage}
    messages = [{"role": "user", "content": sample.prompt}, {"role": "assistant", "content": sample.completion}]
    return {
        "run_id": run_id,
        "step": step,
        "tag": "",
        "problem_id": sample.example,
        "sample_id": number,
        "prompt": sample.prompt,
        "completion": json.dumps(messages),
        "trajectory": json.dumps([{"messages": messages, **values, **counts}]),
        "answer": "",
        "env_name": sample.environment,
        "task": json.dumps({"idx": sample.example}),
        "info": json.dumps({"group": sample.group, "rollout": sample.rollout, "turns": sample.turns}),
        **values,
        "metrics": json.dumps({"staleness": sample.staleness}),
        "timing": "{}",
        **counts,
        "created_at": datetime.now(UTC),
    }
