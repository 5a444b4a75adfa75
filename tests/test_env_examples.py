"""The example environments: their draws, splits, rewards, and the demonstrations written for them."""

from __future__ import annotations

import importlib.util
import itertools
import json
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest
from reverse_text.strings import Alphabet, answer_of, gold, prompt, similarity, sloppy, strings
from sort_letters import letters

EXAMPLES = Path(__file__).parent.parent / "examples"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"make_{name.replace('-', '_')}", EXAMPLES / name / "make_data.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("<r>abc</r>", "abc"),
        ("<r></r>", ""),
        ("<r>abc", None),
        ("abc</r>", None),
        ("abc", None),
        ("", None),
        (" <r>abc</r>", None),
        ("<r>abc</r>\n", None),
        ("<r>/r>", None),
    ],
)
def test_only_exactly_one_tagged_answer_counts(reply: str, answer: str | None) -> None:
    assert answer_of(reply) == answer


def test_similarity_is_twice_the_matches_over_both_lengths() -> None:
    assert similarity("dcba", "dcba") == 1.0
    assert similarity("dc", "dcba") == pytest.approx(2 * 2 / 6)
    assert similarity("", "dcba") == 0.0


def test_draws_keep_to_their_alphabet_and_splits_are_disjoint() -> None:
    alphabet = Alphabet("a-c", 2, 3)
    train = set(itertools.islice(strings(alphabet, "train", 0), 2000))
    evaluation = set(itertools.islice(strings(alphabet, "eval", 1), 500))
    assert not train & evaluation
    # Between them the splits hold every string there is.
    assert len(train | evaluation) == 3**2 + 3**3
    assert {len(text) for text in train} == {2, 3}


@pytest.mark.parametrize("alphabet", [("z-a", 1, 2), ("abc", 1, 2), ("a-z", 3, 2), ("a-z", 0, 2)])
def test_an_alphabet_that_cannot_be_drawn_from_is_refused(alphabet: tuple[str, int, int]) -> None:
    with pytest.raises(ValueError, match=r"letters|length"):
        Alphabet(*alphabet)


def test_demonstrations_have_the_mistakes_of_the_recipe() -> None:
    generator = random.Random(0)
    drawn = list(itertools.islice(strings(Alphabet(), "train", 0), 4000))
    shown = [(text, sloppy(text, generator, 0.2, 0.5)) for text in drawn]
    tagged = [answer for _, answer in shown if answer.startswith("<r>")]
    whole = [(text, answer) for text, answer in shown if text[::-1] in answer]
    right = [(text, answer) for text, answer in shown if answer == gold(text)]
    assert len(tagged) / len(shown) == pytest.approx(0.5, abs=0.03)
    assert len(whole) / len(shown) == pytest.approx(0.8, abs=0.03)
    assert len(right) / len(shown) == pytest.approx(0.4, abs=0.03)
    rewards = [similarity(answer_of(answer) or "", text[::-1]) for text, answer in shown]
    assert sum(rewards) / len(rewards) == pytest.approx(0.46, abs=0.02)


def test_the_reverse_data_file_is_made_of_training_strings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = script("reverse-text")
    output = tmp_path / "folder" / "data.jsonl"
    assert make.main(["--output", str(output), "--rows", "200", "--seed", "1"]) == 0
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(rows) == 200
    evaluation = {prompt(text) for text in itertools.islice(strings(Alphabet(), "eval", 0), 2000)}
    assert not {row["prompt"] for row in rows} & evaluation
    again = tmp_path / "again.jsonl"
    make.main(["--output", str(again), "--rows", "200", "--seed", "1"])
    assert again.read_bytes() == output.read_bytes()
    assert sorted(path.name for path in output.parent.iterdir()) == ["data.jsonl"]


@pytest.mark.processes
def test_generating_data_needs_no_verifiers() -> None:
    import subprocess

    code = "import sys, make_data; sys.exit('verifiers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=EXAMPLES / "reverse-text", timeout=180)
    assert done.returncode == 0


def test_sort_examples_have_distinct_letters_and_disjoint_splits() -> None:
    train = set(itertools.islice(letters.examples("train", 0), 3000))
    evaluation = set(itertools.islice(letters.examples("eval", 1), 500))
    assert not train & evaluation
    for turns in train:
        assert len(set("".join(turns))) == len("".join(turns))
        assert all(letters.MIN_NEW <= len(new) <= letters.MAX_NEW for new in turns)
    assert {len(turns) for turns in train} == {2, 3}


def test_sort_gold_holds_all_letters_so_far() -> None:
    turns = ("db", "ca")
    assert [letters.message(turns, turn) for turn in (0, 1)] == ["Sort: db", "Add: ca"]
    assert [letters.gold(turns, turn) for turn in (0, 1)] == ["bd", "abcd"]
    assert letters.score("abcd", "abcd") == 1.0
    assert letters.score("bd", "abcd") == pytest.approx((2 * 2 / 6) ** 4)


def test_the_sort_data_file_forgets_in_its_share_of_rows(tmp_path: Path) -> None:
    make = script("sort-letters")
    output = tmp_path / "data.jsonl"
    assert make.main(["--output", str(output), "--rows", "1000"]) == 0
    rows = [json.loads(line)["messages"] for line in output.read_text().splitlines()]
    forgetful = [row for row in rows if len(row[3]["content"]) == len(row[2]["content"].removeprefix("Add: "))]
    assert len(forgetful) / len(rows) == pytest.approx(0.7, abs=0.05)
    assert all([message["role"] for message in row] == ["user", "assistant"] * (len(row) // 2) for row in rows)
