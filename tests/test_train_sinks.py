"""Attention sinks out of a flash kernel: forward and backward against attention that is written out with the sink."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from primerl.train.model import packed_model
from primerl.train.model.packed import PackedSequences, written_out
from primerl.train.model.sinks import Backward, Forward, flash_kernel, with_sinks
from torch import Tensor

HEADS, KV_HEADS, SIZE = 4, 2, 8
LENGTHS = (13, 30, 1)
ALIKE = {"rtol": 0.0, "atol": 1e-12}


def plain_kernel(packed: PackedSequences, scale: float, window: int | None) -> tuple[Forward, Backward]:
    """What a flash kernel computes, in plain torch: shares of the scores by logsumexp, and the backward pass from the
    attention and logsumexp that it is given."""
    ids, at = packed.sequence_ids[0], packed.position_ids[0]
    distance = at.unsqueeze(1) - at
    hidden = (ids.unsqueeze(1) != ids) | (distance < 0)
    if window is not None:
        hidden |= distance >= window

    def scores(q: Tensor, k: Tensor) -> Tensor:
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        return (torch.einsum("ihd,jhd->hij", q, k) * scale).masked_fill(hidden, -torch.inf)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        s = scores(q, k)
        v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
        return torch.einsum("hij,jhd->ihd", s.softmax(-1), v), s.logsumexp(-1)

    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        shares = (scores(q, k) - lse.unsqueeze(-1)).exp()
        delta = (grad * out).sum(-1).transpose(0, 1).unsqueeze(-1)
        groups = q.shape[1] // k.shape[1]
        k_all, v_all = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        ds = shares * (torch.einsum("ihd,jhd->hij", grad, v_all) - delta) * scale
        dk, dv = torch.einsum("hij,ihd->jhd", ds, q), torch.einsum("hij,ihd->jhd", shares, grad)
        return torch.einsum("hij,jhd->ihd", ds, k_all), *(x.unflatten(1, (-1, groups)).sum(2) for x in (dk, dv))

    return forward, backward


def given(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Queries, keys, values [T, H, D] and sinks [H]."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(LENGTHS), heads, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS)] + [(HEADS,)]
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def one_by_one(parts: list[Tensor], window: int | None) -> Tensor:
    q, k, v, sinks = parts
    rows = [torch.split(x, LENGTHS) for x in (q, k, v)]
    found = []
    for row in zip(*rows, strict=True):
        q_row, k_row, v_row = (x.transpose(0, 1).unsqueeze(0) for x in row)
        k_row, v_row = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k_row, v_row))
        length = q_row.shape[2]
        distance = torch.arange(length).unsqueeze(1) - torch.arange(length)
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        scores = (q_row @ k_row.transpose(2, 3) * SIZE**-0.5).masked_fill(hidden, -torch.inf)
        extra = sinks.view(1, -1, 1, 1).expand(1, HEADS, length, 1)
        found.append((torch.cat([scores, extra], -1).softmax(-1)[..., :-1] @ v_row).squeeze(0).transpose(0, 1))
    return torch.cat(found)


@pytest.mark.parametrize("window", [None, 5])
def test_forward_and_backward_are_those_of_attention_with_the_sink(window: int | None) -> None:
    packed, weights = PackedSequences.from_lengths(LENGTHS), torch.randn(sum(LENGTHS), HEADS, SIZE).double()
    wanted, found = given(), given()
    expected = one_by_one(wanted, window)
    out = with_sinks(*found, plain_kernel(packed, SIZE**-0.5, window))  # type: ignore[call-arg]
    torch.testing.assert_close(out, expected, **ALIKE)
    for parts, result in ((wanted, expected), (found, out)):
        (result * weights).sum().backward()  # type: ignore[no-untyped-call]
        assert all(part.grad is not None for part in parts)
    for own, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(own.grad, other.grad, **ALIKE)
    # Without the sink it is something else.
    assert not torch.allclose(plain_kernel(packed, SIZE**-0.5, window)[0](*found[:3])[0], expected, atol=1e-2)


def test_a_large_negative_sink_is_none() -> None:
    q, k, v, sinks = given()
    kernel = plain_kernel(PackedSequences.from_lengths(LENGTHS), SIZE**-0.5, None)
    out = with_sinks(q, k, v, torch.full_like(sinks, -1e4), kernel)
    torch.testing.assert_close(out, kernel[0](q, k, v)[0], **ALIKE)


def attention(parts: list[Tensor], packed: PackedSequences, window: int | None) -> Tensor:
    q, k, v, sinks = parts
    rows = [x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
    out, _ = packed_model.packed_attention(
        torch.nn.Module(), *rows, None, scaling=SIZE**-0.5, packed=packed, sliding_window=window, s_aux=sinks
    )
    return out.squeeze(0)


@pytest.mark.parametrize("window", [None, 5])
def test_packed_attention_takes_it_where_flash_attention_is(
    monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    packed = PackedSequences.from_lengths(LENGTHS)
    expected = attention(given(), packed, window)
    asked: list[Any] = []

    def kernel(*how: Any) -> tuple[Forward, Backward]:
        asked.append(how[1:])
        return plain_kernel(*how)

    monkeypatch.setattr(packed_model, "_takes_flash", lambda query, value: True)
    monkeypatch.setattr(packed_model, "flash_kernel", kernel)
    torch.testing.assert_close(attention(given(), packed, window), expected, rtol=0.0, atol=1e-6)
    assert asked == [(SIZE**-0.5, window)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("window", [None, 5])
def test_the_kernel_of_a_gpu(window: int | None) -> None:
    """In bfloat16 against written-out attention in fp32 on the same numbers."""
    packed = PackedSequences.from_lengths((300, 700), "cuda")
    shapes = [(1000, heads, 64) for heads in (8, 2, 2)] + [(8,)]
    parts = [torch.randn(shape, device="cuda").bfloat16().requires_grad_() for shape in shapes]
    exact = [part.detach().float().requires_grad_() for part in parts]
    grad = torch.randn(1000, 8, 64, device="cuda")
    out = with_sinks(*parts, flash_kernel(packed, 0.125, window))  # type: ignore[call-arg]
    rows = [torch.split(part, [300, 700]) for part in exact[:3]]
    expected = torch.cat(
        [
            written_out(*(x.transpose(0, 1).unsqueeze(0) for x in row), 0.125, window, None, exact[3])
            .squeeze(0)
            .transpose(0, 1)
            for row in zip(*rows, strict=True)
        ]
    )
    (out.float() * grad).sum().backward()  # type: ignore[no-untyped-call]
    (expected * grad).sum().backward()  # type: ignore[no-untyped-call]
    results = zip([out, *(part.grad for part in parts)], [expected, *(part.grad for part in exact)], strict=True)
    for own, other in results:
        assert own is not None
        assert other is not None
        assert (own.float() - other).norm() <= 0.02 * other.norm()
