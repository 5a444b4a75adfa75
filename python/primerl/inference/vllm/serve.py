"""Started by path in vLLM's environment, with vLLM's own arguments: `python -P serve.py --model ...`.

What is above `main` also runs in processes that vLLM spawns, since they import the main module again. Standard library
only, until vLLM itself is imported.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
import sys
import threading
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2]
PARENT = "PRIMERL_VLLM_PARENT"
"""Process id of the process that started the server."""
LORA = "PRIMERL_LORA"
"""Settings of the run's adapters (JSON: rank, target_modules), where engines are sent some."""
PR_SET_PDEATHSIG = 1


def provide_package() -> None:
    """`import primerl` finds the files next to this one: another version may be installed here, or none, and the folder
    that holds the package may be full of what must not be imported here (another environment's site-packages)."""
    if "primerl" in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(
        "primerl", PACKAGE / "__init__.py", submodule_search_locations=[str(PACKAGE)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"{PACKAGE} is not a package")
    module = importlib.util.module_from_spec(spec)
    sys.modules["primerl"] = module
    spec.loader.exec_module(module)


def die_with_parent() -> None:
    """vLLM's engine process outlives a server that is killed by SIGKILL, with all its memory; so would the server."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


_forked_by_main = True


def _before_fork() -> None:
    global _forked_by_main
    # The kernel ties the signal to the thread that forked, which may end long before its process does.
    _forked_by_main = threading.current_thread() is threading.main_thread()


def _in_forked_child() -> None:
    if _forked_by_main:
        die_with_parent()


def main() -> None:
    parent = os.environ.pop(PARENT, None)
    if parent is not None and os.getppid() != int(parent):
        raise SystemExit("who started vLLM is gone already")
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    serve()


# Not where the launcher imports a name from here: it would end with the terminal or script that started it.
if __name__ in ("__main__", "__mp_main__"):
    provide_package()
    die_with_parent()
    os.register_at_fork(before=_before_fork, after_in_child=_in_forked_child)

if __name__ == "__main__":
    main()
