"""The same in the shape of verifiers' RLTrainer (verifiers[rl] 0.1): a Trainer of transformers whose data are steps.

primerl rl @ examples/reverse-text/rl.toml --trainer external --output-dir outputs/own
python examples/bring-your-own-trainer/with_rl_trainer.py outputs/own
"""

import os
import sys
from typing import Any

import primerl
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

RATIOS = (0.1, 10.0)  # tokens whose ratio is outside are not learnt from, as in RLTrainer


class RLTrainer(Trainer):
    """Its orchestrator is a run of primerl: one batch a step, of the weights that the step before has published."""

    def __init__(self, run: Any, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.run, self.batches = run, run.batches()
        self.model_accepts_loss_kwargs = False

    def get_train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader([{"labels": 0}] * self.args.max_steps)

    def training_step(self, model: torch.nn.Module, *_: Any, **__: Any) -> torch.Tensor:
        if self.state.global_step > 0:
            self.update_engines()
        batch = next(self.batches)
        model.train()
        total = torch.zeros((), device=self.args.device)
        for packed in batch.micro_batches:
            loss = self.compute_loss(model, packed) / batch.loss_tokens
            self.accelerator.backward(loss)
            total += loss.detach()
        print(f"step {batch.step}  reward {batch.metrics['reward/all/mean']:.3f}", flush=True)
        return total

    def compute_loss(self, model: torch.nn.Module, packed: primerl.MicroBatch, *_: Any, **__: Any) -> torch.Tensor:
        columns = (packed.token_ids.long(), packed.loss_mask, packed.logprobs, packed.advantages)
        # One row a sequence, padded on the right, where a causal model does not look.
        rows = (pad_sequence(one.split(list(packed.sequence_lengths)), batch_first=True) for one in columns)
        input_ids, loss_mask, inference, advantages = (one.to(self.args.device) for one in rows)
        logits = model(input_ids).logits[:, :-1].float() / packed.temperatures.max().item()
        logprobs = logits.log_softmax(-1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)
        ratio = torch.exp(logprobs - inference[:, 1:])
        kept = (loss_mask[:, 1:] == 1) & (ratio > RATIOS[0]) & (ratio < RATIOS[1])
        return -(ratio * advantages[:, 1:])[kept].sum()

    def update_engines(self) -> None:
        policy = self.accelerator.unwrap_model(self.model)
        version = self.run.publish(policy)
        if self.run.checkpoint_due:
            state = {"model": policy.state_dict(), "optimizer": self.optimizer.state_dict(), "step": version}
            self.run.save(state)


with primerl.connect(sys.argv[1]) as run:
    policy = AutoModelForCausalLM.from_pretrained(run.model_path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=5e-4, betas=(0.9, 0.95), weight_decay=0.0)
    saved = run.restore() or {"step": 0}
    if saved["step"]:
        policy.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    run.publish(policy)
    how = {"lr_scheduler_type": "constant", "save_strategy": "no", "logging_strategy": "no", "report_to": []}
    folder = os.path.join(run.output_dir, "trainer")
    args = TrainingArguments(
        folder, max_steps=run.max_steps - saved["step"], max_grad_norm=1.0, disable_tqdm=True, **how
    )
    trainer = RLTrainer(run, policy, args, optimizers=(optimizer, None))
    trainer.train()
    trainer.update_engines()
