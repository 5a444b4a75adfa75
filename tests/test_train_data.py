"""Batches decode to the columns that were encoded, and broken ones are refused by name."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
import torch
from primerl.train.data.batch import COLUMNS, Batch, BatchError, decode_batch, sequence_at
from primerl.train.data.without_trees import without_trees
from train_helpers import Sequence, encode_batch, encode_frame, encode_micro_batch


def two_sequences() -> list[Sequence]:
    return [
        Sequence([5, 6], [7, 8, 9], [-0.5, -1.0, -2.0], version=1, advantage=0.25, rollout=11),
        Sequence([5], [4], [-0.75], version=2, advantage=-0.25, temperature=0.5, rollout=12),
    ]


def test_columns() -> None:
    batch = decode_batch(encode_batch(3, [two_sequences(), []], metrics={"reward/all/mean": 0.5}, loss_tokens=9))
    assert (batch.step, batch.rank, batch.ranks, batch.loss_tokens) == (3, 0, 1, 9)
    assert batch.metrics == {"reward/all/mean": 0.5}
    first, empty = batch.micro_batches
    assert first.token_ids.tolist() == [5, 6, 7, 8, 9, 5, 4]
    assert first.loss_mask.tolist() == [0, 0, 1, 1, 1, 0, 1]
    assert first.logprobs.tolist() == [0, 0, -0.5, -1, -2, 0, -0.75]
    assert first.advantages.tolist() == [0.25] * 5 + [-0.25] * 2
    assert first.versions.tolist() == [-1, -1, 1, 1, 1, -1, 2]
    assert first.temperatures.tolist() == [1.0] * 5 + [0.5] * 2
    assert first.sequence_lengths == (5, 2)
    assert first.rollouts == (11, 12)
    assert first.trained().tolist() == [2, 3, 4, 6]
    assert empty.token_ids.shape == (0,)
    assert empty.trained().tolist() == []
    assert batch.staleness() == [1, 0]


def test_extra_columns() -> None:
    one, other = two_sequences()
    one.extra = {"teacher_logprobs": [0.0, 0.0, -1.0, -2.0, -3.0], "ce_weights": [0.0, 1.0, 0.5, 0.0, 0.0]}
    other.extra = {"teacher_logprobs": [0.0, -4.0], "ce_weights": [0.0, 2.0]}
    first, plain = decode_batch(encode_batch(3, [[one, other], two_sequences()])).micro_batches
    assert first.extra["teacher_logprobs"].tolist() == [0, 0, -1, -2, -3, 0, -4]
    assert first.extra["ce_weights"].tolist() == [0, 1, 0.5, 0, 0, 0, 2]
    assert plain.extra == {}
    assert plain.token_ids.tolist() == first.token_ids.tolist()
    header, columns = encode_micro_batch([one, other])
    for cut in (16, 32):
        fields = {"step": 3, "rank": 0, "ranks": 1, "loss_tokens": 4, "metrics": {}, "micro_batches": [header]}
        with pytest.raises(BatchError, match=r"column (ce_weights|teacher_logprobs): 7 values are more"):
            decode_batch(encode_frame(fields, columns[:-cut]))


def branches() -> list[Sequence]:
    """5 6 7 8, 5 6 7 9 9 and 5 6: the last is the beginning of the others."""
    return [
        Sequence([5, 6], [7, 8], [-0.5, -1.0], version=1, advantage=0.25, rollout=11),
        Sequence([5, 6, 7], [9, 9], [-0.5, -0.5], version=1, advantage=0.5, rollout=12),
        Sequence([5], [6], [-0.75], version=2, advantage=-0.25, rollout=13),
    ]


def test_sequences_say_what_they_take_over_from_the_one_before() -> None:
    micro_batches = [branches(), branches(), branches(), []]
    batch = decode_batch(encode_batch(3, micro_batches, shared={0: [0, 3, 2], 1: [0, 2, 0], 2: [0, 0, 0]}))
    assert [micro_batch.shared for micro_batch in batch.micro_batches] == [(0, 3, 2), (0, 2, 0), (), ()]
    # The columns are those of each sequence, taken over or not.
    first, _, plain, _ = batch.micro_batches
    assert first.token_ids.tolist() == plain.token_ids.tolist() == [5, 6, 7, 8, 5, 6, 7, 9, 9, 5, 6]
    assert first.trained().tolist() == [2, 3, 7, 8, 10]


@pytest.mark.parametrize(
    ("shared", "message"),
    [
        ([0, 4, 0], "rollouts 11 and 12 do not begin with the same 4 tokens"),
        ([0, 3], "shared: 2 numbers for 3 sequences"),
        ([1, 3, 2], "sequence 0 of 4 tokens cannot take over 1 of 0"),
        ([0, 3, 3], "sequence 2 of 2 tokens cannot take over 3 of 5"),
        ([0, 5, 0], "sequence 1 of 5 tokens cannot take over 5 of 4"),
        ([0, -1, 0], "sequence 1 of 5 tokens cannot take over -1 of 4"),
        ([0, "3", 0], "not a batch: TypeError"),
    ],
)
def test_what_sequences_do_not_have_in_common_is_refused(shared: list[Any], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        decode_batch(encode_batch(3, [branches()], shared={0: shared}))


def with_context() -> list[Sequence]:
    """5 6 7 8, 5 6 7 9 9, 5 6 7 9 and 5 6, of which the first tokens are context."""
    return [
        Sequence([5, 6], [7, 8], [-0.5, -1.0], version=1, advantage=0.25, rollout=11),
        Sequence([5, 6, 7], [9, 9], [-0.5, -0.5], version=1, advantage=0.5, rollout=12),
        Sequence([5, 6, 7], [9], [-0.25], version=2, advantage=-0.25, rollout=13),
        Sequence([5], [6], [-0.75], version=2, advantage=-0.25, rollout=14),
    ]


def test_omitted_context_is_that_of_the_sequence_before() -> None:
    def of(omitted: dict[int, list[int]] | None) -> Batch:
        sequences = with_context()
        for sequence in sequences:
            sequence.advantage = 0.25  # those of context are 0 in batches, but not in `Sequence`
            sequence.extra = {"teacher_logprobs": [-float(sequence.rollout)] * len(sequence)}
        shared = {0: [0, 2, 3, 1]}
        return decode_batch(encode_batch(3, [sequences, [], sequences], shared=shared, omitted=omitted))

    # The last micro-batch is behind one with omitted values.
    expected, found = of(None), of({0: [0, 2, 3, 1]})
    for here, there in zip(expected.micro_batches, found.micro_batches, strict=True):
        for name in (*COLUMNS, "token_ids"):
            assert torch.equal(getattr(here, name), getattr(there, name)), name
        assert here.extra.keys() == there.extra.keys()
        assert all(torch.equal(column, there.extra[name]) for name, column in here.extra.items())
        assert (here.shared, here.sequence_lengths) == (there.shared, there.sequence_lengths)
    found.micro_batches[0].token_ids[0] = 1
    assert found.micro_batches[0].token_ids.tolist()[4] == 5, "values of its own"


@pytest.mark.parametrize(
    ("omitted", "message"),
    [
        ([0, 2], "omitted: 2 numbers for 4 sequences"),
        ([1, 0, 0, 0], "sequence 0 of 4 tokens cannot omit 1 of 0"),
        ([0, 5, 0, 0], "sequence 1 of 5 tokens cannot omit 5 of 4"),
        ([0, 0, 0, 3], "sequence 3 of 2 tokens cannot omit 3 of 4"),
        ([0, -1, 0, 0], "sequence 1 of 5 tokens cannot omit -1 of 4"),
        ([0, 0.5, 0, 0], "not a batch: TypeError"),
    ],
)
def test_what_cannot_be_omitted_is_refused(omitted: list[Any], message: str) -> None:
    header, columns = encode_micro_batch(with_context())
    fields = {"step": 3, "rank": 0, "ranks": 1, "loss_tokens": 6, "metrics": {}}
    with pytest.raises(BatchError, match=message):
        decode_batch(encode_frame({**fields, "micro_batches": [{**header, "omitted": omitted}]}, columns))


def test_columns_can_be_written_to() -> None:
    (micro_batch,) = decode_batch(encode_batch(3, [two_sequences()])).micro_batches
    micro_batch.token_ids[0] = 1
    assert micro_batch.token_ids.dtype == torch.int32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 3}, r"rollout 11: a policy version is not in 0\.\.2"),
        ({"version": -1}, "rollout 11: a policy version"),
        (
            {"logprobs": [-0.5, float("nan"), -2.0]},
            r"rollout 11: a log-probability is not finite .* \(packed token 3\)",
        ),
        ({"logprobs": [-0.5, 0.5, -2.0]}, "rollout 11: a log-probability"),
        ({"advantage": float("inf")}, "rollout 11: an advantage is not finite"),
        ({"temperature": 0.0}, "rollout 11: a temperature is not above 0"),
        ({"prompt": []}, "rollout 11: the first token of a sequence is to be trained"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(change: dict[str, Any], message: str) -> None:
    sequences = two_sequences()
    for name, value in change.items():
        setattr(sequences[0], name, value)
    with pytest.raises(BatchError, match=message):
        decode_batch(encode_batch(3, [sequences]))


def test_second_sequence_may_not_start_with_a_trained_token() -> None:
    sequences = two_sequences()
    sequences[1].prompt = []
    with pytest.raises(BatchError, match="rollout 12: the first token"):
        decode_batch(encode_batch(3, [sequences]))


def test_a_bytearray_is_not_copied() -> None:
    # Without a checksum, which would not be that of what is written into it.
    body = bytearray(encode_batch(3, [two_sequences(), two_sequences()], checked=False))
    first, second = decode_batch(body).micro_batches
    second.token_ids[0] = 77
    assert [micro_batch.token_ids[0].item() for micro_batch in decode_batch(body).micro_batches] == [5, 77]
    assert first.token_ids.data_ptr() % 16 == second.token_ids.data_ptr() % 16


def test_columns_that_do_not_fit_the_header_are_refused() -> None:
    fields = {"step": 1, "rank": 0, "ranks": 1, "loss_tokens": 1, "metrics": {}}
    header, columns = encode_micro_batch([Sequence([5, 6], [7], [-0.5])])

    def decode(columns: bytes, **changes: Any) -> None:
        decode_batch(encode_frame({**fields, "micro_batches": [{**header, **changes}]}, columns))

    decode(columns)
    with pytest.raises(BatchError, match=r"sequence_lengths \(3,\) do not add up to 2 tokens"):
        decode(columns, tokens=2)
    with pytest.raises(BatchError, match="do not add up"):
        decode(columns, sequence_lengths=[4, -1])
    with pytest.raises(BatchError, match="1 sequences, 0 rollouts"):
        decode(columns, rollouts=[])
    with pytest.raises(BatchError, match="column temperatures: 3 values are more than the bytes that are left"):
        decode(columns[:48])
    with pytest.raises(BatchError, match="the columns are 80 bytes, the micro-batches' 64"):
        decode(columns + b"\0" * 16)


def test_a_torn_body_is_refused() -> None:
    body = encode_batch(3, [two_sequences()])
    for length in range(len(body)):
        with pytest.raises(BatchError, match="not a batch"):
            decode_batch(body[:length])
    with pytest.raises(BatchError, match="1 bytes follow it"):
        decode_batch(body + b"\0")


def test_a_damaged_body_is_refused_wherever_the_damage_is() -> None:
    body = encode_batch(3, [two_sequences()])
    decode_batch(body)
    for place in range(len(body)):
        damaged = bytearray(body)
        damaged[place] ^= 1
        with pytest.raises(BatchError):
            decode_batch(damaged)
    # A token that would be trained in another's place, and nothing else says so.
    changed = bytearray(body)
    changed[body.index(b"\x07\0\0\0\x08\0\0\0")] = 9
    with pytest.raises(BatchError, match=r"the batch is damaged: its bytes have the checksum [0-9a-f]{16}, it says"):
        decode_batch(changed)


def test_a_batch_of_an_earlier_version_has_no_checksum() -> None:
    now, before = (decode_batch(encode_batch(3, [two_sequences()], checked=checked)) for checked in (True, False))
    assert now.micro_batches[0].token_ids.tolist() == before.micro_batches[0].token_ids.tolist()
    cut = encode_batch(3, [two_sequences()])[:-15]
    with pytest.raises(BatchError, match="is no checksum"):
        decode_batch(cut)


@pytest.mark.parametrize("body", [b"", b"\xc1", b"not msgpack", msgpack.packb([1]), msgpack.packb({"step": 1})])
def test_bytes_that_are_no_batch(body: bytes) -> None:
    with pytest.raises(BatchError, match="not a batch"):
        decode_batch(body)


@pytest.mark.parametrize("value", [2, 255])
def test_a_mask_that_is_none(value: int) -> None:
    body = bytearray(encode_batch(3, [two_sequences()], checked=False))
    (micro_batch,) = decode_batch(body).micro_batches
    micro_batch.loss_mask[4] = value
    with pytest.raises(BatchError, match=r"rollout 11: loss_mask is neither 0 nor 1 \(packed token 4\)"):
        decode_batch(body)


def test_sequence_at() -> None:
    assert [sequence_at((2, 1, 3), index) for index in range(6)] == [0, 0, 1, 2, 2, 2]
    with pytest.raises(IndexError):
        sequence_at((2, 1), 3)


def test_what_a_trainer_cannot_share_is_divided() -> None:
    batch = decode_batch(encode_batch(3, [branches(), branches()], shared={0: [0, 3, 2]}))
    whole, plain = batch.micro_batches
    divided = without_trees(batch)
    *parts, last = divided.micro_batches
    assert last is plain
    assert len(parts) > 1
    most = sum(whole.sequence_lengths) - sum(whole.shared)
    assert all(sum(part.sequence_lengths) <= most or len(part.sequence_lengths) == 1 for part in parts)
    assert not any(part.shared for part in parts)
    for name in COLUMNS:
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name)), name
    for name in ("sequence_lengths", "rollouts", "environments"):
        assert sum((getattr(part, name) for part in parts), ()) == getattr(whole, name), name
    assert (divided.loss_tokens, divided.step) == (batch.loss_tokens, batch.step)
