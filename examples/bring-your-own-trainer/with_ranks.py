"""The same as several ranks: each trains its part of the batch, and DDP takes the mean of the gradients.

primerl rl @ examples/reverse-text/rl.toml --trainer external --trainer.ranks 2 --output-dir outputs/own
torchrun --nproc-per-node 2 examples/bring-your-own-trainer/with_ranks.py outputs/own
"""

import os
import sys

import primerl
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM


def rows(column: torch.Tensor, packed: primerl.MicroBatch) -> torch.Tensor:
    """One row a sequence, padded on the right, where a causal model does not look."""
    return pad_sequence(column.split(list(packed.sequence_lengths)), batch_first=True)


if "LOCAL_RANK" not in os.environ:
    sys.exit(f"start it as several ranks: torchrun --nproc-per-node 2 {' '.join(sys.argv)}")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
else:
    device = torch.device("cpu")
torch.distributed.init_process_group()
with primerl.connect(sys.argv[1]) as run:
    policy = AutoModelForCausalLM.from_pretrained(run.model_path, dtype=torch.float32).to(device)
    model = DistributedDataParallel(policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, betas=(0.9, 0.95), weight_decay=0.0)
    if (saved := run.restore(device)) is not None:
        policy.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    run.publish(policy)  # every rank makes the same calls; rank 0 writes
    for batch in run.batches():
        for packed in batch.micro_batches:
            token_ids = rows(packed.token_ids.long(), packed).to(device)
            # All logits were sampled from at one temperature; token i is predicted at i - 1.
            logits = model(token_ids).logits[:, :-1] / packed.temperatures.max()
            logprobs = logits.log_softmax(-1).gather(-1, token_ids[:, 1:, None]).squeeze(-1)
            sampled = rows(packed.loss_mask, packed)[:, 1:].to(device) == 1
            ratio = torch.exp(logprobs - rows(packed.logprobs, packed)[:, 1:].to(device))
            loss = -(ratio * rows(packed.advantages, packed)[:, 1:].to(device))[sampled].sum()
            # loss_tokens are those of all ranks, and DDP divides the sum of the gradients by their number.
            (loss * run.ranks / batch.loss_tokens).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        run.publish(policy, metrics={"optim/grad_norm": norm.item()})
        if run.checkpoint_due:
            run.save({"model": policy.state_dict(), "optimizer": optimizer.state_dict()})
        if run.rank == 0:
            print(f"step {batch.step}  reward {batch.metrics['reward/all/mean']:.3f}", flush=True)
torch.distributed.destroy_process_group()
