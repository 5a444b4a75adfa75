"""The loss of a step: a sum of components, each over tokens of its own and divided by their number on all data ranks.

    loss = rl_weight      * sum over rl tokens     (policy loss) / their number        primerl.train.losses
         + ce_weight      * sum over ce tokens     (-log p)      / their number
         + ref_kl_weight  * sum over ref_kl tokens (ref_kl)      / their number
         - entropy_weight * sum over rl tokens     (entropy)     / their number

A component's tokens are those the policy sampled (`loss_mask`), or, where the batch has a column `<component>_weights`,
those it gives a value above 0, which their loss is multiplied by. A component of weight 0 is not computed.

p is what the engine sampled from, as the trainer's weights have it: at the sampling temperature and, where truncation
or a grammar is replayed, among the tokens that were kept (`truncation`, `grammar`).

ref_kl, on-policy distillation: the reverse KL divergence from the policy to a teacher, of which the batch holds the
log-probabilities of the sampled tokens (column `teacher_logprobs`). They are the teacher's own, at temperature 1 and of
all tokens, and so is the policy that is drawn to it:

    p1     = softmax of the policy's logits                      rho1 = p1 / (the engine's probability, as it sampled)
    ref_kl = sg(min(rho1, ref_kl_max_ratio)) * (log p1 - log teacher)^2 / 2

Its gradient, sg(rho1) * (log p1 - log teacher) * grad log p1, is that of KL(p1 || teacher) over tokens the engine
sampled (that of `log p1 - log teacher` itself would be 0 on average; Schulman, "Approximating KL divergence", 2020),
but for ratios above the bound, and for what a truncated engine never samples. With p in place of p1 it would be least
where p is the teacher, and p1 something else. On-policy distillation: Agarwal et al., arXiv:2306.13649; Lu, "On-Policy
Distillation", Thinking Machines, 2025.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from primerl.process.import_path import ImportFailedError, find_by_path
from primerl.train import losses
from primerl.train.data.batch import Batch, BatchError, MicroBatch, sequence_at
from primerl.train.losses import LossFunction, PolicyLoss, Tokens
from primerl.train.settings import ConfigError, LossConfig

log = logging.getLogger(__name__)

COMPONENTS = ("rl", "ce", "ref_kl")
SAMPLED = ("rl", "ref_kl")
"""Components that need the engine's log-probability of a token."""


MOST_LOG_RATIO = 30.0
"""Nats. If a sampled token is more than e^30 times as likely to the trainer as to the engine, the engine's
log-probability must be wrong, and the ratio's square would overflow in the norm of the gradient."""

TAKEN = {
    *("advantage", "empty_rollouts", "entropy", "errored_rollouts", "is_truncated", "loss", "masked"),
    *("masked_advantage_negative", "masked_advantage_positive", "mismatch_abs_log_ratio", "mismatch_kl"),
    *("masked_share", "num_turns", "ref_kl", "reward", "seq_len", "staleness"),
}
"""Names of metrics, the part before `/all`, that trainer or orchestrator write; a custom loss may not use them."""


class LossError(ValueError):
    """A loss function failed, or returned something invalid. The message names the function."""


@dataclass(frozen=True, slots=True)
class Targets:
    """The tokens of a micro-batch that any component trains on, M of them."""

    indices: Tensor  # [M] int64, packed
    sequences: Tensor  # [M] int64
    sampled: Tensor  # [M] bool
    weights: dict[str, Tensor]
    """Component -> [M] fp32; 0 if the token does not belong to it."""

    def to(self, device: torch.device) -> Targets:
        weights = {name: weight.to(device) for name, weight in self.weights.items()}
        return Targets(self.indices.to(device), self.sequences.to(device), self.sampled.to(device), weights)


@dataclass(frozen=True, slots=True)
class TokenValues:
    """Measurements of M tokens, without gradient: `columns` by name, [M] each, and which tokens count."""

    columns: dict[str, Tensor]
    sampled: Tensor  # [M] bool
    discarded: Tensor  # [M] bool: tokens of sequences that are excluded from the step


class Loss:
    """The loss that a config describes."""

    def __init__(self, config: LossConfig) -> None:
        """Raises ConfigError: there is no such loss, or no such function."""
        self.config = config
        self._policy_loss = load_policy_loss(config)
        weights = (config.rl_weight, config.ce_weight, config.ref_kl_weight)
        self._weights = {name: weight for name, weight in zip(COMPONENTS, weights, strict=True) if weight}
        self._reaches_logprobs = False

    def targets(self, micro_batch: MicroBatch) -> Targets:
        """Raises BatchError for a column that is missing, or that gives a weight where there cannot be one."""
        columns = {name: self._component(name, micro_batch) for name in self._weights}
        trained = torch.stack(list(columns.values())).gt(0).any(0)
        indices = trained.nonzero().squeeze(1)
        lengths = torch.tensor(micro_batch.sequence_lengths, dtype=torch.int64)
        sequences = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        return Targets(
            indices,
            sequences[indices],
            micro_batch.loss_mask[indices] == 1,
            {name: column[indices] for name, column in columns.items()},
        )

    def _component(self, name: str, micro_batch: MicroBatch) -> Tensor:
        if not micro_batch.sequence_lengths:
            return micro_batch.loss_mask.float()
        if name == "ref_kl" and "teacher_logprobs" not in micro_batch.extra:
            raise BatchError(
                "loss.ref_kl_weight is set, but the batch has no column teacher_logprobs: no teacher's "
                "log-probabilities of the sampled tokens; set loss.ref_kl_weight to 0 or have a teacher score them"
            )
        given = micro_batch.extra.get(f"{name}_weights")
        column = micro_batch.loss_mask.float() if given is None else given
        first = torch.zeros_like(column, dtype=torch.bool)
        first[torch.tensor([0, *micro_batch.sequence_lengths[:-1]]).cumsum(0)[: len(micro_batch.rollouts)]] = True
        problems = {
            "is not a number of at least 0": ~(column.isfinite() & (column >= 0)),
            "is above 0 at the first token of a sequence, which nothing precedes": (column > 0) & first,
        }
        if name in SAMPLED:
            problems["is above 0 at a token the policy did not sample"] = (column > 0) & (micro_batch.loss_mask == 0)
        if name == "ref_kl":
            problems["is above 0 where teacher_logprobs is not finite"] = (column > 0) & ~micro_batch.extra[
                "teacher_logprobs"
            ].isfinite()
        for what, where in problems.items():
            if bool(where.any()):
                index = int(where.nonzero()[0])
                rollout = micro_batch.rollouts[sequence_at(micro_batch.sequence_lengths, index)]
                raise BatchError(f"rollout {rollout}: {name}_weights {what} (packed token {index})")
        return column

    def plain(self, targets: Targets, micro_batch: MicroBatch) -> Tensor | None:
        """[K] int64, indices of the targets whose log-probability p1 has to be computed for `ref_kl`; None if it equals
        log p."""
        if "ref_kl" not in targets.weights:
            return None
        chosen = targets.weights["ref_kl"].nonzero().squeeze(1)
        temperatures = micro_batch.temperatures[targets.indices[chosen].to(micro_batch.temperatures.device)]
        narrowed = micro_batch.truncation is not None or bool(micro_batch.grammars)
        return chosen if narrowed or bool((temperatures != 1).any()) else None

    def counts(self, targets: list[Targets]) -> Tensor:
        """Tokens of each component of COMPONENTS, [3] fp64."""
        return torch.tensor(
            [sum(int(t.weights[name].gt(0).sum()) if name in t.weights else 0 for t in targets) for name in COMPONENTS],
            dtype=torch.float64,
        )

    def held(self, targets: list[Targets], batch: Batch) -> Tensor:
        """This rank's tokens for `check_held`, [2] fp64: those that the policy sampled, and others that are trained."""
        sampled = sum(int(micro_batch.loss_mask.sum()) for micro_batch in batch.micro_batches)
        return torch.tensor([sampled, sum(int((~own.sampled).sum()) for own in targets)], dtype=torch.float64)

    def check_held(self, held: Tensor, batch: Batch) -> None:
        """Raises BatchError if the ranks do not hold as many tokens as the orchestrator cut. `held`: of all ranks."""
        sampled, others = (int(count) for count in held.tolist())
        # A teacher wrote what the policy did not sample. Others may be more: what an environment said is not counted.
        if not sampled <= batch.loss_tokens <= sampled + others:
            raise BatchError(
                f"step {batch.step}: the data ranks hold {sampled + others} tokens to train, and the batch has "
                f"{batch.loss_tokens}"
            )

    def __call__(
        self,
        targets: Targets,
        micro_batch: MicroBatch,
        logprobs: Tensor,
        entropy: Tensor,
        counts: Tensor,
        step: int,
        plain: Tensor | None = None,
    ) -> tuple[Tensor, TokenValues]:
        """The micro-batch's part of the loss, one number, and what was measured.

        Args:
            targets: on the device of `logprobs`.
            logprobs, entropy: [M], of the targets.
            counts: [3], tokens of each component on all ranks.
            step: the batch's.
            plain: [K], log p1 of the targets that the method `plain` names; None where it names none.
        """
        device = logprobs.device
        picked = targets.indices.to(micro_batch.token_ids.device)

        def column(values: Tensor) -> Tensor:
            return values[picked].to(device)

        teacher = micro_batch.extra.get("teacher_logprobs")
        tokens = Tokens(
            logprobs=logprobs,
            engine_logprobs=column(micro_batch.logprobs),
            advantages=column(micro_batch.advantages),
            sequences=targets.sequences,
            sequence_count=len(micro_batch.sequence_lengths),
            staleness=step - 1 - column(micro_batch.versions).long(),
            teacher_logprobs=None if teacher is None else column(teacher),
        )
        discarded = _discarded(tokens, targets.sampled)
        tokens = replace(tokens, engine_logprobs=torch.where(discarded, logprobs.detach(), tokens.engine_logprobs))
        divisors = dict(zip(COMPONENTS, counts.clamp(min=1.0).tolist(), strict=True))
        values: dict[str, Tensor] = {"is_masked": torch.zeros_like(targets.sampled)}
        # A zero gradient even if everything is discarded: other ranks wait for this one's.
        loss = logprobs.masked_fill(~logprobs.isfinite(), 0.0) * 0.0
        for name, weight in self._weights.items():
            # Values for other components' tokens may be infinite: they are excluded, not multiplied by 0.
            of_any = targets.weights[name].nonzero().squeeze(1)
            stays = ~discarded[of_any]
            chosen = of_any[stays]
            if not chosen.numel():
                continue
            of_component = tokens.at(chosen)
            if name == "ref_kl" and plain is not None:
                of_component = replace(of_component, logprobs=plain[stays])
            own, measured = self._compute(name, of_component, entropy[chosen])
            part = own * targets.weights[name][chosen] * (weight / divisors[name])
            loss = loss.index_add(0, chosen, part)
            for key, of_tokens in {**measured, f"loss/{name}": part.detach()}.items():
                values[key] = of_tokens.new_zeros(logprobs.shape).index_copy(0, chosen, of_tokens)
        values |= {"loss": loss.detach(), "entropy": entropy.detach(), "staleness": tokens.staleness}
        values |= _measure(tokens, values.pop("is_masked"))
        return loss.sum(), TokenValues(values, targets.sampled & ~discarded, discarded)

    def _compute(self, name: str, tokens: Tokens, entropy: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The component `name` for each of its tokens, and its measurements."""
        if name == "ce":
            return -tokens.logprobs, {}
        if name == "ref_kl":
            assert tokens.teacher_logprobs is not None
            ratio = tokens.log_ratio.detach().exp().clamp(max=self.config.ref_kl_max_ratio)
            distance = tokens.logprobs - tokens.teacher_logprobs
            measured = {"ref_kl": distance.detach(), "ref_kl_tokens": torch.ones_like(distance)}
            return ratio * distance.square() / 2.0, measured
        answer = self._call_policy_loss(tokens)
        measured = {f"metric/{metric}": values.detach().double() for metric, values in answer.metrics.items()}
        if answer.masked is not None:
            measured["is_masked"] = answer.masked
        bonus = self.config.entropy_weight / self.config.rl_weight
        own = answer.loss.to(tokens.logprobs.dtype)
        return (own - bonus * entropy if bonus else own), measured

    def _call_policy_loss(self, tokens: Tokens) -> PolicyLoss:
        """Calls the policy loss and checks its answer. Raises LossError."""
        custom = self.config.custom
        where = f"loss.type ({self.config.type})" if custom is None else f"loss.custom ({custom})"
        try:
            # A function that switches gradients off would leave them off for all that follows.
            with torch.enable_grad():
                answer = self._policy_loss(tokens)
        except (Exception, SystemExit) as error:
            log.exception("%s failed", where)
            raise LossError(f"{where} raised {type(error).__name__}: {error}") from error
        if isinstance(answer, Tensor):
            answer = PolicyLoss(answer)
        self._check_answer(where, answer, tokens)
        return answer

    def _check_answer(self, where: str, answer: PolicyLoss, tokens: Tokens) -> None:
        shape = tokens.logprobs.shape
        if not isinstance(answer, PolicyLoss):
            raise LossError(f"{where}: the answer is {answer!r}; it must be a tensor or a PolicyLoss")
        taken = [name for name in answer.metrics if not isinstance(name, str) or name in TAKEN]
        if taken:
            raise LossError(
                f"{where}: the name of a metric is {taken[0]!r}; it must be a str, and none of {sorted(TAKEN)}"
            )
        columns = {"loss": answer.loss, "masked": answer.masked, **answer.metrics}
        for name, values in columns.items():
            if name == "masked" and values is None:
                continue
            if not isinstance(values, Tensor) or values.shape != shape:
                found = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
                raise LossError(f"{where}: {name} is {found}; it must be a tensor of {list(shape)}, one value a token")
            if values.is_complex() or (name == "loss" and not values.is_floating_point()):
                raise LossError(f"{where}: {name} is {values.dtype}; it must be of real numbers (torch.float32)")
        if answer.masked is not None and answer.masked.dtype != torch.bool:
            raise LossError(f"{where}: masked is {answer.masked.dtype}; it must be torch.bool")
        if not answer.loss.requires_grad:
            raise LossError(f"{where}: the loss has no gradient; compute it from tokens.logprobs")
        if not self._reaches_logprobs:
            summed = answer.loss.sum()
            if torch.autograd.grad(summed, tokens.logprobs, retain_graph=True, allow_unused=True)[0] is None:
                raise LossError(
                    f"{where}: the gradient of the loss does not reach tokens.logprobs, so nothing would be trained; "
                    "compute it from tokens.logprobs"
                )
            self._reaches_logprobs = True


def load_policy_loss(config: LossConfig) -> LossFunction:
    """Raises ConfigError."""
    if config.custom is None:
        return losses.load(config.type, config.args)
    try:
        function = find_by_path(config.custom)
    except ImportFailedError as error:
        raise ConfigError(f"loss.custom is {config.custom!r}: {error}", "loss.custom") from error
    if not callable(function):
        module, _, name = config.custom.partition(":")
        words = f"loss.custom is {config.custom!r}, but module {module} has no function {name!r}"
        raise ConfigError(words, "loss.custom")
    return lambda tokens: function(tokens, **config.args)


@torch.no_grad()
def _discarded(tokens: Tokens, sampled: Tensor) -> Tensor:
    """[M] bool, whole sequences in which the engine's log-probability of a sampled token cannot be right.

    Only if the trainer's own is finite: weights that are not finite are no fault of a rollout.
    """
    wrong = sampled & tokens.logprobs.isfinite() & ~(tokens.log_ratio <= MOST_LOG_RATIO)
    of_sequence = torch.zeros(tokens.sequence_count, dtype=torch.bool, device=wrong.device)
    of_sequence[tokens.sequences[wrong]] = True
    return of_sequence[tokens.sequences]


@torch.no_grad()
def _measure(tokens: Tokens, masked: Tensor) -> dict[str, Tensor]:
    log_ratio, positive, negative = tokens.log_ratio, tokens.advantages > 0, tokens.advantages < 0
    return {
        # KL(engine || trainer) by the k3 estimator (Schulman, "Approximating KL divergence", 2020).
        "mismatch_kl": torch.expm1(log_ratio) - log_ratio,
        "log_ratio": log_ratio,
        "abs_log_ratio": log_ratio.abs(),
        "positive": positive,
        "negative": negative,
        "masked": masked,
        "masked_positive": masked & positive,
        "masked_negative": masked & negative,
    }
