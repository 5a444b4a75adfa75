"""The torch side of the engine: called once a step, on the engine's own thread, with columns for the whole batch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from primerl.inference.torch import adapter
from primerl.inference.torch.model import Decoder, Segment, load_folder
from primerl.inference.torch.sampling import Rows, Scores, leave_out, sample, score
from primerl.inference.torch.shape import Shape
from primerl.train.objective.bitmasks import unpacked
from primerl.train.weights.digest import digest_of, hash_of
from primerl.train.weights.tensors import LOADABLE, NAMES, as_bytes, tensor_hash

if TYPE_CHECKING:
    from primerl.inference.pulling import Puller

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

AUTO, CPU, CUDA = "auto", "cpu", "cuda"

Columns = bytearray
"""Little-endian values of one column; the dtype is in the parameter's comment."""

ScoreColumns = tuple[bytes, bytes, bytes, bytes, int]
"""Log-probabilities (float32), ranks (int64), ids (int64) and log-probabilities (float32) of the k most likely, k."""


def device_of(name: str) -> torch.device:
    """What `inference.device` names. Raises ValueError where torch does not see it."""
    if name == AUTO:
        name = CUDA if torch.cuda.is_available() else CPU
    device = torch.device(name)
    if device.type != CUDA:
        return device
    if not torch.cuda.is_available():
        raise ValueError(f'device: is "{name}", but torch sees no CUDA GPU here; set it to "cpu" or "auto"')
    # The engine's own thread may have another current device than this one.
    index, count = torch.cuda.current_device() if device.index is None else device.index, torch.cuda.device_count()
    if index >= count:
        raise ValueError(f'device: is "{name}", but torch sees {count} CUDA GPUs here; they count from 0')
    return torch.device(CUDA, index)


class Computes(Protocol):
    """A model and what its slots remember of sequences."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    slots: int
    max_len: int
    dtype: torch.dtype
    device: torch.device
    tensors: dict[str, Tensor]
    """Its weights by the names of a checkpoint: views of the memory that it computes with."""

    def weights_changed(self) -> None: ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, V] fp32."""
        ...


ExpertColumn = tuple[bytes, int, int, int]
"""Experts of the step's tokens, [N, layers, k] little-endian; layers, k, and bytes of an id (1 or 2)."""


@contextmanager
def within_memory(dtype: str, slots: int, max_len: int, device: torch.device) -> Iterator[None]:
    """Around the loading of a model. Raises ValueError where it does not fit into the GPU's memory."""
    try:
        yield
    except torch.OutOfMemoryError:
        smaller = ", set dtype to bfloat16" if dtype == "float32" else ""
        raise ValueError(
            f"device: the model in {dtype} and a KV cache of {slots} sequences of {max_len} tokens need more "
            f"memory than {device} has free; lower max_num_seqs or max_model_len{smaller}, or use the CPU"
        ) from None


def longest_of(max_model_len: int | None, positions: int) -> int:
    """The longest sequence to serve. Raises ValueError for more than the model's `positions`."""
    if max_model_len is not None and max_model_len > positions:
        raise ValueError(f"max_model_len: {max_model_len} is more than the model's {positions} positions")
    return max_model_len or positions


@dataclass(frozen=True)
class Step:
    """Which tokens a step computes, sequence after sequence (`primerl_engine_server::batch`); all on the CPU, int64."""

    token_ids: Tensor  # [N]
    positions: Tensor  # [N]
    cache_rows: Tensor  # [N]: slot * M + position
    segments: list[tuple[int, int, int, int]]  # first sequence, count, longest query, longest context
    slots: Tensor  # one a sequence, here and below
    query_lens: Tensor
    context_lens: Tensor


class StepBackend:
    """A model as a backend of `primerl._core.InferenceEngine`: loading, proving and sampling. A subclass computes."""

    def __init__(
        self, decoder: Computes, *, logprobs_mode: str = "raw_logprobs", merged: adapter.MergedAdapter | None = None
    ) -> None:
        """`merged`: the adapters that will be loaded, in place of whole weights."""
        self.decoder = decoder
        self.device = decoder.device
        self.raw_logprobs = logprobs_mode == "raw_logprobs"
        self._adapter = merged
        self._hashes: dict[str, tuple[str, str]] = {}  # dtype and hash in the file of what was converted

    def _hidden(self, step: Step) -> Tensor:
        """Computes the step and keeps what its tokens leave in their slots; [N, hidden]."""
        raise NotImplementedError

    def _experts(self) -> ExpertColumn | None:
        return None

    def info(self) -> dict[str, Any]:
        loadable = self.decoder.tensors if self._adapter is None else self._adapter.tensors
        return {
            "vocab_size": self.decoder.vocab_size,
            "max_model_len": self.decoder.max_len,
            "slots": self.decoder.slots,
            "eos_token_ids": list(self.decoder.eos_token_ids),
            "tensors": [(name, list(tensor.shape)) for name, tensor in loadable.items()],
            "dtypes": list(LOADABLE if self._adapter is None else adapter.DTYPES),
        }

    # Weights ------------------------------------------------------------------------------------------------------

    puller: Puller | None = None

    def locate(self, folder: str | os.PathLike[str]) -> str:
        """Where the folder of a version, as the orchestrator names it, is on this machine. Raises PullError."""
        return os.fspath(folder if self.puller is None else self.puller.folder(folder))

    @torch.inference_mode()
    def load_tensor(self, name: str, dtype: str, data: Columns) -> None:
        """Copies one tensor of a checkpoint whose names, shapes and hashes have been checked."""
        if self._adapter is not None:
            self._adapter.load(name, dtype, data)
            return
        target = self.decoder.tensors[name]
        source = torch.frombuffer(data, dtype=LOADABLE[dtype]).view(target.shape)
        target.copy_(source)
        self._hashes.pop(name, None)
        if source.dtype != target.dtype:
            # Bytes in memory differ from the file's, so this proves the conversion and remembers the file's hash.
            if not torch.equal(target.cpu(), source.to(target.dtype)):
                raise RuntimeError(f"{name}: the tensor in memory differs from the one that was copied into it")
            self._hashes[name] = (dtype, hash_of(data))

    @torch.inference_mode()
    def weights_changed(self) -> None:
        if self._adapter is not None:
            self._adapter.merge()
        else:
            self.decoder.weights_changed()

    @torch.inference_mode()
    def digest(self) -> str:
        """Digest of the tensors in memory (docs/architecture.md, "Weights" and "Adapters")."""
        if self._adapter is not None:
            return self._adapter.digest()
        tensors = []
        for name, tensor in self.decoder.tensors.items():
            dtype, xxh3 = self._hashes.get(name) or (NAMES[tensor.dtype], tensor_hash(tensor))
            tensors.append((name, dtype, tensor.shape, xxh3))
        return digest_of(tensors)

    # Computation --------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(
        self,
        *,
        token_ids: Columns,  # int64 [N]
        positions: Columns,  # int64 [N]
        cache_rows: Columns,  # int64 [N]: slot * M + position
        segments: list[tuple[int, int, int, int]],  # first sequence, count, longest query, longest context
        slots: Columns,  # int64, one a sequence
        query_lens: Columns,  # int64, one a sequence
        context_lens: Columns,  # int64, one a sequence
        sample_rows: Columns | None,  # int64 [S]
        uniforms: Columns | None,  # float64 [S]
        temperatures: Columns | None,  # float32 [S]; None: all 1
        top_p: Columns | None,  # float32 [S]; None here and below: off for all
        top_k: Columns | None,  # int64 [S]
        min_p: Columns | None,  # float32 [S]
        banned: tuple[Columns, Columns] | None,  # int64: rows of S, token ids
        allowed: Callable[[], tuple[Columns, Columns]] | None,  # rows of S; bits [rows, V], padded to 32
        top: int,  # how many of the most likely tokens to return
        prompt_rows: Columns | None,  # int64 [P]
        prompt_targets: Columns | None,  # int64 [P]
        prompt_top: int,
    ) -> tuple[tuple[bytes, ScoreColumns] | None, ScoreColumns | None, ExpertColumn | None]:
        """Sampled ids (int64) with their scores, the scores of prompt tokens, and the experts of all tokens where they
        are reported."""
        place = self._place
        rows = None
        # Everything that the step needs goes to the device before the first of its kernels.
        if sample_rows is not None and uniforms is not None:
            rows = Rows(
                uniforms=place(torch.frombuffer(uniforms, dtype=torch.float64)),
                temperatures=_placed(temperatures, torch.float32, place),
                top_p=_placed(top_p, torch.float32, place),
                top_k=_placed(top_k, torch.int64, place),
                min_p=_placed(min_p, torch.float32, place),
                banned=None if banned is None else (place(_integers(banned[0])), place(_integers(banned[1]))),
            )
        sampled_rows = _placed(sample_rows, torch.int64, place)
        scored_rows, targets = (_placed(column, torch.int64, place) for column in (prompt_rows, prompt_targets))
        hidden = self._hidden(
            Step(
                token_ids=_integers(token_ids),
                positions=_integers(positions),
                cache_rows=_integers(cache_rows),
                segments=segments,
                slots=_integers(slots),
                query_lens=_integers(query_lens),
                context_lens=_integers(context_lens),
            )
        )
        found: list[Tensor] = []
        sampled = prompt = None
        if rows is not None and sampled_rows is not None:
            logits = self.decoder.logits(hidden[sampled_rows])
            if allowed is not None:
                # By now the masks are there, as a rule: they were computed while the model was.
                logits = self._leave_out(logits, *allowed())
            token_ids_S, raw, processed = sample(logits, rows)
            sampled = score(raw if self.raw_logprobs else processed, token_ids_S, top)
            found += [token_ids_S, *_tensors(sampled)]
        if scored_rows is not None and targets is not None:
            logprobs = self.decoder.logits(hidden[scored_rows]).log_softmax(-1)
            prompt = score(logprobs, targets, prompt_top)
            found += _tensors(prompt)
        answer = _on_the_host(found)
        return (
            None if sampled is None else (next(answer), _columns(sampled, answer)),
            None if prompt is None else _columns(prompt, answer),
            self._experts(),
        )

    def _leave_out(self, logits: Tensor, rows: Columns, words: Columns) -> Tensor:
        """The logits [S, V], -inf where a grammar does not allow a token."""
        if not rows:
            return logits
        bits = self._place(torch.frombuffer(words, dtype=torch.uint8)).view(len(rows) // 8, -1)
        return leave_out(logits, self._place(_integers(rows)), unpacked(bits, logits.shape[1]))

    def _place(self, tensor: Tensor) -> Tensor:
        """The tensor on the model's device. The host does not wait for the copy: its source is read before it returns,
        as all memory is that is not pinned."""
        return tensor.to(self.device, non_blocking=True)


class TorchBackend(StepBackend):
    """A model folder, computed by the decoder of `inference.torch.model`."""

    decoder: Decoder

    def __init__(
        self,
        folder: Path,
        *,
        dtype: str,
        max_num_seqs: int,
        max_model_len: int | None,
        logprobs_mode: str = "raw_logprobs",
        lora: tuple[int, list[str]] | None = None,
        device: str = CPU,
    ) -> None:
        """`lora`: rank and target modules of the adapters that will be loaded, in place of whole weights.
        `device`: as `device_of` takes it.

        Raises ValueError: a setting or the model cannot be served.
        """
        place, shape = device_of(device), Shape.read(folder)
        max_len = longest_of(max_model_len, shape.max_positions)
        with within_memory(dtype, max_num_seqs, max_len, place):
            decoder = Decoder(shape, dtype=DTYPES[dtype], slots=max_num_seqs, max_len=max_len, device=place)
            load_folder(decoder, folder)
            merged = None if lora is None else adapter.MergedAdapter(decoder, folder, *lora)
        super().__init__(decoder, logprobs_mode=logprobs_mode, merged=merged)
        self._groups = shape.heads // shape.kv_heads

    def _hidden(self, step: Step) -> Tensor:
        return self.decoder.forward(
            self._place(step.token_ids),
            self._place(step.positions),
            self._place(step.cache_rows),
            self._segments(step.segments, step.slots, step.query_lens, step.context_lens),
        )

    def _segments(
        self, bounds: list[tuple[int, int, int, int]], slots: Tensor, query_lens: Tensor, context_lens: Tensor
    ) -> list[Segment]:
        """The columns are on the CPU, where their values are looked at."""
        segments, row = [], 0
        for first, count, query_len, context_len in bounds:
            members = slice(first, first + count)
            queries, contexts, places = query_lens[members], context_lens[members], slots[members]
            rows = count if query_len == 1 else int(queries.sum())
            low, high = int(places[0]), int(places[-1])
            segments.append(
                Segment(
                    rows=slice(row, row + rows),
                    # Slots are in order, so they lie side by side exactly when they span no more than their number.
                    slots=slice(low, high + 1) if high - low + 1 == count else self._place(places),
                    count=count,
                    query_len=query_len,
                    context_len=context_len,
                    scatter=None if rows == count * query_len else self._place(_padded_places(queries, query_len)),
                    mask=self._mask(self._place(queries), self._place(contexts), query_len, context_len),
                )
            )
            row += rows
        return segments

    def _mask(self, queries: Tensor, contexts: Tensor, query_len: int, context_len: int) -> Tensor:
        """[C, 1, Q * G, L]: a token attends to positions up to its own. Rows of padding attend to something, too."""
        starts = contexts - queries
        positions = starts[:, None] + torch.arange(query_len, device=self.device)
        hidden = torch.arange(context_len, device=self.device) > positions.unsqueeze(-1)
        mask = torch.zeros(hidden.shape, dtype=self.decoder.dtype, device=self.device).masked_fill_(hidden, -torch.inf)
        return mask.repeat_interleave(self._groups, dim=1).unsqueeze(1) if query_len > 1 else mask.unsqueeze(1)


def _padded_places(queries: Tensor, query_len: int) -> Tensor:
    """Place of each token in a query block padded to `query_len`."""
    used = torch.arange(query_len) < queries[:, None]
    return used.flatten().nonzero().squeeze(1)


def _integers(column: Columns) -> Tensor:
    return torch.frombuffer(column, dtype=torch.int64)


def _placed(column: Columns | None, dtype: torch.dtype, place: Callable[[Tensor], Tensor]) -> Tensor | None:
    return None if column is None else place(torch.frombuffer(column, dtype=dtype))


def _tensors(scores: Scores) -> list[Tensor]:
    tensors = (scores.logprobs, scores.ranks, scores.top_ids, scores.top_logprobs)
    return [tensor for tensor in tensors if tensor is not None]


def _on_the_host(tensors: list[Tensor]) -> Iterator[bytes]:
    """The bytes of each, in one copy from a device that is not the host."""
    if all(tensor.device.type == CPU for tensor in tensors):
        yield from (tensor.numpy().tobytes() for tensor in tensors)
        return
    together = torch.cat([as_bytes(tensor.contiguous()) for tensor in tensors]).cpu().numpy().tobytes()
    begin = 0
    for tensor in tensors:
        yield together[begin : begin + tensor.nbytes]
        begin += tensor.nbytes


def _columns(scores: Scores, answer: Iterator[bytes]) -> ScoreColumns:
    """`answer`: at the first of the scores' tensors."""
    logprobs, ranks = next(answer), next(answer)
    if scores.top_ids is None:
        return logprobs, ranks, b"", b"", 0
    return logprobs, ranks, next(answer), next(answer), scores.top_ids.shape[1]
