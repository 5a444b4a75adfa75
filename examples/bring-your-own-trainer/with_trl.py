"""The same with TRL's utilities for models: log-probabilities and entropy without a second copy of the logits.

python examples/bring-your-own-trainer/with_trl.py examples/reverse-text/rl.toml --output-dir outputs/own
"""

import sys

import primerl
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM
from trl.trainer.utils import disable_dropout_in_model, entropy_from_logits, selective_log_softmax

CLIP = 0.2  # of PPO's ratio


def rows(column: torch.Tensor, packed: primerl.MicroBatch) -> torch.Tensor:
    """One row a sequence, padded on the right, where a causal model does not look."""
    return pad_sequence(column.split(list(packed.sequence_lengths)), batch_first=True)


with primerl.Run(*sys.argv[1:]) as run:
    model = AutoModelForCausalLM.from_pretrained(run.model_path, dtype=torch.float32)
    disable_dropout_in_model(model)  # the engine has none
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, betas=(0.9, 0.95), weight_decay=0.0)
    if (saved := run.restore()) is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    run.publish(model)
    for batch in run.batches():
        entropy = 0.0
        for packed in batch.micro_batches:
            token_ids = rows(packed.token_ids.long(), packed)
            # All logits were sampled from at one temperature; token i is predicted at i - 1.
            logits = model(token_ids).logits[:, :-1] / packed.temperatures.max()
            logprobs = selective_log_softmax(logits, token_ids[:, 1:])
            sampled = rows(packed.loss_mask, packed)[:, 1:] == 1
            advantages = rows(packed.advantages, packed)[:, 1:]
            ratio = torch.exp(logprobs - rows(packed.logprobs, packed)[:, 1:])
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            loss = -torch.minimum(ratio * advantages, clipped * advantages)[sampled].sum() / batch.loss_tokens
            loss.backward()
            entropy += entropy_from_logits(logits.detach())[sampled].sum().item() / batch.loss_tokens
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        run.publish(model, metrics={"entropy/all/mean": entropy})
        if run.checkpoint_due:
            run.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        print(f"step {batch.step}  reward {batch.metrics['reward/all/mean']:.3f}", flush=True)
