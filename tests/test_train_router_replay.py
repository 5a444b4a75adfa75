"""Experts that an engine chose are used by the trainer's forward pass, with weights of the trainer's own router."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import LENGTHS, MIXTURES, gradients, packed_loss, sequences, write_family
from primerl.train.data.batch import BatchError, MicroBatch, decode_batch
from primerl.train.data.experts import RoutedExperts
from primerl.train.distributed.ranks import ALONE
from primerl.train.model.layers import prepare
from primerl.train.model.packed_model import ModelError, PackedSequences, load_model, predicted_logits
from primerl.train.model.router_replay import ChosenExperts, RouterReplay
from primerl.train.model.routing import routers
from torch import Tensor
from torch.nn.functional import silu
from train_helpers import Sequence, encode_frame, encode_micro_batch

TOKENS, EXPERTS = sum(LENGTHS), 4
# A softmax over all scores, over the chosen, sigmoids by groups with a bias, and a weight on what experts are given.
KINDS = ["qwen3_moe", "gpt_oss", "deepseek_v3", "llama4_text"]
# Its attention has experts, too, three routers a layer: engines report only one.
REFUSED = {"jetmoe"}
OTHERS = [pytest.param(name, marks=pytest.mark.long) for name in sorted(set(MIXTURES) - REFUSED - set(KINDS))]


@pytest.fixture
def folder_of(tmp_path: Path) -> Callable[[str], Path]:
    return lambda family: write_family(tmp_path, family)


def every(values: Tensor) -> RoutedExperts:
    """The experts [T, layers, k] of all tokens, as an engine reports them."""
    return RoutedExperts(((0, len(values)),), values.to(torch.uint8))


def own_choices(replay: RouterReplay, model: Any, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """[T, routers, 2]: what the routers choose by themselves."""
    found: dict[int, Tensor] = {}
    unknown = RoutedExperts((), torch.zeros(0, len(routers(model)), 2, dtype=torch.uint8))
    with monkeypatch.context() as patch, replay.replaying(unknown, TOKENS, "cpu"), torch.no_grad():
        patch.setattr(replay, "_note", lambda index, _wanted, own: found.setdefault(index, own.clone()))
        packed_loss(model)
    return torch.stack([found[index] for index in sorted(found)], 1)


@pytest.mark.parametrize("family", [*KINDS, *OTHERS])
def test_its_own_choices_change_nothing_and_others_do(
    family: str, folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(folder_of(family))
    plain = packed_loss(model)
    plain.backward()
    expected = gradients(model)
    replay = RouterReplay(model)
    own = own_choices(replay, model, monkeypatch)
    model.zero_grad()
    with replay.replaying(every(own), TOKENS, "cpu"):
        same = packed_loss(model)
        same.backward()
    assert torch.equal(same, plain)
    found = gradients(model)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert torch.equal(gradient, expected[name]), name
    with replay.replaying(every((own + 1) % EXPERTS), TOKENS, "cpu"):
        other = packed_loss(model)
    assert (other - plain).abs() > 1e-3
    # Nothing is left behind.
    assert torch.equal(packed_loss(model), plain)


def written_out(module: Any, hidden: Tensor, chosen: Tensor) -> Tensor:
    """The mixture of a Qwen3-MoE (`norm_topk_prob`), token by token: of hidden [T, H], chosen [T, k]."""
    rows = []
    for token, experts in zip(hidden, chosen.tolist(), strict=True):
        scores = torch.softmax(module.gate.weight @ token, -1)
        total = sum(scores[expert] for expert in experts)
        parts = []
        for expert in experts:
            gate, up = (module.experts.gate_up_proj[expert] @ token).chunk(2)
            parts.append(scores[expert] / total * (module.experts.down_proj[expert] @ (silu(gate) * up)))
        rows.append(torch.stack(parts).sum(0))
    return torch.stack(rows)


def test_another_choice_is_computed_as_the_family_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(write_family(tmp_path, "qwen3_moe", norm_topk_prob=True))
    generator = torch.Generator().manual_seed(1)
    # Two different experts each, at random.
    chosen = torch.rand(TOKENS, 2, EXPERTS, generator=generator).argsort(-1)[..., :2]
    replay = RouterReplay(model)
    with replay.replaying(every(chosen), TOKENS, "cpu"):
        loss = packed_loss(model)
        loss.backward()
    found = gradients(model)
    model.zero_grad()
    for index, layer in enumerate(model.model.layers):

        def mixture(hidden: Tensor, module: Any = layer.mlp, own: Tensor = chosen[:, index]) -> Tensor:
            return written_out(module, hidden.reshape(TOKENS, -1), own).view_as(hidden)

        monkeypatch.setattr(layer.mlp, "forward", mixture)
    reference = packed_loss(model)
    reference.backward()
    assert loss.item() == pytest.approx(reference.item(), abs=1e-5)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-4, msg=name)
    assert found["model.layers.0.mlp.gate.weight"].abs().max() > 1e-4


def test_where_nothing_is_known_the_routers_choose(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(folder_of("qwen3_moe"))
    replay = RouterReplay(model)
    own = own_choices(replay, model, monkeypatch)
    replay.metrics(ALONE)
    told = own.clone()
    told[3:9] = (told[3:9] + 2) % EXPERTS
    told[20:22] = 3 - told[20:22]
    part = RoutedExperts(((3, 9), (20, 22)), torch.cat([told[3:9], told[20:22]]).to(torch.uint8))
    with replay.replaying(part, TOKENS, "cpu"):
        partly = packed_loss(model)
    metrics = replay.metrics(ALONE)
    assert metrics["router_replay/known"] == pytest.approx(8 / TOKENS)
    assert 0.3 < metrics["router_replay/changed"] <= 1.0
    # The second layer's own choices for the other tokens depend on what the first one computes.
    seen: list[Tensor] = []
    for module, _ in routers(model):
        module.register_forward_hook(
            lambda _module, _given, answer: seen.extend(x for x in answer if x.dtype == torch.int64)
        )
    with replay.replaying(part, TOKENS, "cpu"):
        assert torch.equal(packed_loss(model), partly)
    for layer, chosen in enumerate(seen):
        assert torch.equal(chosen[3:9], told[3:9, layer])
        assert torch.equal(chosen[20:22], told[20:22, layer])
    assert torch.equal(seen[0][9:20], own[9:20, 0])


def logprobs(model: Any) -> Tensor:
    """Of the sampled tokens: [T - S]."""
    packed, token_ids = PackedSequences.from_lengths(LENGTHS), torch.cat(sequences(LENGTHS))
    targets = (packed.position_ids.squeeze(0) > 0).nonzero().squeeze(1)
    with torch.no_grad():
        logits = predicted_logits(model, token_ids, packed, targets)
    return logits.log_softmax(-1).gather(1, token_ids[targets, None]).squeeze(1)


def test_an_engine_in_half_precision_is_followed_more_closely(tmp_path: Path) -> None:
    shape = {"num_experts": 32, "num_experts_per_tok": 8, "num_hidden_layers": 4, "norm_topk_prob": True}
    folder = write_family(tmp_path, "qwen3_moe", **shape)
    engine = load_model(folder, "bfloat16")
    chosen = ChosenExperts(engine)
    of_engine, told = logprobs(engine), chosen.take()
    model = load_model(folder)
    replay = RouterReplay(model)

    def mismatch() -> float:
        ratio = logprobs(model) - of_engine
        return (ratio.exp() - ratio - 1).mean().item()

    without = mismatch()
    with replay.replaying(every(told), TOKENS, "cpu"):
        replayed = mismatch()
    assert replay.metrics(ALONE)["router_replay/changed"] > 0.005
    print(f"mismatch KL {without:.2e} without replay, {replayed:.2e} with it")
    assert replayed < without / 2


@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_what_the_backward_pass_computes_again_is_replayed_too(
    checkpointing: str, folder_of: Callable[[str], Path]
) -> None:
    chosen = torch.rand(TOKENS, 2, EXPERTS, generator=torch.Generator().manual_seed(2)).argsort(-1)[..., :2]
    found = []
    for again in ("none", checkpointing):
        model = load_model(folder_of("qwen3_moe"))
        replay = RouterReplay(model)
        prepare(model, again, compile_layers=False)
        with replay.replaying(every(chosen), TOKENS, "cpu"):
            packed_loss(model).backward()
        found.append(gradients(model))
        assert replay.metrics(ALONE)["router_replay/known"] == 1.0
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, atol=1e-6, rtol=1e-5, msg=name)


def test_vllm_reports_dense_layers_too(folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(folder_of("deepseek_v3"))  # the first of its two layers is dense
    replay = RouterReplay(model)
    other = (own_choices(replay, model, monkeypatch) + 1) % EXPERTS
    losses = []
    for told in (other, torch.cat([torch.zeros_like(other), other], 1)):
        with replay.replaying(every(told), TOKENS, "cpu"):
            losses.append(packed_loss(model))
    assert torch.equal(*losses)


def test_experts_of_another_model_are_refused(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    model = load_model(folder_of("qwen3_moe"))
    replay = RouterReplay(model)
    for shape, value, said in [
        ((3, 2), 0, "experts of 3 layers, and this model has 2 layers"),
        ((2, 3), 0, "chose 3 experts for a token"),
        ((2, 2), 4, "chose expert 4, and this model has 4"),
    ]:
        told = every(torch.full((TOKENS, *shape), value))
        with pytest.raises(ModelError, match=said), replay.replaying(told, TOKENS, "cpu"):
            packed_loss(model)
    dense = load_model(write_family(tmp_path / "dense", "qwen3"))
    with pytest.raises(ModelError, match="enable_router_replay: Qwen3ForCausalLM has no routers"):
        RouterReplay(dense)


@pytest.mark.parametrize("family", sorted(REFUSED))
def test_several_routers_in_a_layer_are_refused(family: str, folder_of: Callable[[str], Path]) -> None:
    with pytest.raises(ModelError, match="several routers in a layer"):
        RouterReplay(load_model(folder_of(family)))


SEQUENCES = [Sequence([1, 2], [3], [-1.0]), Sequence([4], [5, 6], [-1.0, -1.0])]


def body(runs: list[tuple[int, int]], data: bytes, *, size: int = 1, layers: int = 2) -> bytes:
    header, columns = encode_micro_batch(SEQUENCES)
    header["routed_experts"] = {"layers": layers, "chosen": 1, "bytes": size, "runs": runs}
    batch = {"step": 1, "rank": 0, "ranks": 1, "loss_tokens": 3, "metrics": {}, "micro_batches": [header]}
    return encode_frame(batch, columns + data + bytes(-len(data) % 16))


def decoded(data: bytes) -> MicroBatch:
    (micro_batch,) = decode_batch(data).micro_batches
    return micro_batch


def test_known_tokens_of_a_batch() -> None:
    experts = decoded(body([(0, 2), (4, 5)], bytes([1, 2, 3, 4, 5, 6]))).experts
    assert experts is not None
    every_token = experts.of_all(6, "cpu")
    assert every_token[:, :, 0].tolist() == [[1, 2], [3, 4], [-1, -1], [-1, -1], [5, 6], [-1, -1]]
    wide = decoded(body([(5, 6)], bytes([1, 2, 3, 0]), size=2)).experts
    assert wide is not None
    assert wide.of_all(6, "cpu")[5, :, 0].tolist() == [513, 3]
    header, columns = encode_micro_batch(SEQUENCES)
    plain = {"step": 1, "rank": 0, "ranks": 1, "loss_tokens": 3, "metrics": {}, "micro_batches": [header]}
    assert decoded(encode_frame(plain, columns)).experts is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"runs": [(0, 2), (1, 3)], "data": bytes(8)}, "are not runs of 6 tokens"),
        ({"runs": [(4, 7)], "data": bytes(6)}, "are not runs of 6 tokens"),
        ({"runs": [(2, 2)], "data": b""}, "are not runs of 6 tokens"),
        ({"runs": [(0, 6)], "data": b""}, "more than the bytes that are left"),
        ({"runs": [(0, 1)], "data": bytes(16), "size": 4}, "are of no model"),
        ({"runs": [(0, 1)], "data": bytes(16), "layers": 0}, "are of no model"),
    ],
)
def test_a_column_that_contradicts_itself_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(BatchError, match=said):
        decode_batch(body(**given))


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_experts_of_a_single_token_are_seen(family: str, tmp_path: Path) -> None:
    """As an engine computes it: the scores of its one group of experts look like those of the experts."""
    model = load_model(write_family(tmp_path, family, n_group=1, topk_group=1))
    chosen = ChosenExperts(model)
    for tokens in (3, 1):
        packed = PackedSequences.from_lengths([tokens])
        with torch.no_grad():
            model(input_ids=torch.arange(3, 3 + tokens)[None], position_ids=packed.position_ids, packed=packed)
        found = chosen.take()
        assert found.shape[0] == tokens
        assert bool((found < EXPERTS).all())
