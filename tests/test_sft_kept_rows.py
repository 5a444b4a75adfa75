"""Rows that are checked before they are trained on, by the same process."""

from __future__ import annotations

from pathlib import Path

import pytest
from primerl.train.data import kept_rows
from primerl.train.data.conversations import Conversation
from primerl.train.data.sources import sources
from primerl.train.sft_settings import RowsConfig
from settings_helpers import filled
from sft_helpers import write_rows


def test_rows_that_were_checked_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_rows(tmp_path / "rows.jsonl", *({"prompt": str(n), "completion": "a"} for n in range(3)))
    (source,) = sources(filled(RowsConfig, path=str(path)), "data.")
    checked = list(source.rows(keep=True))
    with monkeypatch.context() as patch:
        patch.setattr("primerl.train.data.sources._parse", None)
        assert list(source.rows()) == checked
    list(source.rows(keep=True))
    write_rows(path, {"prompt": "changed", "completion": "a"})
    (row,) = source.rows()
    assert isinstance(row.content, Conversation)
    assert row.content.messages[0]["content"] == "changed"
    monkeypatch.setattr(kept_rows, "MOST_BYTES", 10)
    list(source.rows(keep=True))
    assert kept_rows.taken(path) is None, "large files are read again"
