"""Messages to tokens and back, with a model's own tokenizer and chat template.

    from primerl.render import Renderer

    renderer = Renderer("path/to/model")
    prompt = renderer.render([{"role": "user", "content": "Hello"}])  # the ids of apply_chat_template
    ids, mask = renderer.render_with_mask(conversation)  # supervised training: mask is 1 on what the assistant wrote

`ids` and `mask` are little-endian columns, made for `torch.frombuffer(..., dtype=torch.int32)` and `torch.uint8`.
Everything that cannot be done exactly is a `RenderError` that names the message or the file.
`docs/render.md` shows it all.
"""

from __future__ import annotations

from primerl._core import AnswerStream, NotExtendableError, ParsedAnswer, PrimerlError, Renderer, RenderError
from primerl.parsers import ParserError
from primerl.parsers import describe as describe_parser

__all__ = [
    "AnswerStream",
    "NotExtendableError",
    "ParsedAnswer",
    "ParserError",
    "PrimerlError",
    "RenderError",
    "Renderer",
    "describe_parser",
]
