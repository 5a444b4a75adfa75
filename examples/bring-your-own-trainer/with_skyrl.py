"""The same with SkyRL's policy losses and its reduction of losses, in SkyRL's own virtualenv.

primerl rl @ examples/reverse-text/rl.toml --trainer external --output-dir outputs/own
python examples/bring-your-own-trainer/with_skyrl.py outputs/own
"""

import sys

import primerl
import torch
from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry, apply_loss_reduction_to_advantages_minibatch
from skyrl.train.config import AlgorithmConfig
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

LOSS = "dual_clip"  # any name of SkyRL's registry, one of your own too
algorithm = AlgorithmConfig(policy_loss_type=LOSS, loss_reduction="token_mean")
policy_loss = PolicyLossRegistry.get(LOSS)


def minibatch(batch: primerl.Batch) -> dict[str, torch.Tensor]:
    """A training batch of SkyRL: one row a sequence, padded on the right; token i is predicted at i - 1."""
    parts = {"sequences": [], "loss_mask": [], "rollout_logprobs": [], "advantages": [], "temperatures": []}
    for packed in batch.micro_batches:
        columns = (packed.token_ids.long(), packed.loss_mask, packed.logprobs, packed.advantages, packed.temperatures)
        for name, column in zip(parts, columns, strict=True):
            parts[name] += column.split(list(packed.sequence_lengths))
    made = {name: pad_sequence(rows, batch_first=True) for name, rows in parts.items()}
    made["temperatures"] = made["temperatures"].amax(1, keepdim=True).unsqueeze(-1)
    for name in ("loss_mask", "rollout_logprobs", "advantages"):
        made[name] = made[name][:, 1:].float()
    made["advantages"] = apply_loss_reduction_to_advantages_minibatch(
        made["advantages"], made["loss_mask"], algorithm.loss_reduction, MICRO_BATCH, made["sequences"].shape[1]
    )
    return made


MICRO_BATCH = 8
with primerl.connect(sys.argv[1]) as run:
    model = AutoModelForCausalLM.from_pretrained(run.model_path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, betas=(0.9, 0.95), weight_decay=0.0)
    if (saved := run.restore()) is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    run.publish(model)
    for batch in run.batches():
        whole = minibatch(batch)
        clipped = []
        for first in range(0, len(whole["sequences"]), MICRO_BATCH):
            part = {name: column[first : first + MICRO_BATCH] for name, column in whole.items()}
            logits = model(part["sequences"]).logits[:, :-1] / part["temperatures"].clamp(min=1e-4)
            logprobs = logits.log_softmax(-1).gather(-1, part["sequences"][:, 1:, None]).squeeze(-1)
            # The engine's log-probabilities are those of the policy that sampled: SkyRL's old ones.
            old = part["rollout_logprobs"]
            loss, metrics = policy_loss(logprobs, old, part["advantages"], algorithm, part["loss_mask"], old)
            loss.backward()
            clipped.append(metrics["clip_ratio"])
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        run.publish(model, metrics={"optim/grad_norm": norm.item(), "clip_ratio": sum(clipped) / len(clipped)})
        if run.checkpoint_due:
            run.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        print(f"step {batch.step}  reward {batch.metrics['reward/all/mean']:.3f}", flush=True)
