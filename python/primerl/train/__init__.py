"""Training: the policy trainer (`rl`), supervised fine-tuning (`sft`) and what they share.

Imports only torch, transformers, safetensors, msgpack, xxhash and the standard library, so that it runs on a machine
that has nothing else. What computes a step needs the first three only, and of `primerl` only this folder and
`process` (`benches/trainer_gpu.py`). Supervised fine-tuning takes its loss masks from `primerl.render`, and adapters
need `peft`; both are imported where they are used.

| module or folder | what it holds |
|---|---|
| `loop/` | `rl` and `policy_trainer` (`primerl trainer`), `sft` (`primerl sft`), their client, batches, metrics |
| `model/` | a `transformers` model over packed sequences: loading, packing, the proof, FLOPs |
| `model/streaming` | a large model: each tensor from its file to the ranks, and the proof by its first layers |
| `model/prefixes`, `model/tree_attention` | samples that begin alike as a prefix tree, and attention over it |
| `model/router_replay` | experts of a mixture as the engine chose them |
| `model/support`, `model/footprint`, `model/memory` | by `config.json`: is a model supported, its size and memory |
| `model/families` | what is known of families of models, by their type |
| `adapters/` | low-rank adapters: which layers, their files, merging |
| `objective/` | components of the loss, log-probabilities, replayed truncation and grammars |
| `losses/`, `optimizers/` | policy losses and optimizers, one file each |
| `registry` | finds them by file, entry point or `module:name` |
| `optim` | one update of the model: clipping, optimizer, learning rate |
| `data/` | a step's batch as tensors; rows of datasets as packed tokens with masks |
| `weights/` | published weights: files and manifest, broadcasts, direct transfers |
| `distributed/` | ranks, the model divided among them, their barrier, torchrun |
| `checkpoint/` | checkpoints, also on request, model folders, folders that appear whole, what the store uploads |
| `settings`, `sft_settings` | dataclasses of the settings; `primerl.process.setting_checks` reads them from a mapping |
"""

import os

# Threads of torch's OpenMP pool spin by default while they wait for each other. If anything else needs a core, as
# engines and environments on the same machine do, the spinning takes it from the very thread that is waited for, and a
# training step takes tens of times as long. OpenMP reads the variable when torch is imported, so it is set here.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
