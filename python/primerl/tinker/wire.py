"""The SDK's protobuf messages, from and to tensors. Everything that a client may get wrong is found here, and raised as
`LossInputError`, before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tinker.proto import tinker_public_pb2 as pb
from torch import Tensor

from primerl.tinker.losses import LossInputError

DTYPES: dict[int, Any] = {pb.DTYPE_FLOAT32: np.float32, pb.DTYPE_INT64: np.int64, pb.DTYPE_INT32: np.int32}
STOP, LENGTH = pb.STOP_REASON_STOP, pb.STOP_REASON_LENGTH
WORDS = {"image": "an image", "dmel": "audio"}
"""Kinds of chunks that are no text."""


@dataclass(frozen=True)
class Datum:
    token_ids: Tensor
    """[N] int64."""
    targets: Tensor
    """[N] or [N, K] int64: what each position predicts. Of K, each has a weight of its own."""
    columns: dict[str, Tensor]
    """Each has the shape of the targets; fp32."""

    def __len__(self) -> int:
        return self.token_ids.shape[0]

    def weighted(self) -> int:
        """Targets with a weight or an advantage: those that are learnt from."""
        given = self.columns.get("weights", self.columns.get("advantages"))
        return self.targets.numel() if given is None else int(given.count_nonzero())


@dataclass(frozen=True)
class Request:
    """A forward_backward call."""

    model_id: str
    seq_id: int
    loss: str
    config: dict[str, Any]
    forward_only: bool
    message: Any
    """The datums, which are decoded where their errors have a future to go to."""


def request_of(body: bytes) -> Request:
    """Raises ValueError where it is no such message."""
    from google.protobuf.message import DecodeError

    try:
        message = pb.ForwardBackwardRequest.FromString(body)
    except DecodeError as error:
        raise ValueError(f"the body is no ForwardBackwardRequest: {error}") from None
    config: dict[str, Any] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        config[name] = value.text if value.WhichOneof("value") == "text" else value.number
    return Request(message.model_id, message.seq_id, message.loss_fn, config, message.forward_only, message)


def datums_of(request: Request, columns: Sequence[str], vocabulary: int, most_tokens: int) -> list[Datum]:
    """Raises LossInputError; the message names the datum and its input."""
    if not request.message.data:
        raise LossInputError("data is empty; give at least one datum")
    return [
        _datum(datum, f"data[{index}]", columns, vocabulary, most_tokens)
        for index, datum in enumerate(request.message.data)
    ]


def _datum(datum: Any, where: str, columns: Sequence[str], vocabulary: int, most_tokens: int) -> Datum:
    parts = []
    for number, chunk in enumerate(datum.model_input):
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise LossInputError(
                f"{where}.model_input: chunk {number} is {WORDS.get(kind, 'empty')}; this server trains on text only, "
                "so omit it"
            )
        parts.append(np.frombuffer(chunk.encoded_text.tokens, np.int32))
    token_ids = np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)
    if not len(token_ids):
        raise LossInputError(f"{where}.model_input is empty")
    if len(token_ids) > most_tokens:
        raise LossInputError(
            f"{where}.model_input has {len(token_ids)} tokens; this server takes at most {most_tokens}"
        )
    _check_ids(token_ids, f"{where}.model_input", vocabulary)
    given = datum.loss_fn_inputs
    if "target_tokens" not in given:
        raise LossInputError(f"{where}.loss_fn_inputs lacks target_tokens, the token that each position predicts")
    targets = _array(given["target_tokens"], f"{where}.target_tokens")
    if targets.ndim not in (1, 2) or targets.shape[0] != len(token_ids) or not targets.size:
        raise LossInputError(
            f"{where}.target_tokens has the shape {list(targets.shape)}; the input has {len(token_ids)} tokens, so it "
            f"has to be [{len(token_ids)}] or [{len(token_ids)}, K]"
        )
    if targets.dtype.kind == "f":
        raise LossInputError(f"{where}.target_tokens are floats; token ids are integers")
    _check_ids(targets, f"{where}.target_tokens", vocabulary)
    found = {name: _column(given, name, targets.shape, where) for name in columns}
    return Datum(torch.from_numpy(token_ids), torch.from_numpy(targets.astype(np.int64)), found)


def _column(given: Mapping[str, Any], name: str, shape: tuple[int, ...], where: str) -> Tensor:
    if name not in given:
        if name == "weights":
            return torch.ones(shape)
        raise LossInputError(f"{where}.loss_fn_inputs lacks {name}, which this loss reads")
    values = _array(given[name], f"{where}.{name}")
    if values.shape != shape:
        raise LossInputError(
            f"{where}.{name} has the shape {list(values.shape)}; target_tokens have {list(shape)}, and all inputs of a "
            "datum have the same"
        )
    column = torch.from_numpy(values.astype(np.float32))
    if not bool(column.isfinite().all()):
        raise LossInputError(f"{where}.{name} has values that are not finite")
    return column


def _check_ids(ids: np.ndarray[Any, Any], where: str, vocabulary: int) -> None:
    least, most = int(ids.min()), int(ids.max())
    if least < 0 or most >= vocabulary:
        wrong = least if least < 0 else most
        raise LossInputError(f"{where} has the id {wrong}; the model's are 0 to {vocabulary - 1}")


def _array(tensor: Any, where: str) -> np.ndarray[Any, Any]:
    if tensor.dtype not in DTYPES:
        raise LossInputError(f"{where} is of a number format that is not read here; send float32, int32 or int64")
    dtype, shape = np.dtype(DTYPES[tensor.dtype]), [int(size) for size in tensor.shape]
    try:
        if tensor.WhichOneof("encoding") != "sparse_csr":
            return np.frombuffer(tensor.dense, dtype).reshape(shape or -1)
        parts = tensor.sparse_csr
        values, rows = np.frombuffer(parts.values, dtype), np.frombuffer(parts.crow_indices, np.int64)
        found = np.zeros(shape, dtype)
        found[np.repeat(np.arange(shape[0]), np.diff(rows)), np.frombuffer(parts.col_indices, np.int64)] = values
        return found
    except (ValueError, IndexError) as error:
        raise LossInputError(f"{where} does not have the shape {shape} that it says: {error}") from None


def output_of(outputs: Sequence[Mapping[str, Tensor]], metrics: Mapping[str, float]) -> Any:
    """The answer to a forward_backward: a record a datum, so that shapes may differ."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    for fields in outputs:
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=1)
        for name, tensor in fields.items():
            array = np.ascontiguousarray(tensor.detach().float().cpu().numpy())
            field = record.fields[name]
            field.data, field.dtype = array.tobytes(), pb.DTYPE_FLOAT32
            field.offsets = np.array([0, array.nbytes], np.int64).tobytes()
            field.trailing_shape.extend(array.shape[1:])
    for name, value in metrics.items():
        message.metrics[name] = value
    return message


@dataclass(frozen=True)
class Sampled:
    token_ids: list[int]
    logprobs: list[float]
    stopped: bool
    top: list[list[tuple[int, float]]] | None
    """The most likely tokens at each place, the most likely first."""


def samples_of(
    sequences: Sequence[Sampled],
    top_k: int,
    prompt_logprobs: Sequence[float] | None,
    prompt_top: Sequence[Sequence[tuple[int, float]]] | None,
    prompt_k: int,
) -> Any:
    """`prompt_logprobs`: of each token, NaN where it was not scored."""
    message = pb.SampleResponse()
    for one in sequences:
        sequence = message.sequences.add(
            stop_reason=STOP if one.stopped else LENGTH,
            tokens=np.array(one.token_ids, np.int32).tobytes(),
            logprobs=np.array(one.logprobs, np.float32).tobytes(),
        )
        if one.top is not None and top_k:
            sequence.topk_sampled_logprobs.CopyFrom(_top(one.top, top_k))
    if prompt_logprobs is not None:
        message.prompt_logprobs = np.array(prompt_logprobs, np.float32).tobytes()
    if prompt_top is not None and prompt_k:
        message.topk_prompt_logprobs.CopyFrom(_top(prompt_top, prompt_k))
    return message


def _top(rows: Sequence[Sequence[tuple[int, float]]], k: int) -> Any:
    ids, logprobs = np.zeros((len(rows), k), np.int32), np.full((len(rows), k), -99999.0, np.float32)
    for place, row in enumerate(rows):
        for rank, (token, logprob) in enumerate(row[:k]):
            ids[place, rank], logprobs[place, rank] = token, logprob
    return pb.TopkLogprobs(k=k, length=len(rows), token_ids=ids.tobytes(), logprobs=logprobs.tobytes())
