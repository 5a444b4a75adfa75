"""Sequences that begin alike, computed as a tree, give what they give one after another: log-probabilities and
gradients. What would be wrong is shown to be far off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import primerl.train.model.packed_model
import primerl.train.model.tree_attention
import pytest
import torch
from families import FAMILIES, WITH_STATE
from primerl.train.adapters.lora import add_adapter
from primerl.train.model.layers import prepare
from primerl.train.model.packed_model import PackedSequences, load_model
from primerl.train.model.prefixes import PrefixTree, Unit, shared_with_previous
from primerl.train.model.tree_attention import by_kernel, by_unit
from primerl.train.model.tree_proof import kernel_refusal, tree_refusal
from primerl.train.settings import LoraConfig
from settings_helpers import filled
from torch import Tensor
from train_helpers import randomise
from tree_helpers import Trie, furthest, group_and_branches, trained

LOGPROB, GRADIENT = 3e-5, 3e-5
"""In fp32: largest difference of a log-probability, nats, and of a gradient, as a share of its norm."""


def distances(model: Any, trie: Trie, tree: PackedSequences) -> tuple[float, float]:
    """How far a tree is from the sequences one after another: log-probabilities, gradients."""
    expected, expected_gradients = trained(model, trie, trie.plain())
    found, gradients = trained(model, trie, tree)
    return float((found - expected).abs().max()), furthest(expected_gradients, gradients)[0]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # which GPT-BigCode uses
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - WITH_STATE))
def test_tree_equals_plain(family: str, folders: Any) -> None:
    model, trie = load_model(folders(family)), group_and_branches()
    assert tree_refusal(model) is None
    logprob, gradient = distances(model, trie, trie.tree())
    assert logprob <= LOGPROB
    assert gradient <= GRADIENT


@pytest.mark.parametrize("family", sorted(WITH_STATE))
def test_layers_with_a_state_are_refused(family: str, folders: Any) -> None:
    refused = tree_refusal(load_model(folders(family)))
    assert refused == "it has layers that carry a state from token to token, which would have to branch"


def seeing_siblings(packed: PackedSequences) -> PackedSequences:
    assert packed.tree is not None
    n = packed.tree.kept.shape[0]
    row = (0, n)
    bounds = torch.tensor(row, dtype=torch.int32)
    tree = replace(
        packed.tree,
        units=(Unit(0, n, 0, n),),
        runs=(row,),
        keys=torch.arange(n),
        query_bounds=bounds,
        key_bounds=bounds,
    )
    return replace(packed, tree=tree)


def at_positions_of_the_row(packed: PackedSequences) -> PackedSequences:
    return replace(packed, position_ids=torch.arange(packed.position_ids.shape[1]).unsqueeze(0))


def predicted_by_neighbours(packed: PackedSequences) -> PackedSequences:
    """The first token of a branch is predicted by the token before it in the row, the end of another branch."""
    assert packed.tree is not None
    row_of = packed.tree.row_of.clone()
    row_of[:-1] = (row_of[1:] - 1).clamp(min=0)
    return replace(packed, tree=replace(packed.tree, row_of=row_of))


@pytest.mark.parametrize("broken", [seeing_siblings, at_positions_of_the_row, predicted_by_neighbours])
def test_what_is_wrong_is_far_off(
    broken: Callable[[PackedSequences], PackedSequences], folders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, trie = load_model(folders("qwen3")), group_and_branches()
    logprob, gradient = distances(model, trie, broken(trie.tree()))
    assert logprob > 100 * LOGPROB
    assert gradient > 100 * GRADIENT
    # The proof before training finds it, too.
    sharing = PackedSequences.sharing

    def wrong(*given: Any) -> PackedSequences:
        return broken(sharing(*given))

    monkeypatch.setattr(PackedSequences, "sharing", wrong)
    refused = tree_refusal(model)
    assert refused is not None
    assert "others than one sample after another" in refused


def test_a_token_that_several_samples_train_is_trained_by_each(folders: Any) -> None:
    """Trained by the first of them only, gradients are far off."""
    model, trie = load_model(folders("qwen3")), group_and_branches()
    tree = trie.tree().tree
    assert tree is not None
    _, expected = trained(model, trie, trie.plain())
    places, first = tree.row_of[trie.targets].tolist(), dict[int, int]()
    for number, place in enumerate(places):
        first.setdefault(place, number)
    owned = torch.tensor([first[place] == number for number, place in enumerate(places)])
    assert not bool(owned.all())
    _, found = trained(model, trie, trie.tree(), trie.weights() * owned)
    assert furthest(expected, found)[0] > 0.1


@pytest.mark.parametrize("how", ["full", "selective"])
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt_oss", "qwen3_moe", "deepseek_v3", "llama4_text"])
def test_activation_checkpointing(family: str, how: str, folders: Any) -> None:
    plain, saving, trie = load_model(folders(family)), load_model(folders(family)), group_and_branches()
    prepare(saving, how, compile_layers=False)
    _, expected = trained(plain, trie, trie.tree())
    _, found = trained(saving, trie, trie.tree())
    assert furthest(expected, found)[0] <= 1e-6


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of torch's own tracing
def test_compiled_layers_of_several_trees(folders: Any) -> None:
    plain, compiled = load_model(folders("qwen3")), load_model(folders("qwen3"))
    prepare(compiled, "none", compile_layers=True, backend="aot_eager")
    for trie in map(group_and_branches, range(3)):
        _, expected = trained(plain, trie, trie.plain())
        _, found = trained(compiled, trie, trie.tree())
        assert furthest(expected, found)[0] <= GRADIENT


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_adapters(family: str, folders: Any) -> None:
    model, trie = load_model(folders(family)), group_and_branches()
    add_adapter(model, filled(LoraConfig, rank=4), folders(family), seed=0)
    randomise(model, 1)
    logprob, gradient = distances(model, trie, trie.tree())
    assert logprob <= LOGPROB
    assert gradient <= GRADIENT


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "mistral"])
def test_blocks_of_queries(family: str, folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (primerl.train.model.packed, primerl.train.model.tree_attention):
        monkeypatch.setattr(module, "BLOCK_QUERIES", 4)
    trie = group_and_branches()
    logprob, gradient = distances(load_model(folders(family)), trie, trie.tree())
    assert logprob <= LOGPROB
    assert gradient <= GRADIENT


def test_bfloat16_is_as_far_from_fp32_as_one_after_another(folders: Any) -> None:
    trie = group_and_branches()
    exact, _ = trained(load_model(folders("qwen3")), trie, trie.plain())
    half = load_model(folders("qwen3"), "bfloat16")
    plain, tree = (trained(half, trie, packed)[0] for packed in (trie.plain(), trie.tree()))
    assert (tree - exact).norm() <= 1.5 * (plain - exact).norm()


def test_gradients_of_shared_keys_are_summed_in_fp32() -> None:
    """256 samples behind one token: each adds 1 to its gradient, and in bf16 256 + 1 is 256."""
    count = 300
    tree = PrefixTree.of([2] * count, [0] + [1] * (count - 1))
    keys = torch.ones(count + 1, 1, 8, dtype=torch.bfloat16, requires_grad=True)
    primerl.train.model.tree_attention.gathered(keys, tree).sum().backward()
    assert keys.grad is not None
    assert keys.grad[0, 0, 0].item() == count


# ---- the tree itself


def random_trie(draw: np.random.Generator) -> Trie:
    """Words of two letters: many begin alike, are beginnings of others, or the same."""
    return Trie.of([draw.integers(0, 2, draw.integers(1, 12)) for _ in range(draw.integers(1, 30))])


def seen(tree: PrefixTree, chunk: int | None = None) -> dict[int, list[int]]:
    """By attention's own indices: what each token of the row sees."""
    found = {}
    bounds = zip(tree.units, tree.query_bounds[1:].tolist(), tree.key_bounds[1:].tolist(), strict=True)
    for unit, query_end, key_end in bounds:
        assert (unit.end, unit.last) == (query_end, key_end)
        keys = tree.keys[unit.first : unit.last].tolist()
        for query in range(unit.begin, unit.end):
            found[query] = keys[: unit.offset + query - unit.begin + 1]
    return found


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_random_tries_under_an_adapter_and_activation_checkpointing(family: str, folders: Any) -> None:
    """Duplicates, beginnings of others, words that differ in one letter, groups of one: by routers and adapters, with
    layers that are computed again."""
    plain, saving = load_model(folders(family)), load_model(folders(family))
    for model in (plain, saving):
        add_adapter(model, filled(LoraConfig, rank=4), folders(family), seed=0)
        randomise(model, 1)
    prepare(saving, "full", compile_layers=False)
    draw, compared = np.random.default_rng(5), 0
    for _ in range(20):
        trie = random_trie(draw)
        packed = PackedSequences.sharing(trie.lengths, trie.shared)
        if packed.tree is None or not len(trie.targets):
            continue
        compared += 1
        expected, expected_gradients = trained(plain, trie, trie.plain())
        found, gradients = trained(saving, trie, packed)
        assert (found - expected).abs().max() <= LOGPROB
        assert furthest(expected_gradients, gradients)[0] <= GRADIENT
    assert compared >= 10


@pytest.mark.parametrize("chunk", [None, 3])
def test_a_token_sees_exactly_its_ancestors(chunk: int | None) -> None:
    draw = np.random.default_rng(3)
    for _ in range(200):
        trie = random_trie(draw)
        tree = PrefixTree.of(trie.lengths, trie.shared)
        tokens, rows = torch.split(trie.token_ids, trie.lengths), torch.split(tree.row_of, trie.lengths)
        of_row = trie.token_ids[tree.kept]
        # As short as can be: one token for each beginning.
        beginnings = {tuple(own[:end].tolist()) for own in tokens for end in range(1, len(own) + 1)}
        assert len(of_row) == len(beginnings)
        sees = seen(tree if chunk is None else tree.in_chunks(chunk))
        assert sorted(sees) == list(range(len(of_row)))
        for own, path in zip(tokens, rows, strict=True):
            assert torch.equal(of_row[path], own)
            assert torch.equal(tree.positions[path], torch.arange(len(own)))
            for depth, place in enumerate(path.tolist()):
                first = 0 if chunk is None else depth // chunk * chunk
                assert sees[place] == path[first : depth + 1].tolist()


def test_less_may_be_shared_than_is_common() -> None:
    """As where a packer shares whole blocks."""
    draw = np.random.default_rng(4)
    q, k, v = (torch.randn(2000, heads, 8, generator=torch.Generator().manual_seed(0)) for heads in (2, 1, 1))
    for _ in range(20):
        trie = random_trie(draw)
        less = [common // 4 * 4 for common in trie.shared]
        outs = []
        for shared in (trie.shared, less, [0] * len(less)):
            tree = PrefixTree.of(trie.lengths, shared)
            # Every token of the T has its own vector, the same in each sequence that shares it.
            full = PrefixTree.of(trie.lengths, trie.shared).row_of
            rows = [x[full[tree.kept]] for x in (q, k, v)]
            outs.append(by_unit(*rows, tree, 0.3, None)[tree.row_of])
        assert (outs[0] - outs[1]).abs().max() <= 1e-6
        assert (outs[0] - outs[2]).abs().max() <= 1e-6


@pytest.mark.parametrize(
    ("lengths", "shared"),
    [
        ([3, 2], [1, 0]),
        ([3, 2], [0, 3]),
        ([2, 3], [0, 3]),
        ([3, 2], [0]),
        ([], []),
        ([3, 2], [0, -1]),
        ([3, 0], [0, 0]),
    ],
)
def test_numbers_that_contradict_each_other(lengths: list[int], shared: list[int]) -> None:
    with pytest.raises(ValueError, match=r"does not fit|cannot share"):
        PrefixTree.of(lengths, shared)


def test_where_little_is_shared_packing_is_as_without() -> None:
    lengths, shared = [10, 10, 10], [0, 2, 1]
    assert PackedSequences.sharing(lengths, shared).tree is None
    assert PackedSequences.sharing(lengths, []).tree is None
    assert PackedSequences.sharing(lengths, [0, 2, 2]).tree is not None


def test_common_beginnings() -> None:
    words = [np.array(list(word.encode())) for word in ("abc", "abcd", "abce", "abce", "x")]
    assert shared_with_previous(words) == [0, 3, 3, 4, 0]
    assert shared_with_previous(words, least=4) == [0, 0, 0, 4, 0]


# ---- the kernel of GPUs, by a double of it


def varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_bounds: Tensor,
    k_bounds: Tensor,
    most_q: int,
    most_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    aligned_at: str = "end",
    ignores_windows: bool = False,
    drops_gradient: bool = False,
    **_: Any,
) -> Tensor:
    """What torch's documentation says of `varlen_attn`: causal masks are aligned at the bottom right."""
    assert (most_q, most_k) == (int(q_bounds.diff().max()), int(k_bounds.diff().max()))
    assert q_bounds.dtype == k_bounds.dtype == torch.int32
    assert window_size[1] == 0
    outs = []
    for (q_from, q_to), (k_from, k_to) in zip(
        *(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True) for bounds in (q_bounds, k_bounds)), strict=True
    ):
        queries, keys, values = q[q_from:q_to].float(), k[k_from:k_to].float(), v[k_from:k_to].float()
        keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (keys, values))
        offset = k_to - k_from - (q_to - q_from) if aligned_at == "end" else 0
        distance = offset + torch.arange(q_to - q_from).unsqueeze(1) - torch.arange(k_to - k_from)
        hidden = distance < 0
        if window_size[0] >= 0 and not ignores_windows:
            hidden |= distance > window_size[0]
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * scale
        shares = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        outs.append(torch.einsum("hqk,khd->qhd", (shares + shares.detach()) / 2 if drops_gradient else shares, values))
    return torch.cat(outs).to(q.dtype)


@pytest.mark.parametrize("window", [None, 5])
def test_one_call_of_a_kernel_gives_what_units_give(window: int | None) -> None:
    trie = group_and_branches()
    tree = PrefixTree.of(trie.lengths, trie.shared)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(tree.kept.shape[0], heads, 8, generator=generator) for heads in (4, 2, 2)]
    found = by_kernel(varlen, *rows, tree, 0.3, window)
    assert (found - by_unit(*rows, tree, 0.3, window)).abs().max() <= 1e-5


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({}, None),
        ({"aligned_at": "start"}, "the output of torch's varlen_attn is wrong"),
        ({"ignores_windows": True}, "the output of torch's varlen_attn with a window is wrong"),
        ({"drops_gradient": True}, "the gradient of torch's varlen_attn is wrong"),
    ],
)
def test_a_kernel_is_tried_before_it_is_used(fault: dict[str, Any], reason: str | None) -> None:
    refused = kernel_refusal(torch.device("cpu"), torch.bfloat16, partial(varlen, **fault))
    assert refused is None if reason is None else (refused or "").startswith(reason)


def test_a_kernel_that_raises_is_named() -> None:
    def kernel(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("no kernel")

    refused = kernel_refusal(torch.device("cpu"), torch.bfloat16, kernel)
    assert refused == "torch's varlen_attn does not take keys longer than queries: RuntimeError: no kernel"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_kernel_of_this_gpu() -> None:
    assert kernel_refusal(torch.device("cuda"), torch.bfloat16) is None
