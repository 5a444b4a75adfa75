"""The same in the stages of rLLM's trainer, as the backend of one: rLLM itself is installed from its source only.

primerl rl @ examples/reverse-text/rl.toml --trainer external --output-dir outputs/own
python examples/bring-your-own-trainer/with_rllm_stages.py outputs/own
"""

import asyncio
import sys
from types import SimpleNamespace
from typing import Any

import primerl
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

CLIP, MINI_BATCHES = 0.2, 2  # of the micro-batches of a step, with a step of the optimizer each


class PrimerlBackend:
    """Agents, engines and advantages are the run's, so that the first stages only wait for its batch."""

    def __init__(self, run: Any) -> None:
        self.run, self.batches = run, run.batches()
        self.model = AutoModelForCausalLM.from_pretrained(run.model_path, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-4, betas=(0.9, 0.95), weight_decay=0.0)

    async def generate_episodes(self, state: SimpleNamespace) -> bool:
        state.batch = await asyncio.to_thread(next, self.batches, None)
        return state.batch is not None

    async def process_backend_batch(self, state: SimpleNamespace) -> None:
        """One row a sequence, and what the trainer gives its tokens before the update: the ratio is around that."""
        state.parts = []
        for packed in state.batch.micro_batches:
            columns = (packed.token_ids.long(), packed.loss_mask, packed.logprobs, packed.advantages)
            rows = [pad_sequence(one.split(list(packed.sequence_lengths)), batch_first=True) for one in columns]
            part = SimpleNamespace(token_ids=rows[0], temperature=packed.temperatures.max())
            part.sampled, part.engine, part.advantages = rows[1][:, 1:] == 1, rows[2][:, 1:], rows[3][:, 1:]
            with torch.no_grad():
                part.old = self.logprobs(part)
            state.parts.append(part)

    async def update_policy(self, state: SimpleNamespace) -> None:
        size = -(-len(state.parts) // MINI_BATCHES)
        for mini_batch in (state.parts[first : first + size] for first in range(0, len(state.parts), size)):
            tokens = sum(int(part.sampled.sum()) for part in mini_batch)
            for part in mini_batch:
                ratio = torch.exp(self.logprobs(part) - part.old)
                surrogate = torch.minimum(ratio * part.advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * part.advantages)
                # Engine and trainer differ a little, and older weights have sampled: a weight of at most 2.
                loss = -torch.exp(part.old - part.engine).clamp(max=2.0) * surrogate
                (loss[part.sampled].sum() / tokens).backward()
            state.norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0).item()
            self.optimizer.step()
            self.optimizer.zero_grad()

    async def on_policy_updated(self, state: SimpleNamespace) -> None:
        self.run.publish(self.model, metrics={"optim/grad_norm": state.norm})
        print(f"step {state.batch.step}  reward {state.batch.metrics['reward/all/mean']:.3f}", flush=True)

    def logprobs(self, part: SimpleNamespace) -> torch.Tensor:
        logits = self.model(part.token_ids).logits[:, :-1] / part.temperature
        return logits.log_softmax(-1).gather(-1, part.token_ids[:, 1:, None]).squeeze(-1)


async def train(backend: PrimerlBackend) -> None:
    state = SimpleNamespace()
    while await backend.generate_episodes(state):
        for stage in (backend.process_backend_batch, backend.update_policy, backend.on_policy_updated):
            await stage(state)


with primerl.connect(sys.argv[1]) as run:
    asyncio.run(train(PrimerlBackend(run)))
