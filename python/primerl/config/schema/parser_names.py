"""Names of the parsers in `primerl._core`, which is slow to import. Written by `make reference`."""

from typing import Literal

ToolParserName = Literal[
    "hermes",
    "qwen3_coder",
    "llama3_json",
    "llama3_pythonic",
    "glm",
    "kimi",
    "deepseek",
    "deepseek_v32",
    "gemma4",
    "cohere",
    "harmony",
    "minimax",
    "mistral",
    "none",
]
ReasoningParserName = Literal[
    "think",
    "mistral",
    "gemma4",
    "cohere",
    "harmony",
    "none",
]
