"""The model folder a run ends with: loads in `transformers`, vLLM and the embedded engine like any other."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from primerl.train.files import whole_folder

TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
"""Everything of a model folder that turns text into tokens, and the rules of ending a turn."""


def save_checkpoint(model: Any, source: Path, output_dir: Path, step: int) -> Path:
    """Write `<output_dir>/weights/step_<step>`; returns it. Raises FileExistsError when it is there.

    Tokenizer, chat template and generation config are copied from the model folder `source`, byte for byte: saving
    them through `transformers` may change them, and with them the tokens of every later run.
    """
    target = output_dir / "weights" / f"step_{step}"
    with whole_folder(target) as folder:
        model.save_pretrained(folder)
        for name in TEXT_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        if (source / "chat_templates").is_dir():
            shutil.copytree(source / "chat_templates", folder / "chat_templates")
    return target
