"""Each loss against a slow reference in plain Python, one token at a time: values and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import primerl.train.losses
import pytest
import torch
from primerl.train.data.batch import Batch, BatchError, MicroBatch
from primerl.train.loop.statistics import Groups, Statistics
from primerl.train.losses import PolicyLoss, Tokens
from primerl.train.objective.components import Loss, LossError, load_policy_loss
from primerl.train.settings import ConfigError, LossConfig
from settings_helpers import filled
from torch import Tensor

LENGTHS = (40, 3, 57, 20)


def test_a_sequence_with_a_token_that_the_engine_cannot_have_sampled_is_left_out() -> None:
    """Loss and gradient are those of the others; of a component without the engine's word, too."""
    lengths, wrong = (5, 4, 6), 1
    begins = torch.tensor([0, 5, 9])
    generator = torch.Generator().manual_seed(7)
    mask = torch.ones(15, dtype=torch.uint8)
    mask[begins] = 0
    engine = -3 * torch.rand(15, generator=generator)
    engine[7] = -90.0
    micro_batch = MicroBatch(
        token_ids=torch.zeros(15, dtype=torch.int32),
        logprobs=engine,
        advantages=torch.randn(15, generator=generator),
        versions=torch.zeros(15, dtype=torch.int32),
        temperatures=torch.ones(15),
        loss_mask=mask,
        sequence_lengths=lengths,
        rollouts=(4, 5, 6),
        environments=(0, 0, 0),
    )
    loss = Loss(filled(LossConfig, entropy_weight=0.1))
    targets = loss.targets(micro_batch)
    counts = loss.counts([targets])
    ours = -3 * torch.rand(len(targets.indices), generator=generator)
    entropy = torch.rand(len(targets.indices), generator=generator)

    def computed(batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
        logprobs = ours.clone().requires_grad_()
        total, values = loss(targets, batch, logprobs, entropy, counts, step=1)
        total.backward()  # type: ignore[no-untyped-call]
        assert logprobs.grad is not None
        assert all(bool(column.isfinite().all()) for column in values.columns.values())
        return logprobs.grad, values.columns["loss"], values.discarded

    gradient, own, discarded = computed(micro_batch)
    assert torch.equal(discarded, targets.sequences == wrong)
    assert not gradient[discarded].any()
    assert not own[discarded].any()
    right = engine.clone()
    right[7] = -1.0
    as_sampled, of_tokens, none = computed(replace(micro_batch, logprobs=right))
    assert not none.any()
    assert torch.equal(gradient[~discarded], as_sampled[~discarded])
    assert torch.equal(own[~discarded], of_tokens[~discarded])


@dataclass
class Token:
    """What a reference is told of a token: p and q as probabilities, s the mean of log rho over its sequence."""

    p: float
    q: float
    advantage: float
    s: float


# Each reference gives a token's loss and the derivative of that loss by log p.
Reference = Callable[[Token, dict[str, Any]], tuple[float, float]]


def dppo(token: Token, args: dict[str, Any]) -> tuple[float, float]:
    p, q, a = token.p, token.q, token.advantage
    masked = p - q > args["mask_high"] if a > 0 else p - q < -args["mask_low"]
    kl, kl_slope = args["kl_tau"] * math.log(p / q) ** 2, 2 * args["kl_tau"] * math.log(p / q)
    return (kl, kl_slope) if masked else (kl - a * p / q, kl_slope - a * p / q)


def ipo(token: Token, args: dict[str, Any]) -> tuple[float, float]:
    p, q = token.p, token.q
    kept = 1.0 if abs(p - q) <= args["threshold"] else 0.0
    gain, log_ratio = kept * token.advantage * p / q, math.log(p / q)
    return args["kl_tau"] * log_ratio**2 - gain, 2 * args["kl_tau"] * log_ratio - gain


def clip(token: Token, args: dict[str, Any]) -> tuple[float, float]:
    return clipped(token.p / token.q, token.advantage, args)


def clipped(rho: float, a: float, args: dict[str, Any]) -> tuple[float, float]:
    bounded = min(max(rho, 1 - args["clip_low"]), 1 + args["clip_high"])
    objective = min(rho * a, bounded * a)
    limit = args.get("dual_clip")
    if limit is not None and a < 0 and objective < limit * a:
        return -limit * a, 0.0
    return -objective, (-rho * a if objective == rho * a else 0.0)


def gspo(token: Token, args: dict[str, Any]) -> tuple[float, float]:
    return clipped(math.exp(token.s), token.advantage, args)


def cispo(token: Token, args: dict[str, Any]) -> tuple[float, float]:
    weight = min(max(token.p / token.q, 1 - args["clip_low"]), 1 + args["clip_high"])
    return -weight * token.advantage * math.log(token.p), -weight * token.advantage


def importance(token: Token, args: dict[str, Any]) -> tuple[float, float]:
    rho = token.p / token.q
    weight = min(rho, args["max_ratio"]) if args["max_ratio"] else rho
    return -weight * token.advantage * math.log(token.p), -weight * token.advantage


def icepop(token: Token, args: dict[str, Any]) -> tuple[float, float]:
    rho = token.p / token.q
    weight = rho if args["min_ratio"] <= rho <= args["max_ratio"] else 0.0
    return -weight * token.advantage * math.log(token.p), -weight * token.advantage


REFERENCES: dict[str, list[tuple[Reference, dict[str, Any]]]] = {
    "dppo": [(dppo, {"mask_low": 0.2, "mask_high": 0.3, "kl_tau": 0.05})],
    "ipo": [(ipo, {"threshold": 0.1, "kl_tau": 0.05})],
    "clip": [
        (clip, {"clip_low": 0.2, "clip_high": 0.28}),
        (clip, {"clip_low": 0.1, "clip_high": 0.4, "dual_clip": 1.5}),
    ],
    "gspo": [(gspo, {"clip_low": 0.2, "clip_high": 0.1})],
    "cispo": [(cispo, {"clip_low": 1.0, "clip_high": 0.5}), (cispo, {"clip_low": 0.3, "clip_high": 0.5})],
    "importance": [(importance, {"max_ratio": 1.5}), (importance, {"max_ratio": 0.0})],
    "icepop": [(icepop, {"min_ratio": 0.5, "max_ratio": 2.0})],
}
LOSSES = ", ".join(map(repr, sorted(REFERENCES)))
"""As messages list them; other tests expect it."""


def random_tokens(seed: int = 0) -> Tokens:
    generator = torch.Generator().manual_seed(seed)
    count = sum(LENGTHS)
    p, q = (0.02 + 0.96 * torch.rand(count, generator=generator, dtype=torch.float64) for _ in range(2))
    advantages = torch.randn(count, generator=generator, dtype=torch.float64)
    advantages[5] = 0.0
    return Tokens(
        logprobs=p.log().requires_grad_(),
        engine_logprobs=q.log(),
        advantages=advantages,
        sequences=torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)),
        sequence_count=len(LENGTHS),
        staleness=torch.zeros(count, dtype=torch.int64),
    )


def as_python(tokens: Tokens) -> list[Token]:
    p, q, a = tokens.logprobs.exp().tolist(), tokens.engine_logprobs.exp().tolist(), tokens.advantages.tolist()
    means: list[float] = []
    start = 0
    for length in LENGTHS:
        ratios = [math.log(p[i] / q[i]) for i in range(start, start + length)]
        means += [sum(ratios) / length] * length
        start += length
    return [Token(*row) for row in zip(p, q, a, means, strict=True)]


def test_every_loss_has_a_reference() -> None:
    folder = Path(primerl.train.losses.__file__).parent
    assert {path.stem for path in folder.glob("*.py")} - {"__init__"} == set(REFERENCES)


@pytest.mark.parametrize(
    ("name", "reference", "args"),
    [(name, *case) for name, cases in REFERENCES.items() for case in cases],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_against_the_formula(name: str, reference: Reference, args: dict[str, Any]) -> None:
    tokens = random_tokens()
    answer = load_policy_loss(filled(LossConfig, type=name, args=args))(tokens)
    assert isinstance(answer, PolicyLoss)
    (gradient,) = torch.autograd.grad(answer.loss.sum(), [tokens.logprobs])
    expected = [reference(token, args) for token in as_python(tokens)]
    assert answer.loss.tolist() == pytest.approx([value for value, _ in expected], rel=1e-9, abs=1e-12)
    assert gradient.tolist() == pytest.approx([slope for _, slope in expected], rel=1e-9, abs=1e-12)
    if answer.masked is not None:
        share = answer.masked.double().mean().item()
        assert 0.02 < share < 0.9
        gains = [
            slope - (2 * args.get("kl_tau", 0.0) * math.log(t.p / t.q))
            for (_, slope), t in zip(expected, as_python(tokens), strict=True)
        ]
        silent = [abs(gain) < 1e-12 for gain in gains]
        masked = answer.masked.tolist()
        # A token without advantage has no gain to mask.
        assert [m for i, m in enumerate(masked) if i != 5] == [s for i, s in enumerate(silent) if i != 5]
    for values in answer.metrics.values():
        assert 0.0 < values.double().mean().item() < 1.0 or args.get("max_ratio") == 0.0


@pytest.mark.parametrize("name", sorted(REFERENCES))
def test_ratios_beyond_fp32_keep_the_gradient_of_masked_tokens_finite(name: str) -> None:
    """To be made more likely, and likelier by e^200 than it was: masked or clipped wherever there is a bound."""
    logprobs = torch.tensor([-0.1, -1.0], requires_grad=True)
    tokens = Tokens(
        logprobs,
        torch.tensor([-200.0, -1.0]),
        torch.tensor([1.0, 1.0]),
        torch.tensor([0, 1]),
        2,
        torch.zeros(2, dtype=torch.int64),
    )
    args = {"kl_tau": 0.0} if name in ("dppo", "ipo") else {}
    answer = load_policy_loss(filled(LossConfig, type=name, args=args))(tokens)
    answer.loss.sum().backward()  # type: ignore[union-attr]
    assert logprobs.grad is not None
    assert logprobs.grad.isfinite().all()
    assert logprobs.grad[1].item() == pytest.approx(-1.0)


@pytest.mark.parametrize(
    ("p", "q", "advantage", "masked"),
    [
        (0.81, 0.5, 1.0, True),  # rose by more than mask_high, and is to rise further
        (0.79, 0.5, 1.0, False),
        (0.81, 0.5, -1.0, False),  # rose, and is to fall: the way back is open
        (0.29, 0.5, -1.0, True),  # fell by more than mask_low, and is to fall further
        (0.31, 0.5, -1.0, False),
        (0.29, 0.5, 1.0, False),  # fell, and is to rise
        (0.29, 0.5, 0.0, True),  # bounds without an advantage are those of negative ones
        (0.5, 0.5, 1.0, False),
    ],
)
def test_the_default_mask(p: float, q: float, advantage: float, masked: bool) -> None:
    micro_batch = micro(advantages=[0.0, advantage], logprobs=[0.0, math.log(q)], loss_mask=[0, 1], lengths=(2,))
    loss = Loss(filled(LossConfig, args={"mask_low": 0.2, "mask_high": 0.3, "kl_tau": 0.05}))
    _, metrics, _ = run(loss, micro_batch, torch.tensor([math.log(p)]))
    assert metrics["masked/all/mean"] == float(masked)
    signs = {"positive": advantage > 0, "negative": advantage < 0}
    for name, is_its_sign in signs.items():
        # Without an advantage it is of neither sign.
        for metric in (f"masked_advantage_{name}/mean", f"masked_share/{name}/mean"):
            assert metrics[metric] == float(masked and is_its_sign), metric


def micro(
    *,
    advantages: list[float],
    logprobs: list[float],
    loss_mask: list[int],
    lengths: tuple[int, ...],
    versions: list[int] | None = None,
    environments: tuple[int, ...] | None = None,
    **extra: list[float],
) -> MicroBatch:
    count = len(loss_mask)
    return MicroBatch(
        token_ids=torch.zeros(count, dtype=torch.int32),
        loss_mask=torch.tensor(loss_mask, dtype=torch.uint8),
        logprobs=torch.tensor(logprobs),
        advantages=torch.tensor(advantages),
        versions=torch.tensor(versions or [0 if mask else -1 for mask in loss_mask], dtype=torch.int32),
        temperatures=torch.ones(count),
        sequence_lengths=lengths,
        rollouts=tuple(range(70, 70 + len(lengths))),
        environments=environments or (0,) * len(lengths),
        extra={name: torch.tensor(values) for name, values in extra.items()},
    )


def run(
    loss: Loss, micro_batch: MicroBatch, logprobs: Tensor, entropy: Tensor | None = None, step: int = 1, others: int = 0
) -> tuple[Tensor, dict[str, float], Tensor]:
    """Loss, metrics and gradient by the log-probabilities of the targets; `others`: rl tokens of other ranks."""
    targets = loss.targets(micro_batch)
    logprobs = logprobs.clone().requires_grad_()
    entropy = torch.full_like(logprobs, 0.25) if entropy is None else entropy
    counts = loss.counts([targets])
    counts[0] += others
    value, values = loss(targets, micro_batch, logprobs, entropy, counts, step)
    (gradient,) = torch.autograd.grad(value, [logprobs])
    statistics = Statistics(Groups(max(micro_batch.environments) + 1, step - 1))
    statistics.add(values, torch.tensor(micro_batch.environments)[targets.sequences])
    return value.detach(), statistics.metrics(["math", "code"]), gradient


# Two sequences; packed tokens 1, 2, 4 and 5 are sampled.
COLUMNS: dict[str, Any] = {
    "advantages": [0.0, 1.0, -2.0, 0.0, 0.5, 0.5],
    "logprobs": [0.0, -1.0, -0.5, 0.0, -2.0, -1.5],
    "loss_mask": [0, 1, 1, 0, 1, 1],
    "lengths": (3, 3),
    "versions": [-1, 0, 2, -1, 1, 2],
    "environments": (0, 1),
}


def test_a_rank_with_empty_micro_batches_alone_holds_its_part_of_a_mixed_step() -> None:
    """Its micro-batch has none of the columns that say which tokens are of which part."""
    loss = Loss(filled(LossConfig, rl_weight=1.0, ref_kl_weight=1.0, ce_weight=1.0))
    zeros = [0.0] * 6
    drawn = {"rl_weights": zeros, "ce_weights": [0, 0, 0.5, 0, 0, 0], "ref_kl_weights": [0, 1, 0, 0, 1, 1]}
    full = micro(**{**COLUMNS, "loss_mask": [0, 1, 0, 0, 1, 1]}, teacher_logprobs=[-1.0] * 6, **drawn)
    empty = micro(advantages=[], logprobs=[], loss_mask=[], lengths=())
    for tokens, missing in ((3, False), (9, True), (2, True)):
        batches = [Batch(1, rank, 2, tokens, {}, (own,)) for rank, own in enumerate((full, empty))]
        held = sum(loss.held([loss.targets(batch.micro_batches[0])], batch) for batch in batches)
        assert isinstance(held, Tensor)
        for batch in batches:
            if missing:
                with pytest.raises(BatchError, match=f"hold 4 tokens to train, and the batch has {tokens}"):
                    loss.check_held(held, batch)
            else:
                loss.check_held(held, batch)


def test_each_component_is_divided_by_the_number_of_its_own_tokens() -> None:
    micro_batch = micro(
        **COLUMNS,
        teacher_logprobs=[math.nan, -0.4, -0.6, math.nan, -1.0, math.inf],
        rl_weights=[0, 1, 1, 0, 0, 0.5],
        ce_weights=[0, 0, 0, 0, 3, 0],
        ref_kl_weights=[0, 1, 1, 0, 2, 0],
    )
    config = filled(LossConfig, type="importance", rl_weight=2.0, ce_weight=0.5, ref_kl_weight=0.25, entropy_weight=0.1)
    p, entropy = [-1.2, -0.3, -0.9, -1.6], [0.1, 0.2, 0.3, 0.4]
    value, metrics, gradient = run(Loss(config), micro_batch, torch.tensor(p), torch.tensor(entropy), step=3, others=5)

    q, a, teacher = [-1.0, -0.5, -2.0, -1.5], [1.0, -2.0, 0.5, 0.5], [-0.4, -0.6, -1.0]
    total, slopes = 0.0, [0.0] * 4
    for i, weight in ((0, 1.0), (1, 1.0), (3, 0.5)):  # rl: 3 tokens here, 5 elsewhere
        rho = min(math.exp(p[i] - q[i]), 2.0)
        total += weight * (-2.0 * rho * a[i] * p[i] - 0.1 * entropy[i]) / 8
        slopes[i] += -2.0 * weight * rho * a[i] / 8
    total += 0.5 * 3 * -p[2] / 1  # ce: one token
    slopes[2] += 0.5 * 3 * -1.0
    for i, weight in ((0, 1.0), (1, 1.0), (2, 2.0)):  # ref_kl: three
        rho = min(math.exp(p[i] - q[i]), 2.0)
        total += 0.25 * weight * rho * (p[i] - teacher[i]) ** 2 / 2 / 3
        slopes[i] += 0.25 * weight * rho * (p[i] - teacher[i]) / 3
    assert value.item() == pytest.approx(total, rel=1e-5)
    assert gradient.tolist() == pytest.approx(slopes, rel=1e-5)
    assert metrics["loss/mean"] == pytest.approx(total, rel=1e-5)
    parts = [metrics[f"loss/{component}/mean"] for component in ("rl", "ce", "ref_kl")]
    assert sum(parts) == pytest.approx(total, rel=1e-5)
    assert parts[1] == pytest.approx(0.5 * 3 * 0.9, rel=1e-5)
    distances = [p[i] - teacher[i] for i in range(3)]
    assert metrics["ref_kl/all/mean"] == pytest.approx(sum(distances) / 3, rel=1e-5)
    assert metrics["ref_kl/math/mean"] == pytest.approx(sum(distances[:2]) / 2, rel=1e-5)
    assert metrics["ref_kl/code/mean"] == pytest.approx(distances[2], rel=1e-5)


def test_the_gradient_of_ref_kl_is_that_of_the_reverse_kl() -> None:
    """Summed over all tokens the engine could have sampled, each as often as it would."""
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    engine = torch.tensor([0.1, -0.7, 0.9, 0.2], dtype=torch.float64).log_softmax(0)
    teacher = torch.tensor([1.0, 0.0, -0.5, 0.4], dtype=torch.float64).log_softmax(0)
    student = logits.log_softmax(0)
    (expected,) = torch.autograd.grad((student.exp() * (student - teacher)).sum(), [logits], retain_graph=True)
    micro_batch = micro(
        advantages=[0.0] * 5,
        logprobs=[0.0, *engine.tolist()],
        loss_mask=[0, 1, 1, 1, 1],
        lengths=(5,),
        teacher_logprobs=[0.0, *teacher.tolist()],
        ref_kl_weights=[0.0, *engine.exp().tolist()],
    )
    loss = Loss(filled(LossConfig, rl_weight=0.0, ref_kl_weight=4.0))  # 4 undoes the division by the number of tokens
    _, _, by_logprob = run(loss, micro_batch, student.detach().float())
    (ours,) = torch.autograd.grad(student, [logits], by_logprob.double())
    assert torch.allclose(ours, expected, atol=1e-6)


def test_cross_entropy_of_tokens_nobody_sampled() -> None:
    micro_batch = micro(
        advantages=[0.0] * 3, logprobs=[0.0] * 3, loss_mask=[0, 0, 1], lengths=(3,), ce_weights=[0, 1, 0]
    )
    value, metrics, gradient = run(Loss(filled(LossConfig, ce_weight=1.0)), micro_batch, torch.tensor([-3.0, 0.0]))
    assert value.item() == pytest.approx(3.0)
    assert gradient.tolist() == [-1.0, 0.0]
    assert metrics["mismatch_kl/all/mean"] == 0.0, "only of what the policy sampled"


@pytest.mark.parametrize(
    ("config", "extra", "message"),
    [
        ({"ref_kl_weight": 1.0}, {}, "no column teacher_logprobs"),
        (
            {"ref_kl_weight": 1.0},
            {"teacher_logprobs": [0.0, -1.0, -1.0, 0.0, math.nan, -1.0]},
            "rollout 71: ref_kl_weights is above 0 where teacher_logprobs is not finite (packed token 4)",
        ),
        ({}, {"rl_weights": [0.0, 1, 1, 0, math.nan, 1]}, "rollout 71: rl_weights is not a number of at least 0"),
        ({}, {"rl_weights": [0.0, -1, 1, 0, 1, 1]}, "rollout 70: rl_weights is not a number of at least 0"),
        ({"ce_weight": 1.0}, {"ce_weights": [0.0, 0, 0, 1, 0, 0]}, "rollout 71: ce_weights is above 0 at the first"),
    ],
)
def test_columns_that_do_not_fit_are_named(config: dict[str, Any], extra: dict[str, Any], message: str) -> None:
    with pytest.raises(BatchError) as caught:
        Loss(filled(LossConfig, **config)).targets(micro(**COLUMNS, **extra))
    assert message in str(caught.value)


def test_no_policy_loss_of_what_was_not_sampled() -> None:
    unsampled = micro(advantages=[0.0] * 3, logprobs=[0.0] * 3, loss_mask=[0, 0, 1], lengths=(3,), rl_weights=[0, 1, 1])
    with pytest.raises(BatchError, match="rl_weights is above 0 at a token the policy did not sample"):
        Loss(filled(LossConfig)).targets(unsampled)


def test_metrics_by_environment_and_staleness() -> None:
    p, q = torch.tensor([-1.2, -0.3, -1.9, -0.1]), torch.tensor([-1.0, -0.5, -2.0, -1.5])
    entropy = torch.tensor([1.0, 2.0, 3.0, 5.0])
    _, metrics, _ = run(Loss(filled(LossConfig)), micro(**COLUMNS), p, entropy, step=3)
    kl = ((p - q).exp() - (p - q) - 1).tolist()
    for group, members in {
        "all": [0, 1, 2, 3],
        "math": [0, 1],
        "code": [2, 3],
        "staleness_0": [1, 3],  # sampled by version 2, trained in step 3
        "staleness_1": [2],
        "staleness_2": [0],
    }.items():
        own = [kl[i] for i in members]
        mean = sum(own) / len(own)
        assert metrics[f"mismatch_kl/{group}/mean"] == pytest.approx(mean, rel=1e-5)
        deviation = math.sqrt(sum((x - mean) ** 2 for x in own) / len(own))
        assert metrics[f"mismatch_kl/{group}/std"] == pytest.approx(deviation, rel=1e-4, abs=1e-7)
        assert metrics[f"mismatch_kl/{group}/max"] == pytest.approx(max(own), rel=1e-5)
        assert metrics[f"entropy/{group}/mean"] == pytest.approx(sum(entropy[i].item() for i in members) / len(own))
    # p - q of the last token is 0.68, and its advantage positive: the one that is masked.
    assert metrics["masked_share/positive/mean"] == pytest.approx(1 / 3)
    assert metrics["masked_share/positive/code/mean"] == pytest.approx(1 / 2)
    assert metrics["masked_share/negative/mean"] == 0.0
    assert metrics["masked_advantage_positive/mean"] == metrics["masked_advantage_positive/code/mean"] == 1.0
    assert metrics["masked_advantage_positive/math/mean"] == metrics["masked_advantage_negative/mean"] == 0.0
    assert metrics["masked/staleness_0/mean"] == pytest.approx(1 / 2)


def test_masked_tokens_by_their_sign_of_advantage() -> None:
    """Of the masked ones the share with each sign, and of each sign the masked share; those without are of neither."""
    advantages = [0.0, 1.0, 1.0, -1.0, -1.0, -1.0, 0.0, 0.0]
    masked = [True, False, True, True, False, True, False]

    def loss(tokens: Tokens) -> PolicyLoss:
        return PolicyLoss(-tokens.logprobs, torch.tensor(masked))

    given = micro(advantages=advantages, logprobs=[-1.0] * 8, loss_mask=[0] + [1] * 7, lengths=(8,))
    whole = Loss(filled(LossConfig))
    whole._policy_loss = loss
    _, metrics, _ = run(whole, given, torch.full((7,), -1.0))
    found = {name: value for name, value in metrics.items() if name.startswith("masked") and name.count("/") < 3}
    assert found == pytest.approx(
        {
            **{f"masked/{group}/mean": 4 / 7 for group in ("all", "math", "staleness_0")},
            **{f"masked_advantage_positive/{group}mean": 1 / 4 for group in ("", "math/", "staleness_0/")},
            **{f"masked_advantage_negative/{group}mean": 2 / 4 for group in ("", "math/", "staleness_0/")},
            "masked_share/positive/mean": 1 / 2,
            "masked_share/negative/mean": 2 / 3,
        }
    )
    assert metrics["masked_share/negative/math/mean"] == pytest.approx(2 / 3)


def test_statistics_add_up_over_micro_batches() -> None:
    p = torch.tensor([-1.2, -0.3, -1.9, -0.1])
    loss = Loss(filled(LossConfig))
    parts = [
        micro(
            **{
                name: values[part] if isinstance(values, list) else values
                for name, values in COLUMNS.items()
                if name not in ("lengths", "environments")
            },
            lengths=(3,),
            environments=(index,),
        )
        for index, part in enumerate((slice(0, 3), slice(3, 6)))
    ]
    whole = run(loss, micro(**COLUMNS), p, step=3)[1]
    targets = [loss.targets(part) for part in parts]
    counts = loss.counts(targets)
    statistics = Statistics(Groups(2, 2))
    for part, own, logprobs in zip(parts, targets, p.split(2), strict=True):
        _, values = loss(own, part, logprobs.clone().requires_grad_(), torch.full_like(logprobs, 0.25), counts, 3)
        statistics.add(values, torch.tensor(part.environments)[own.sequences])
    assert statistics.metrics(["math", "code"]) == pytest.approx(whole, rel=1e-6)


# Functions for `loss.custom`.


def own_loss(tokens: Tokens, scale: float = 1.0) -> PolicyLoss:
    gain = -scale * tokens.advantages * tokens.log_ratio.exp()
    return PolicyLoss(gain, metrics={"own_share": (tokens.advantages > 0).float()})


def plain_tensor(tokens: Tokens) -> Tensor:
    return -tokens.advantages * tokens.logprobs


def one_number(tokens: Tokens) -> Tensor:
    return tokens.logprobs.mean()


def without_gradient(tokens: Tokens) -> Tensor:
    return tokens.logprobs.detach()


def nothing(_tokens: Tokens) -> None:
    return None


def from_nowhere(tokens: Tokens) -> Tensor:
    return torch.zeros_like(tokens.logprobs, requires_grad=True)


def complex_numbers(tokens: Tokens) -> Tensor:
    return tokens.logprobs.to(torch.complex64)


def measures(name: Any) -> Callable[[Tokens], PolicyLoss]:
    return lambda tokens: PolicyLoss(-tokens.logprobs, metrics={name: tokens.advantages})


measures_entropy, measures_loss, measures_reward, measures_5 = map(measures, ("entropy", "loss", "reward", 5))


def fails(_tokens: Tokens) -> Tensor:
    raise KeyError("column of its own")


def leaves(_tokens: Tokens) -> Tensor:
    raise SystemExit(0)


def in_fp64(tokens: Tokens) -> Tensor:
    return plain_tensor(tokens).double()


def turns_gradients_off(tokens: Tokens) -> Tensor:
    loss = plain_tensor(tokens)
    torch.set_grad_enabled(False)
    return loss


def test_custom_losses() -> None:
    p, a = torch.tensor([-1.2, -0.3, -1.9, -0.1]), torch.tensor([1.0, -2.0, 0.5, 0.5])
    config = filled(LossConfig, custom=f"{__name__}:own_loss", args={"scale": 2.0})
    value, metrics, _ = run(Loss(config), micro(**COLUMNS), p)
    rho = (p - torch.tensor([-1.0, -0.5, -2.0, -1.5])).exp()
    assert value.item() == pytest.approx((-2.0 * a * rho).mean().item(), rel=1e-5)
    assert metrics["own_share/all/mean"] == pytest.approx(0.75)
    _, _, gradient = run(Loss(filled(LossConfig, custom=f"{__name__}:plain_tensor")), micro(**COLUMNS), p)
    assert gradient.tolist() == pytest.approx((-a / 4).tolist())


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("one_number", r"one_number\): loss is \[\]; it must be a tensor of \[4\], one value a token"),
        ("without_gradient", "the loss has no gradient; compute it from tokens.logprobs"),
        ("nothing", "the answer is None"),
        ("from_nowhere", "the gradient of the loss does not reach tokens.logprobs"),
        ("complex_numbers", "loss is torch.complex64; it must be of real numbers"),
        ("measures_entropy", "the name of a metric is 'entropy'; it must be a str, and none of"),
        ("measures_loss", "the name of a metric is 'loss'"),
        ("measures_reward", "the name of a metric is 'reward'"),
        ("measures_5", "the name of a metric is 5"),
        ("fails", r"loss.custom \(test_train_loss:fails\) raised KeyError: 'column of its own'"),
        ("leaves", r"loss.custom \(test_train_loss:leaves\) raised SystemExit: 0"),
    ],
)
def test_custom_losses_that_do_not_answer_as_they_should(function: str, message: str) -> None:
    loss = Loss(filled(LossConfig, custom=f"{__name__}:{function}"))
    with pytest.raises(LossError, match=message):
        run(loss, micro(**COLUMNS), torch.full((4,), -1.0))


@pytest.mark.parametrize("function", ["in_fp64", "turns_gradients_off"])
def test_custom_losses_in_another_precision_or_grad_mode(function: str) -> None:
    """A second micro-batch is trained as the first."""
    loss = Loss(filled(LossConfig, custom=f"{__name__}:{function}"))
    a = torch.tensor([1.0, -2.0, 0.5, 0.5])
    for _ in range(2):
        _, _, gradient = run(loss, micro(**COLUMNS), torch.tensor([-1.2, -0.3, -1.9, -0.1]))
        assert gradient.tolist() == pytest.approx((-a / 4).tolist())


def test_what_a_custom_loss_raises_is_traced_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    loss = Loss(filled(LossConfig, custom=f"{__name__}:fails"))
    with pytest.raises(LossError):
        run(loss, micro(**COLUMNS), torch.full((4,), -1.0))
    assert 'in fails\n    raise KeyError("column of its own")' in caplog.text


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:f", "ModuleNotFoundError"),
        (f"{__name__}:no_such_function", "has no function 'no_such_function'"),
        (f"{__name__}:LENGTHS", "has no function 'LENGTHS'"),
    ],
)
def test_custom_losses_that_are_not_there(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Loss(filled(LossConfig, custom=path))
