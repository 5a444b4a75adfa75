"""The reflection model: one message to an OpenAI-compatible endpoint, whose answers are kept."""

from __future__ import annotations

import hashlib
import json
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from primerl.config.schema.services import Client
from primerl.evals.endpoint import key_of
from primerl.process.redaction import redact

SHOWN = 300


class StopError(BaseException):
    """The search cannot continue; the same command resumes it. No Exception: the package would take those of a
    reflection for a failed round, and continue until its budget is gone."""


class Teacher:
    """Answers are kept in a file, in their order, and those that are there already are not asked for again."""

    def __init__(self, client: Client, file: Path) -> None:
        self._client = client
        self._file = file
        lines = file.read_text(encoding="utf-8").split("\n")[:-1] if file.exists() else []
        if file.exists():
            # The end of a line that was being written when the process was killed.
            os.truncate(file, sum(len(line.encode()) + 1 for line in lines))
        self._kept = [json.loads(line) for line in lines]
        self._asked = 0

    def __call__(self, prompt: str | list[dict[str, Any]]) -> str:
        """Raises StopError."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        sha256 = hashlib.sha256(json.dumps(messages, sort_keys=True).encode()).hexdigest()
        place, self._asked = self._asked, self._asked + 1
        if place < len(self._kept):
            if self._kept[place]["request_sha256"] != sha256:
                raise StopError(
                    f"{self._file}: stored answer {place} belongs to another request; start again in a new folder"
                )
            return str(self._kept[place]["answer"])
        answer = self._ask(messages)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"request_sha256": sha256, "answer": answer}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        return answer

    def _ask(self, messages: list[dict[str, Any]]) -> str:
        (url,) = self._client.base_urls
        key = key_of(self._client)
        headers = {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
        body = json.dumps({"model": self._client.model, "messages": messages}).encode()
        request = urllib.request.Request(f"{url.rstrip('/')}/chat/completions", body, headers)
        try:
            # An endpoint outside, where a proxy is for.
            with urllib.request.urlopen(request, timeout=self._client.timeout_s) as answer:  # noqa: TID251
                text = json.load(answer)["choices"][0]["message"]["content"]
        except urllib.error.HTTPError as error:
            said = " ".join(redact(error.read().decode(errors="replace")).split())[:SHOWN]
            raise StopError(f"the reflection model at {url} answered with status {error.code}: {said}") from None
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise StopError(f"the reflection model at {url} gave no answer: {error}") from None
        if not isinstance(text, str) or not text.strip():
            raise StopError(f"the reflection model at {url} gave an empty answer")
        return text
