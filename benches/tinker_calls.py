"""What a call of the Tinker SDK costs beyond the work: forward_backward of 128 datums of 512 tokens, through HTTP,
protobuf and queue, against the same call of the training client in this process; and small calls a second.

    python benches/tinker_calls.py MODEL [--datums 128] [--tokens 512] [--rounds 5] [--shared 448]

Both in turns, in one run; the ratio is of the medians. Goal: 1.2. With `--shared`, groups of eight datums begin with so
many tokens alike, and the same call with `shared_prefixes = "off"` is timed too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

KEY = "tml-bench"


def serve(model: Path, folder: Path, tokens: int) -> tuple[subprocess.Popen[str], str]:
    options = ["--model.path", str(model), "--model.names", json.dumps(["bench"]), "--output-dir", str(folder)]
    options += ["--port", "0", "--trainer.threads", "1", "--trainer.max-tokens", str(tokens)]
    options += ["--inference.max-model-len", "1024", "--inference.replicas", "1"]
    command = [sys.executable, "-m", "primerl", "serve", "--tinker", *options]
    # The server is not to be among the user's runs.
    environment = {**os.environ, "TINKER_API_KEY": KEY, "PRIMERL_STATE_DIR": str(folder / "state")}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8", env=environment)
    assert server.stdout is not None
    for line in server.stdout:
        if found := re.match(r"ready: TINKER_BASE_URL=(\S+)", line):
            return server, found[1]
    raise SystemExit("the server has not started")


def own_client(model: Path, tokens: int, shared_prefixes: Literal["auto", "off"] = "auto") -> Any:
    import torch
    from primerl.tinker.clients import BaseModel, LoraOptions, TrainingClient, on_one_device

    torch.set_num_threads(1)
    computation = on_one_device(dtype="float32", shared_prefixes=shared_prefixes, threads=1)
    base = BaseModel(model.absolute(), computation, 32.0, trusted=False)
    return TrainingClient(base, LoraOptions(8, 0, True, True, True), tokens)


def rows_of(count: int, tokens: int, shared: int) -> list[list[int]]:
    """Random, but for what each group of eight begins with."""
    draw = random.Random(0)
    rows: list[list[int]] = []
    for place in range(count):
        begin = rows[-1][:shared] if place % 8 else [draw.randrange(3, 250) for _ in range(shared)]
        rows.append(begin + [draw.randrange(3, 250) for _ in range(tokens - shared)])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--datums", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--micro-batch", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shared", type=int, default=0, help="tokens that groups of eight datums begin with alike")
    given = parser.parse_args()
    import numpy as np
    import tinker
    from primerl.tinker.wire import request_of
    from tinker import types
    from tinker.proto import tinker_public_pb2 as pb

    rows = rows_of(given.datums, given.tokens + 1, given.shared)
    more: dict[str, Any] = {"logprobs": [-3.0] * given.tokens, "advantages": [1.0] * given.tokens}
    data = [
        types.Datum(model_input=types.ModelInput.from_ints(row[:-1]), loss_fn_inputs={"target_tokens": row[1:], **more})
        for row in rows
    ]
    made = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="ppo")
    for row in rows:
        columns = {"target_tokens": row[1:], **more}
        one = made.data.add()
        one.model_input.add().encoded_text.tokens = np.array(row[:-1], np.int32).tobytes()
        for name, values in columns.items():
            kind, dtype = (np.int64, pb.DTYPE_INT64) if name == "target_tokens" else (np.float32, pb.DTYPE_FLOAT32)
            array = np.array(values, kind)
            one.loss_fn_inputs[name].CopyFrom(pb.Tensor(dense=array.tobytes(), dtype=dtype, shape=array.shape))
    request = request_of(made.SerializeToString())

    with tempfile.TemporaryDirectory() as folder:
        server, url = serve(given.model, Path(folder) / "tinker", given.micro_batch)
        try:
            own = own_client(given.model, given.micro_batch)
            with tinker.ServiceClient(base_url=url, api_key=KEY) as service:
                client = service.create_lora_training_client(base_model="bench", rank=8, seed=0).result()
                apart = own_client(given.model, given.micro_batch, "off") if given.shared else None
                through, direct, unshared = [], [], []
                for _ in range(given.rounds):
                    since = time.perf_counter()
                    client.forward_backward(data, "ppo").result()
                    through.append(time.perf_counter() - since)
                    since = time.perf_counter()
                    own.forward_backward(request)
                    direct.append(time.perf_counter() - since)
                    if apart is not None:
                        since = time.perf_counter()
                        apart.forward_backward(request)
                        unshared.append(time.perf_counter() - since)
                small = []
                for _ in range(100):
                    since = time.perf_counter()
                    client.optim_step(types.AdamParams(learning_rate=0.0)).result()
                    small.append(time.perf_counter() - since)
        finally:
            server.terminate()
            server.wait()
    p50, alone = statistics.median(through), statistics.median(direct)
    print(
        f"forward_backward of {given.datums} x {given.tokens}: p50 {p50:.3f} s; the same call in process {alone:.3f} s"
    )
    if unshared:
        print(f"without shared prefixes {statistics.median(unshared):.3f} s")
    print(f"optim_step: p50 {1000 * statistics.median(small):.1f} ms, {1 / statistics.mean(small):.0f} calls a second")
    print(f"ratio {p50 / alone:.2f} (goal 1.2)")
    sys.stdout.flush()
    os._exit(0 if p50 / alone <= 1.2 else 1)


if __name__ == "__main__":
    main()
