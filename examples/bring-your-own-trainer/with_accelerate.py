"""The same on Accelerate, which moves model and tensors, computes in bfloat16 where it is asked to, and clips.

primerl rl @ examples/reverse-text/rl.toml --trainer external --output-dir outputs/own
python examples/bring-your-own-trainer/with_accelerate.py outputs/own

With --trainer.ranks 2, and `torchrun --nproc-per-node 2` in place of `python`, it trains on two.
"""

import sys

import primerl
import torch
from accelerate import Accelerator
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM


def rows(column: torch.Tensor, packed: primerl.MicroBatch) -> torch.Tensor:
    """One row a sequence, padded on the right, where a causal model does not look."""
    return pad_sequence(column.split(list(packed.sequence_lengths)), batch_first=True)


accelerator = Accelerator(cpu=not torch.cuda.is_available())
with primerl.connect(sys.argv[1]) as run:
    model = AutoModelForCausalLM.from_pretrained(run.model_path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, betas=(0.9, 0.95), weight_decay=0.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    if (saved := run.restore(accelerator.device)) is not None:
        accelerator.unwrap_model(model).load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    run.publish(accelerator.unwrap_model(model))
    for batch in run.batches():
        total = 0.0
        for packed in batch.micro_batches:
            columns = (packed.token_ids.long(), packed.loss_mask, packed.logprobs, packed.advantages)
            token_ids, mask, engine, advantages = (rows(column, packed).to(accelerator.device) for column in columns)
            # All logits were sampled from at one temperature; token i is predicted at i - 1.
            logits = model(token_ids).logits[:, :-1].float() / packed.temperatures.max().item()
            logprobs = logits.log_softmax(-1).gather(-1, token_ids[:, 1:, None]).squeeze(-1)
            ratio = torch.exp(logprobs - engine[:, 1:])
            loss = -(ratio * advantages[:, 1:])[mask[:, 1:] == 1].sum() / batch.loss_tokens
            accelerator.backward(loss * run.ranks)  # Accelerate takes the mean of the ranks' gradients
            total += loss.item()
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        policy = accelerator.unwrap_model(model)
        run.publish(policy, metrics={"loss/mean": total, "optim/grad_norm": float(norm)})
        if run.checkpoint_due:
            run.save({"model": policy.state_dict(), "optimizer": optimizer.state_dict()})
        accelerator.print(f"step {batch.step}  reward {batch.metrics['reward/all/mean']:.3f}", flush=True)
