"""Training: the policy trainer (`rl`), supervised fine-tuning (`sft`) and what they share.

Imports only torch, transformers, safetensors, msgpack, xxhash and the standard library, so that it runs on a
machine that has nothing else; what computes a step needs the first three only, and no other file of `primerl`
(`benches/trainer_gpu.py`). Supervised fine-tuning takes its loss masks from `primerl.render`, and adapters need `peft`;
both are imported where used.

In the order in which they are best read:

| module | what it holds |
|---|---|
| **a model** | |
| `config`, `sft_config` | dataclasses of the settings |
| `kinds`, `by_path` | parts that have a file a kind; functions of others |
| `model`, `attention` | a `transformers` model over packed sequences |
| `packed`, `recurrent` | where sequences are in a row; layers that carry a state from token to token |
| `architectures`, `model_types` | what some of them need for that; what `config.json` alone says of it |
| `proof` | that it computes there what it computes by itself |
| `logprobs` | log-probabilities and entropies in chunks |
| `truncation`, `grammar` | truncated sampling and structured outputs, replayed |
| `memory`, `lora`, `adapter_files` | how its layers run; low-rank adapters, made, saved, loaded; their files |
| `import_once` | `transformers`, imported in less time |
| `loading` | from a model folder to what is trained, also divided among ranks |
| **what is learnt** | |
| `loss`, `losses/` | the loss and its components; one file a policy loss |
| `cross_entropy` | the loss of supervised fine-tuning |
| `optim`, `optimizers/`, `schedules` | one update; one file an optimizer; learning rates |
| **reinforcement learning** | |
| `rl` | `primerl trainer`, made of its parts |
| `policy_trainer` | its loop over steps |
| `identity` | which trainer this is; the run has one |
| `client`, `data`, `batches` | the orchestrator's endpoints; a step's batch as tensors; the next one ahead |
| `weights`, `broadcast`, `merging` | weights published to the engines, by a thread; adapters merged |
| `tensors`, `digest`, `probe` | dtypes, bytes and hashes of what is published; what it computes of a few tokens |
| `transfer`, `receiver`, `wire` | published weights sent from memory, beside the files |
| **supervised fine-tuning** | |
| `sft` | `primerl sft`, and its loop over steps |
| `start_folder`, `sft_data` | the model and the rows it begins with |
| `sources`, `tables`, `conversations` | rows of files and of the hub; one row as a conversation |
| `kept_rows` | rows that were read while they were checked |
| `table_nulls` | which nulls of a table were written, and which are padding |
| `message_fields` | marks of what is not trained; fields that would be ignored |
| `control_tokens` | rows whose text holds markup of the model |
| `masks`, `rows`, `bad_rows` | conversations as tokens with masks; those that cannot be used |
| `written` | what the chat template leaves out of a row |
| `mixture`, `packing`, `validation` | the order of rows; steps of micro-batches; the loss on held-out rows |
| **several ranks** | |
| `start_ranks`, `distributed`, `parallel` | starting them; sums over them; the model divided among them |
| `heartbeats` | which of them are alive |
| `shards`, `meeting` | weights divided among them; where their threads hear of each other |
| **what is kept and said** | |
| `checkpoint`, `checkpoint_proof` | what training goes on from, and the model folder a run ends with; its hashes |
| `step_folders`, `files`, `staging` | which folders are kept; whole or not at all; links to what the store is to have |
| `metrics`, `statistics`, `histograms` | `metrics.jsonl` and the console line; sums over tokens |
| `flops`, `attended`, `peaks` | MFU: model FLOPs, what attention multiplies, what devices can do |
| `routing`, `exposed` | the load of experts; Prometheus |
| `progress`, `stop`, `diverged` | what takes long; signals; batches of a loss that is not finite |
"""

import os

# Threads of torch's OpenMP pool that wait for each other spin by default. Where anything else wants a core, as engines
# and environments on one machine do, the spinning keeps it from the very thread that is waited for, and a training
# step takes tens of times as long. OpenMP reads this when torch is imported, hence the place.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
