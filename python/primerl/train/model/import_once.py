"""Imports `transformers` while its sources are scanned only once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def import_transformers() -> None:
    """Imports `transformers` and `transformers.models`. Each of them reads the sources of all models, 2,000 files, to
    know what they define: a quarter of the time that both take. Here the second is given what the first has found.

    Called before anything else imports `transformers.models`; without it, that takes longer, and is the same.
    """
    if "transformers.models" in sys.modules:
        return
    import transformers
    from transformers.utils import import_utils

    given = import_utils.define_import_structure
    folder = Path(transformers.__file__).parent / "models"

    def define(path: str, prefix: str | None = None) -> Any:
        if prefix is not None or Path(path) != folder / "__init__.py":
            return given(path, prefix)
        # Kept by its cache, under the arguments of `transformers`, which has added modules of its own.
        found = given(folder, prefix="models")
        return {
            needs: {
                name.removeprefix("models."): names for name, names in modules.items() if name.startswith("models.")
            }
            for needs, modules in found.items()
        }

    import_utils.define_import_structure = define  # type: ignore[assignment]
    try:
        import transformers.models
    finally:
        import_utils.define_import_structure = given
