"""Training: the policy trainer (`rl`), supervised fine-tuning (`sft`) and what they share.

Imports only torch, transformers, safetensors, msgpack, xxhash and the standard library, so that it runs on a
machine that has nothing else; what computes a step needs the first three only, and no other file of `primerl`
(`benches/trainer_gpu.py`). Supervised fine-tuning takes its loss masks from `primerl.render`, and adapters need `peft`;
both are imported where used.

| module or folder | what it holds |
|---|---|
| `settings`, `sft_settings` | dataclasses of the settings |
| `registry`, `import_path` | parts that have a file a kind (`losses/`, `optimizers/`); functions named as `module:name`
|
| `optim` | one update of the model: clipping, optimizer, learning rate |
| `loop/` | `rl` and `policy_trainer` (`primerl trainer`), `sft` (`primerl sft`), their client, metrics and ends |
| `model/` | a `transformers` model over packed sequences: loading, families, the proof, FLOPs |
| `adapters/` | low-rank adapters |
| `loss/` | components of the loss, log-probabilities, replayed truncation and grammars |
| `data/` | a step's batch as tensors; rows of datasets as packed tokens with masks |
| `weights/` | published weights: files and manifest, broadcasts, direct transfers |
| `distributed/` | ranks, the model divided among them, their barrier, torchrun |
| `checkpoint/` | checkpoints, folders that appear whole, what the store uploads |
"""

import os

# Threads of torch's OpenMP pool that wait for each other spin by default. Where anything else wants a core, as engines
# and environments on one machine do, the spinning keeps it from the very thread that is waited for, and a training
# step takes tens of times as long. OpenMP reads this when torch is imported, hence the place.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
