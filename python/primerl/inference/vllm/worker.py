"""What vLLM's worker processes do for a run: load published weights, and say which ones they hold.

    --worker-extension-cls primerl.inference.vllm.worker.WorkerExtension
    --weight-transfer-config '{"backend":"primerl"}'

vLLM's routes stay as they are: /start_weight_update, /update_weights {"update_info": {"path": folder}},
/finish_weight_update; the digest is `/collective_rpc {"method": "primerl_weight_digest"}`. A checkpoint is checked
whole before the model is touched, so a bad one leaves the weights that are served as they are. An engine that is sent
adapters has them loaded by /v1/load_lora_adapter (`adapters`), and its own weights stay.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from primerl.inference import pulling
from primerl.inference.vllm import loader  # noqa: F401 - vLLM finds it by its name
from primerl.inference.vllm.checkpoint import Checkpoint, CheckpointError, Frozen, Receive, read, tensors_of
from primerl.inference.vllm.computed import compare, forget_packed_experts, refresh_packed_heads
from primerl.inference.vllm.gpt_oss import copy_sinks, for_reload
from primerl.inference.vllm.serve import LORA
from primerl.train.weights.mxfp4 import joined
from primerl.train.weights.receiver import TransferError, receive

if TYPE_CHECKING:
    from primerl.inference.vllm.adapters import CheckedAdapters

BACKEND = "primerl"
NOTHING_LOADED = "none: no weights were loaded since the start"

log = logging.getLogger("vllm.primerl")


@dataclass
class FolderInit(WeightTransferInitInfo):
    """Nothing has to be set up."""


@dataclass
class FolderUpdate(WeightTransferUpdateInfo):
    path: str
    """Folder with `manifest.json`, on a file system that this process sees."""


class FolderTransfer(WeightTransferEngine[FolderInit, FolderUpdate]):
    """Loads checkpoints from folders."""

    init_info_cls = FolderInit
    update_info_cls = FolderUpdate
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        # Now: the folder that the server was started from may be gone when the first weights come.
        tied = bool(getattr(self.model_config.hf_text_config, "tie_word_embeddings", False))
        began_with = tensors_of(Path(self.model_config.model), tied=tied)
        self.expected = {name: tuple(tensor.shape) for name, tensor in began_with.items()}
        # Views of mapped files, which stay readable.
        self.frozen = Frozen(began_with)
        self.known = compare(self.model, began_with) if self.parallel_config.world_size == 1 else None
        self.digest = NOTHING_LOADED
        self.compared = 0
        self.received = 0
        self.prepared: tuple[Path, Future[Checkpoint]] | None = None
        self.puller = pulling.from_variables(os.environ)
        self.reader = ThreadPoolExecutor(1, "primerl-reader")
        # Not where a user's own server has adapters of its own (--enable-lora).
        self.adapts = LORA in os.environ
        if self.adapts:
            found = None if self.known is None else len(self.known.found)
            log.info("%s of %d tensors of the base model compared with the model", found, len(began_with))
        # The same in all workers of the server.
        self.engine_name = f"{socket.gethostname()}-{vllm_config.instance_id}"

    def init_transfer_engine(self, init_info: FolderInit) -> None:
        pass

    def start_weight_update(self) -> None:
        pass  # The model is touched by what was checked only.

    def prepare(self, folder: Path) -> None:
        """Starts reading and checking a checkpoint in the background; the load takes the result.

        What is received from the trainer comes over a process group, which one thread alone may use: not that.
        """
        reading = self.reader.submit(self._read, folder, _refuse_to_receive)
        self.prepared = (folder, reading)

    def is_prepared(self) -> bool:
        return self.prepared is None or self.prepared[1].done()

    def _checkpoint(self, folder: Path) -> Checkpoint:
        prepared, self.prepared = self.prepared, None
        if prepared is not None and prepared[0] == folder:
            with contextlib.suppress(_ToBeReceivedError):
                return prepared[1].result()
        return self._read(folder, self._receive)

    def _read(self, folder: Path, receive: Receive) -> Checkpoint:
        here = folder if self.puller is None else self.puller.folder(folder)
        return read(here, self.expected, receive, frozen=self.frozen)

    def receive_weights(self, update_info: FolderUpdate) -> None:
        if self.adapts:
            raise CheckpointError(
                f"{update_info.path}: this engine was started for adapters, whose base model stays as it is; they are "
                "loaded by /v1/load_lora_adapter"
            )
        began = time.perf_counter()
        self.received = 0
        checkpoint = self._checkpoint(Path(update_info.path))
        checked_s = time.perf_counter() - began
        try:
            self._load(checkpoint)
            if self.known is not None:
                self.compared = compare(self.model, dict(checkpoint.tensors)).check(self.known)
        except BaseException:
            # Requests in flight would continue with unknown weights, under the label of the previous ones.
            log.critical("policy %d was loaded in part; this process ends", checkpoint.version, exc_info=True)
            logging.shutdown()
            os.kill(os.getpid(), signal.SIGKILL)
        self.digest = checkpoint.digest
        log.info(
            "loaded policy %d in %.2f s (%.2f s of it to check it, %d tensors received from the trainer); "
            "%d of %d tensors compared with the model",
            checkpoint.version,
            time.perf_counter() - began,
            checked_s,
            self.received,
            self.compared,
            len(checkpoint.tensors),
        )

    def _receive(self, manifest: Path, file: str) -> dict[str, torch.Tensor] | None:
        """From the trainer's memory, where it offers that; the file holds the same."""
        parallel = self.parallel_config
        try:
            tensors = receive(
                manifest,
                file,
                world=parallel.world_size,
                rank=parallel.rank,
                engine=self.engine_name,
                device=self.device,
            )
        except (TransferError, OSError) as error:
            log.warning("%s of %s is read from its file: %s", file, manifest.parent.name, error)
            return None
        self.received += len(tensors)
        # Where there is room for a second model, until all of it has been checked.
        return {name: tensor.cpu() for name, tensor in tensors.items()}

    def _load(self, checkpoint: Checkpoint) -> None:
        with torch.device(self.device):
            if self.device.type == "cpu":
                forget_packed_experts(self.model)
            initialize_layerwise_reload(self.model)
            # With what is frozen: a reload is of whole layers.
            tensors = joined([*checkpoint.tensors, *self.frozen.tensors.items()])
            self.model.load_weights(for_reload(self.model, tensors))
            finalize_layerwise_reload(self.model, self.model_config)
            refresh_packed_heads(self.model)
            parallel = self.parallel_config
            copy_sinks(self.model, checkpoint.tensors, parallel.rank % parallel.tensor_parallel_size)

    def finish_weight_update(self) -> None:
        pass

    def shutdown(self) -> None:
        self.reader.shutdown(wait=False, cancel_futures=True)


class _ToBeReceivedError(Exception):
    """The trainer offers a file from its memory."""


def _refuse_to_receive(manifest: Path, file: str) -> None:
    raise _ToBeReceivedError(f"{file} of {manifest.parent}")


class WorkerExtension:
    """Becomes a base class of vLLM's worker; its methods are called by `/collective_rpc`."""

    weight_transfer_engine: Any
    model_runner: Any

    def primerl_prepare(self, folder: str) -> dict[str, Any]:
        """Starts reading and checking weights while requests continue. Loading the same folder reports what is
        wrong."""
        self.weight_transfer_engine.prepare(Path(folder))
        return self.primerl_is_prepared()

    def primerl_is_prepared(self) -> dict[str, Any]:
        """Whether the load has nothing more to wait for."""
        return {"ready": self.weight_transfer_engine.is_prepared()}

    def primerl_weight_digest(self) -> dict[str, Any]:
        """Digest of the tensors that the model was loaded from; `compared`: how many of them were found in it.

        `adapters`, where the engine is sent adapters: how many of them requests may name at the same time.
        """
        engine = self.weight_transfer_engine
        said = {"digest": engine.digest, "tensors": len(engine.expected), "compared": engine.compared}
        return {**said, "adapters": self._adapters().most} if engine.adapts else said

    def primerl_adapter_digest(self, name: str) -> dict[str, Any]:
        """Digest of the adapter that requests get by this name, as its manifest has it."""
        digest, compared = self._adapters().digest(name)
        return {"digest": digest, "compared": compared}

    def primerl_keep_adapters(self, names: list[str]) -> dict[str, Any]:
        """Frees the memory of all other adapters."""
        return {"removed": self._adapters().keep(names)}

    def _adapters(self) -> CheckedAdapters:
        if LORA in os.environ:
            from primerl.inference.vllm.adapters import CheckedAdapters

            manager = getattr(self.model_runner, "lora_manager", None)
            if isinstance(manager, CheckedAdapters):
                return manager
        raise RuntimeError("this engine was not started for the adapters of a run")


if LORA in os.environ:
    # Here: it takes modules of vLLM that other engines can do without.
    from primerl.inference.vllm import adapters

    adapters.install()
if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, FolderTransfer)
