"""Folders in MXFP4 (gpt-oss), for engines that are sent whole weights: those come in bfloat16, which a model with
quantised experts cannot load. So vLLM is started for the model in bfloat16, and dequantises the files as it reads them.

    applies(folder)          whether a folder is of this kind
    folder_for(folder)       a folder like it, whose config.json says nothing of MXFP4; its files are links
    LOAD_FORMAT              makes vLLM read it by `loader`

Engines that are sent adapters keep their own weights, and vLLM serves them in MXFP4. Standard library only.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from primerl.train.model import support

LOAD_FORMAT = "primerl_mxfp4"
CONFIG = "config.json"


def applies(folder: Path) -> bool:
    try:
        return support.dequantises(json.loads((folder / CONFIG).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return False


def folder_for(folder: Path) -> tempfile.TemporaryDirectory[str]:
    """Raises OSError where there is no room for it."""
    made = tempfile.TemporaryDirectory(prefix="primerl-served-")
    target = Path(made.name)
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    config.pop("quantization_config", None)
    (target / CONFIG).write_text(json.dumps(config), encoding="utf-8")
    for path in folder.iterdir():
        if path.name != CONFIG:
            (target / path.name).symlink_to(path.resolve())
    return made
