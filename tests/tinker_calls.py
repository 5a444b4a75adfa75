"""A client of the Tinker API by plain HTTP, for tests and `scripts/gpu_check.sh`: of the SDK only its messages are
needed, which the server needs as well."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

import numpy as np
from primerl.net.requests import open_url

POLL_AGAIN = 408
ALIKE = list(range(60, 100))
ROWS = [[72, 105, 32, 116, 104, 101, 114, 101], [65, 98, 99, 100], [49, 50, 51, 52, 53, 54, 55, 56, 57, 48, 49]]
# What they begin with is computed once.
ROWS += [[*ALIKE, 110 + number, 120, 121] for number in range(3)]


class Client:
    """What the SDK sends, by hand."""

    def __init__(self, url: str, model: str, key: str = "tml-local") -> None:
        self._url, self.model, self._key = url, model, key
        self.session = self.asked("create_session", {})["session_id"]
        self._numbers: dict[str, int] = {}
        self._made = 0

    def sent(self, path: str, body: bytes, kind: str = "application/json") -> bytes:
        request = urllib.request.Request(
            f"{self._url}/api/v1/{path}", body, {"Content-Type": kind, "X-API-Key": self._key}
        )
        with open_url(request, timeout=60) as answer:
            return bytes(answer.read())

    def asked(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return dict(json.loads(self.sent(path, json.dumps(body).encode())))

    def result(self, promise: dict[str, Any]) -> bytes:
        body = json.dumps({"request_id": promise["request_id"]}).encode()
        while True:
            try:
                answer = self.sent("retrieve_future", body)
                break
            except urllib.error.HTTPError as error:
                if error.code != POLL_AGAIN:
                    raise
        if answer.startswith(b'{"error"'):
            raise SystemExit(answer.decode())
        return answer

    def _number(self, model_id: str) -> int:
        self._numbers[model_id] = self._numbers.get(model_id, 0) + 1
        return self._numbers[model_id]

    def trained_model(self, **loaded: Any) -> str:
        """A new training client, or one that is loaded."""
        body = {"session_id": self.session, "model_seq_id": self._made, "base_model": self.model}
        self._made += 1
        lora = {"rank": 4, "seed": 7}
        promise = self.asked("load_weights", body | loaded) if loaded else None
        promise = promise or self.asked("create_model", body | {"lora_config": lora})
        return str(json.loads(self.result(promise))["model_id"])

    def losses(self, model_id: str, rows: Sequence[Sequence[int]], *, forward_only: bool = False) -> Any:
        from tinker.proto import tinker_public_pb2 as pb

        made = pb.ForwardBackwardRequest(model_id=model_id, seq_id=self._number(model_id), loss_fn="cross_entropy")
        made.forward_only = forward_only
        for row in rows:
            datum = made.data.add()
            datum.model_input.add().encoded_text.tokens = np.array(row[:-1], np.int32).tobytes()
            targets = np.array(row[1:], np.int64)
            tensor = pb.Tensor(dense=targets.tobytes(), dtype=pb.DTYPE_INT64, shape=targets.shape)
            datum.loss_fn_inputs["target_tokens"].CopyFrom(tensor)
        promise = json.loads(self.sent("forward_backward", made.SerializeToString(), "application/x-protobuf"))
        return pb.ForwardBackwardOutput.FromString(self.result(promise))

    def called(self, call: str, model_id: str, **body: Any) -> dict[str, Any]:
        promise = self.asked(call, {"model_id": model_id, "seq_id": self._number(model_id), **body})
        return dict(json.loads(self.result(promise)))

    def step(self, model_id: str) -> tuple[float, float]:
        """Loss a token, and norm of the gradient."""
        output = self.losses(model_id, ROWS)
        metrics = self.called("optim_step", model_id, adam_params={"learning_rate": 5e-3})["metrics"]
        return output.metrics["loss:sum"] / sum(len(row) - 1 for row in ROWS), metrics["grad_norm:mean"]

    def sampler(self, number: int, **what: Any) -> str:
        body = {"session_id": self.session, "sampling_session_seq_id": number, **what}
        return str(self.asked("create_sampling_session", body)["sampling_session_id"])

    def sample(self, sampler: str, number: int, prompt: Sequence[int], tokens: int, **more: Any) -> Any:
        from tinker.proto import tinker_public_pb2 as pb

        sampling = {"max_tokens": tokens, "temperature": 0.0, "stop": []}
        body = {"sampling_session_id": sampler, "seq_id": number, "num_samples": 1, "sampling_params": sampling}
        body |= {"prompt": {"chunks": [{"type": "encoded_text", "tokens": list(prompt)}]}, "prompt_logprobs": True}
        body |= more
        return pb.SampleResponse.FromString(self.result(self.asked("asample", body)))
