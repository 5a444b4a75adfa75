"""Training in a process of its own, with checkpoints: whatever is killed, the same commands resume.

primerl rl @ examples/reverse-text/rl.toml --trainer external --output-dir outputs/own
python examples/bring-your-own-trainer/connected.py outputs/own
"""

import sys

import primerl
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer


def rows(column: torch.Tensor, packed: primerl.MicroBatch) -> torch.Tensor:
    """One row a sequence, padded on the right, where a causal model does not look."""
    return pad_sequence(column.split(list(packed.sequence_lengths)), batch_first=True)


with primerl.connect(sys.argv[1]) as run:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(run.model_path, dtype=torch.float32).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, betas=(0.9, 0.95), weight_decay=0.0)
    if (saved := run.restore(device)) is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    run.publish(model)
    for batch in run.batches():
        for packed in batch.micro_batches:
            token_ids = rows(packed.token_ids.long(), packed).to(device)
            # All logits were sampled from at one temperature; token i is predicted at i - 1.
            logits = model(token_ids).logits[:, :-1] / packed.temperatures.max()
            logprobs = logits.log_softmax(-1).gather(-1, token_ids[:, 1:, None]).squeeze(-1)
            sampled = rows(packed.loss_mask, packed)[:, 1:].to(device) == 1
            ratio = torch.exp(logprobs - rows(packed.logprobs, packed)[:, 1:].to(device))
            loss = -(ratio * rows(packed.advantages, packed)[:, 1:].to(device))[sampled].sum() / batch.loss_tokens
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        run.publish(model, metrics={"optim/grad_norm": norm.item()})
        if run.checkpoint_due:
            run.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        print(f"step {batch.step}  reward {batch.metrics['reward/all/mean']:.3f}", flush=True)
    # The trained model, for `primerl eval` or any other program.
    model.save_pretrained(run.output_dir / "model")
    AutoTokenizer.from_pretrained(run.model_path).save_pretrained(run.output_dir / "model")
