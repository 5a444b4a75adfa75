"""Training: the policy trainer (`rl`), supervised fine-tuning (`sft`) and what they share.

Imports only torch, transformers, safetensors, msgpack, xxhash and the standard library, so that it runs on a
machine that has nothing else. Supervised fine-tuning takes its loss masks from `primerl.render`, and adapters need
`peft`; both are imported where used.

| module | what it holds |
|---|---|
| `config` | dataclasses of the settings, read from a mapping |
| `model` | a `transformers` model over packed sequences |
| `policy_trainer` | the policy trainer's loop over steps |
| `data`, `batches` | the batch of a step as tensors; the next one fetched beside the step |
| `client` | the orchestrator's trainer endpoints |
| `loss` | policy loss, with what is measured of it |
| `optim` | AdamW, learning-rate schedules, gradient clipping |
| `distributed`, `parallel`, `start_ranks` | data ranks; the model divided among them; starting them |
| `lora`, `merging` | low-rank adapters: made, saved, loaded, published |
| `weights`, `broadcast` | weights published to the engines; by a thread, beside training |
| `tensors`, `digest` | dtypes, bytes and hashes of what is published; the digest that engines prove |
| `probe` | what the model computes of a few tokens, published with its weights |
| `shards`, `meeting` | weights divided among ranks; where the ranks' threads hear of each other |
| `transfer`, `receiver`, `wire` | published weights sent from memory, beside the files |
| `checkpoint`, `step_folders` | what training goes on from; the model folder a run ends with; which are kept |
| `staging` | hard links to what the store is to have |
| `metrics` | `metrics.jsonl` and the console line |
"""

import os

# Threads of torch's OpenMP pool that wait for each other spin by default. Where anything else wants a core, as engines
# and environments on one machine do, the spinning keeps it from the very thread that is waited for, and a training
# step takes tens of times as long. OpenMP reads this when torch is imported, hence the place.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
