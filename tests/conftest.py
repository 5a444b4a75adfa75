"""What tests of several parts share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Two tests at once on a small machine; and no model hub is ever asked.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def repository() -> Path:
    return Path(__file__).resolve().parent.parent
