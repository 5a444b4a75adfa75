"""What is kept in the user's cache folder between processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from primerl.process.user_cache import kept

FOUND = {"a": [1, "zwei"]}


def counting(answer: object = FOUND) -> tuple[Callable[[], object], list[int]]:
    calls: list[int] = []

    def find() -> object:
        calls.append(1)
        return answer

    return find, calls


def test_what_was_found_is_found_once_for_a_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    find, calls = counting()
    assert [kept("sources", "one", find) for _ in range(3)] == [FOUND] * 3
    assert len(calls) == 1
    assert kept("sources", "two", find) == FOUND
    assert kept("others", "two", find) == FOUND
    assert len(calls) == 3
    # One file for each name, and nothing else.
    assert len(list((tmp_path / "primerl").iterdir())) == 2


@pytest.mark.parametrize("damage", [lambda it: it[:-9], lambda it: it.replace(b"zwei", b"drei"), lambda _: b"\xff"])
def test_what_is_damaged_is_found_again(
    damage: Callable[[bytes], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    find, calls = counting()
    kept("sources", "one", find)
    (file,) = (tmp_path / "primerl").iterdir()
    file.write_bytes(damage(file.read_bytes()))
    assert kept("sources", "one", find) == FOUND
    assert kept("sources", "one", find) == FOUND
    assert len(calls) == 2


def test_files_of_virtualenvs_that_are_gone_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    find, calls = counting()
    gone, others = tmp_path / "it's gone", tmp_path / "others"
    for prefix in (gone, others):
        prefix.mkdir()
        monkeypatch.setattr(sys, "prefix", str(prefix))
        assert kept("sources", "one", find) == FOUND
    gone.rmdir()
    for file in (tmp_path / "primerl").iterdir():
        os.utime(file, (0, 0))
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kept("sources", "one", find) == FOUND
    texts = [file.read_text() for file in (tmp_path / "primerl").iterdir()]
    assert len(texts) == 2
    assert not [text for text in texts if "gone" in text]
    assert len(calls) == 3


@pytest.mark.parametrize("folder", ["/dev/null", "not/absolute"])
def test_without_a_folder_everything_is_found(folder: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", folder)
    find, calls = counting()
    assert [kept("sources", "one", find) for _ in range(2)] == [FOUND] * 2
    assert len(calls) == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("answer", [None, {1, 2}])
def test_what_json_cannot_hold_is_not_kept(answer: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    find, calls = counting(answer)
    assert [kept("sources", "one", find) for _ in range(2)] == [answer] * 2
    assert len(calls) == 2
