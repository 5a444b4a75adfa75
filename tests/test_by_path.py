"""Functions that a config names: what is not there is found without importing anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from primerl.process.import_path import find_by_path, located, missing

LOSSES = """
import os.path
from json import dumps as written
raise SystemExit("nobody imports this")

WEIGHT: float = 2.0
if WEIGHT:
    async def waited(): ...
else:
    class Alternative: ...
try:
    pass
except ImportError:
    clipped = None

def policy_loss(tokens):
    inner = tokens
    return inner
"""


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a command is started, which `sys.path` need not have."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "my_losses"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise SystemExit('nor this')\n")
    (folder / "ppo.py").write_text(LOSSES)
    (folder / "broken.py").write_text("def policy_loss(:\n")
    (folder / "any.py").write_text("from os import *\n")
    (folder / "lazy.py").write_text("def __getattr__(name): return print\n")
    return folder


@pytest.mark.parametrize("name", ["policy_loss", "waited", "Alternative", "clipped", "written", "os", "WEIGHT"])
def test_what_a_module_names_is_there(name: str) -> None:
    assert missing(f"my_losses.ppo:{name}") is None


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nomod:fn", "there is no module 'nomod'; run from the folder that it is in, install it, or set PYTHONPATH"),
        ("my_losses.gone:fn", "there is no module 'my_losses.gone'; "),
        ("my_losses.ppo.deeper:fn", "there is no module 'my_losses.ppo.deeper'; "),
        ("..my_losses:fn", "there is no module '..my_losses'; "),
        ("my_losses.ppo:policy_los", "HERE/ppo.py has no 'policy_los'; did you mean 'policy_loss'?"),
        ("my_losses.ppo:inner", "HERE/ppo.py has no 'inner'; give the name of a function in it"),
        ("my_losses.broken:policy_loss", "HERE/broken.py, line 1, is no Python: "),
    ],
)
def test_what_is_not_there_is_named(path: str, message: str, package: Path) -> None:
    assert (missing(path) or "").startswith(message.replace("HERE", str(package)))


@pytest.mark.parametrize(
    "path", ["my_losses.any:join", "my_losses.lazy:made", "primerl._core:anything", "sys:anything"]
)
def test_what_importing_alone_can_tell_is_left_to_it(path: str) -> None:
    assert missing(path) is None


@pytest.mark.processes
def test_what_is_found_is_what_would_be_imported() -> None:
    assert missing("json:dumps") is None
    assert find_by_path("json:dumps") is not None
    spec = located("primerl.train.objective.components")
    assert spec is not None
    assert (spec.origin or "").endswith("primerl/train/objective/components.py")
    code = (
        "import sys\nfrom primerl.process.import_path import located, missing\n"
        "assert located('verifiers.v1.tasksets') and missing('torch.nn:Module') is None\n"
        "print({'torch', 'verifiers', 'primerl.train.objective.components'} & set(sys.modules) or 'nothing')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "nothing"
