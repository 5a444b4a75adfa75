"""What the commands import that a user waits for: each package here is one that the command uses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.plain]
COUNT = """
import contextlib, io, json, sys
before = set(sys.modules)
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    {code}
new = set(sys.modules) - before
packages = {{name.partition(".")[0] for name in new}} - sys.stdlib_module_names - {{"primerl"}}
own = [name for name in new if name in ("primerl._core", "primerl.launch.run")]
print(json.dumps(sorted([*(name for name in packages if not name.startswith("_")), *own])))
"""
COMMAND = "from primerl.cli import main; main({arguments!r})"
PYDANTIC = ["annotated_types", "pydantic", "pydantic_config", "pydantic_core", "typing_extensions", "typing_inspection"]
# Digests of adapters.
CONFIG = [*PYDANTIC, "xxhash"]


def imported(code: str, folder: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", COUNT.format(code=code)],
        env={**os.environ, "PRIMERL_STATE_DIR": str(folder)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    found: list[str] = json.loads(done.stdout)
    return found


def test_importing_the_package_imports_nothing_else(tmp_path: Path) -> None:
    assert imported("import primerl", tmp_path) == []


@pytest.mark.parametrize(
    ("command", "allowed"),
    [
        ("--help", []),
        ("run --help", []),
        ("run list", []),
        ("run logs --help", []),
        ("top --help", []),
        ("trace --help", []),
        ("report --help", []),
        ("config --help", []),
        ("rl --help", CONFIG),
        ("rl --help trainer.optim", CONFIG),
        ("sft --help", CONFIG),
        ("eval --help", CONFIG),
        ("config explain trainer.optim.lr", CONFIG),
    ],
)
def test_a_command_imports_only_what_it_uses(command: str, allowed: list[str], tmp_path: Path) -> None:
    assert set(imported(COMMAND.format(arguments=command.split()), tmp_path)) <= set(allowed)


SCANS = """
import importlib.metadata, os, sys
from primerl.train.model.import_once import import_transformers
import_transformers()
import transformers.models
from transformers.utils import import_utils

shared = transformers.models
given = import_utils.define_import_structure.__wrapped__
misses = given.cache_info().misses
reading, folder = import_utils.create_import_structure_from_path, os.path.dirname(shared.__file__)
import_utils.create_import_structure_from_path = lambda path: 1 / 0 if str(path) == folder else reading(path)
import transformers.processing_utils  # which executes transformers/__init__.py once more
import_utils.create_import_structure_from_path = reading
read = given.__wrapped__(shared.__file__)
own = type(shared)(shared.__name__, shared.__file__, read, module_spec=shared.__spec__)
same = all(getattr(shared, name) == getattr(own, name) for name in ("_class_to_module", "_object_missing_backend"))
modules = shared._modules == own._modules and shared._import_structure.keys() == own._import_structure.keys()
packages = import_utils.PACKAGE_DISTRIBUTION_MAPPING == importlib.metadata.packages_distributions()
print(misses, len(own._class_to_module) > 3000, same, modules, set(dir(shared)) == set(dir(own)), packages)
"""


def test_sources_of_models_are_read_once_by_all_processes(tmp_path: Path) -> None:
    def scans(cache: str) -> list[str]:
        command, own = [sys.executable, "-c", SCANS], {**os.environ, "XDG_CACHE_HOME": cache}
        done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=240)
        return done.stdout.split() or [done.stderr]

    assert scans(str(tmp_path)) == ["1"] + ["True"] * 5
    names = sorted(file.name.partition("-")[0] for file in tmp_path.glob("primerl/*"))
    assert names == ["packages", "transformers"]
    assert scans(str(tmp_path)) == ["0"] + ["True"] * 5
    assert scans(os.devnull) == ["1"] + ["True"] * 5


LIBRARIES = """
import sys, threading, types
from primerl.process import cuda, imports

has_gpu, folder = sys.argv[1] == "gpu", sys.argv[2]
cuda.driver = lambda: object() if has_gpu else None
if folder:
    imports.find_spec = lambda _: types.SimpleNamespace(submodule_search_locations=[folder])
imports.load_torch_libraries()
for thread in threading.enumerate():
    if thread is not threading.main_thread():
        thread.join()
with open("/proc/self/maps") as maps:
    print("libtorch_python" in maps.read(), "torch" in sys.modules)
import torch
print((torch.ones(2) + 1).tolist())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    ("machine", "has_broken_ones", "are_loaded"),
    [
        ("cpu", False, True),
        # Where torch itself has to decide which of CUDA's libraries are loaded.
        ("gpu", False, False),
        # What is wrong with them is for the import to say.
        ("cpu", True, False),
    ],
)
def test_the_libraries_of_torch_are_loaded_before_it_is_imported(
    machine: str, has_broken_ones: bool, are_loaded: bool, tmp_path: Path
) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libtorch_python.so").write_text("cut off")
    arguments = [machine, str(tmp_path) if has_broken_ones else ""]
    done = subprocess.run([sys.executable, "-c", LIBRARIES, *arguments], capture_output=True, text=True, timeout=240)
    assert (done.stdout.splitlines(), done.stderr) == ([f"{are_loaded} False", "[2.0, 2.0]"], "")
