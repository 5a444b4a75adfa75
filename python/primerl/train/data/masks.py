"""Conversations to token ids with a mask of what is trained, by the model's own template.

`primerl.render` says what the assistant wrote. What another role says is its content as the template writes it,
and the stop token where one follows directly: never the template's own text around it. It is found by putting a
sentinel in the content's place: the text around the sentinel has to be the text around the content. A token that
crosses the edge of such a content is not trained.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from primerl.train.data import harmony
from primerl.train.data.conversations import (
    REASONING_OPTIONS,
    Conversation,
    RowError,
    TemplateFields,
    templates,
    unknown,
)
from primerl.train.data.template_checks import (
    SENTINEL,
    ControlTokens,
    check_written,
    content_text,
    replaced,
    roles_left_out,
    spoken_words,
)
from primerl.train.model.packed_model import ModelError
from primerl.train.sft_settings import ControlTokens as ControlTokenPolicy
from primerl.train.sft_settings import LossMaskConfig

if TYPE_CHECKING:
    from primerl.render import Renderer


class Columns(NamedTuple):
    """A row, one entry a token."""

    token_ids: bytes  # int32
    loss_mask: bytes  # uint8
    unwritten_reasoning: int = 0
    """Trained answers whose reasoning the template drops."""
    control_tokens: tuple[str, ...] = ()
    """Those that the text of messages holds, which became tokens of the model's own syntax."""


ROWS_A_TASK = 64
TEMPLATE = "the chat template refuses it"
UNKNOWN = "unknown field of a message"


class Masker:
    """Renders conversations; its methods may be called from several threads."""

    def __init__(
        self, model_folder: Path, loss_mask: LossMaskConfig, now: float, control_tokens: ControlTokenPolicy = "keep"
    ) -> None:
        """`now`: the time that templates with today's date in them are given, in seconds since 1970.

        Raises:
            ModelError: the folder has no tokenizer or chat template that can be used.
        """
        from primerl.render import Renderer

        try:
            self._renderer: Renderer = Renderer(model_folder, control_tokens=control_tokens)
        except ValueError as error:
            raise ModelError(f"model.path: {error}") from error
        self._assistant = loss_mask.assistant
        self._roles = {role for role in ("system", "user", "tool") if getattr(loss_mask, role)}
        if "system" in self._roles:
            self._roles.add("developer")
        self._now = now
        self._fields = TemplateFields(model_folder)
        self._harmony = harmony.applies(templates(model_folder)) and self._assistant and not self._roles
        self._offsets = _tokenizer_with_offsets(model_folder) if self._roles else None
        self._stops = [self._renderer.decode([token]) for token in self._renderer.stop_token_ids]
        self._control_tokens = ControlTokens(model_folder, self._stops) if control_tokens == "keep" else None
        self._left_out = roles_left_out(lambda messages: self._text(messages, {"now": now}))

    def many(self, conversations: Sequence[Conversation], pool: ThreadPoolExecutor) -> list[Columns | RowError]:
        """Each rendered, or why it cannot be."""
        if self._harmony:
            return _mapped(pool, self._one_in_harmony, conversations)
        if self._roles or not self._assistant:
            return _mapped(pool, self._one, conversations)
        rendered: list[Columns | RowError | None] = [None] * len(conversations)
        alike: dict[str, list[int]] = {}
        looked_at = [index for index, conversation in enumerate(conversations) if self._needs_a_look(conversation)]
        found = _mapped(pool, self._one, [conversations[index] for index in looked_at])
        for index, columns in zip(looked_at, found, strict=True):
            rendered[index] = columns
        for index, conversation in enumerate(conversations):
            if rendered[index] is not None:
                continue
            given = (conversation.tools, conversation.template_kwargs)
            alike.setdefault(json.dumps(given, default=str) if any(given) else "", []).append(index)
        for indices in alike.values():
            group = [conversations[index] for index in indices]
            for index, columns in zip(indices, self._group(group, pool), strict=True):
                rendered[index] = columns
        return [columns for columns in rendered if columns is not None]

    def _needs_a_look(self, conversation: Conversation) -> bool:
        return (
            bool(conversation.untrained)
            or any(map(unknown, conversation.messages))
            or self._useless(conversation) is not None
        )

    def _useless(self, conversation: Conversation) -> str | None:
        """An option of reasoning that the row sets and the template does not read."""
        if not conversation.template_kwargs:
            return None
        asked = (name for name in REASONING_OPTIONS if name in conversation.template_kwargs)
        return next((name for name in asked if not self._fields.names(name)), None)

    def _group(self, group: list[Conversation], pool: ThreadPoolExecutor) -> list[Columns | RowError]:
        """Conversations with the same tools and template variables, on all cores in one call."""
        messages = [conversation.messages for conversation in group]
        try:
            rendered = self._renderer.render_many_with_text(messages, **self._options(group[0]))
        except ValueError:
            # One of them; the others are wanted.
            return _mapped(pool, self._one, group)
        return list(map(self._checked, group, rendered))

    def _checked(self, conversation: Conversation, rendered: tuple[bytes, bytes, str]) -> Columns | RowError:
        """A conversation whose answers are trained."""
        messages, options = conversation.messages, self._options(conversation)
        try:
            if any(message["role"] == "developer" or message.get("content") is None for message in messages):
                messages = self._renderer.trainable(
                    messages, tools=options["tools"], template_kwargs=options["template_kwargs"]
                )
            ids, mask, text = rendered
            unwritten_reasoning = self._check_written(messages, text, conversation, options)
            return Columns(ids, mask, unwritten_reasoning, self._found(messages))
        except ValueError as error:
            return error if isinstance(error, RowError) else RowError(TEMPLATE, str(error))

    def _check_written(
        self, messages: list[dict[str, Any]], text: str, conversation: Conversation, options: dict[str, Any]
    ) -> int:
        answers = {index for index, message in enumerate(messages) if message["role"] == "assistant"}
        trained = answers - conversation.untrained if self._assistant else set()
        return check_written(messages, text, lambda given: self._text(given, options), self._left_out, trained)

    def _one(self, conversation: Conversation) -> Columns | RowError:
        options, useless = self._options(conversation), self._useless(conversation)
        if useless is not None:
            return _useless_option(useless)
        try:
            self._check_fields(conversation.messages, options)
            messages = self._renderer.trainable(
                conversation.messages, tools=options["tools"], template_kwargs=options["template_kwargs"]
            )
            if self._assistant:
                ids, mask = self._renderer.render_with_mask(messages, **options)
            else:
                rendered = self._renderer.render(messages, add_generation_prompt=False, **options)
                ids, mask = b"".join(token.to_bytes(4, "little") for token in rendered), bytes(len(rendered))
            text = self._text(messages, options)
            unwritten_reasoning = self._check_written(messages, text, conversation, options)
            if self._assistant and conversation.untrained:
                mask = self._without(messages, ids, mask, conversation.untrained)
            if self._roles:
                mask = self._with_roles(messages, ids, mask, conversation.untrained, options)
        except ValueError as error:
            return error if isinstance(error, RowError) else RowError(TEMPLATE, str(error))
        return Columns(ids, mask, unwritten_reasoning, self._found(messages))

    def _one_in_harmony(self, conversation: Conversation) -> Columns | RowError:
        """A row for gpt-oss, whose template writes an answer by what follows it."""
        options, useless = self._options(conversation), self._useless(conversation)
        if useless is not None:
            return _useless_option(useless)
        try:
            self._check_fields(conversation.messages, options)
            messages = harmony.prepared(conversation.messages)
            harmony.written(messages, lambda given: self._text(given, options))
            ids = self._renderer.render(messages, add_generation_prompt=False, **options)
            pieces = [self._renderer.decode([token]) for token in ids]
            mask, unwritten = harmony.mask(messages, pieces, conversation.untrained)
        except ValueError as error:
            return error if isinstance(error, RowError) else RowError(TEMPLATE, str(error))
        columns = b"".join(token.to_bytes(4, "little") for token in ids)
        return Columns(columns, mask, unwritten, self._found(messages))

    def _without(self, messages: list[dict[str, Any]], ids: bytes, mask: bytes, untrained: frozenset[int]) -> bytes:
        """A mask of what the assistant wrote, without these messages. Each answer has to be one stretch of tokens that
        holds what it says; else a token's author is unknown.

        Raises RowError.
        """
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        marked = [index for index in answers if index in untrained]
        if not marked:
            return mask
        stretches = list(re.finditer(rb"\x01+", mask))
        if len(stretches) != len(answers) or not all(
            spoken_words(messages[index]) in self._renderer.decode(_tokens(ids, stretch.start(), stretch.end()))
            for index, stretch in zip(answers, stretches, strict=True)
        ):
            raise RowError(
                TEMPLATE,
                f"messages[{marked[0]}] is marked as not trained, but its tokens cannot be distinguished from other "
                "messages'",
            )
        trained = bytearray(mask)
        for index, stretch in zip(answers, stretches, strict=True):
            if index in untrained:
                trained[stretch.start() : stretch.end()] = bytes(len(stretch[0]))
        return bytes(trained)

    def _check_fields(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> None:
        """Raises RowError for a field that is neither known nor read by the template."""
        for index, message in enumerate(messages):
            for name in unknown(message):
                if self._fields.names(name):
                    continue
                without = {field: value for field, value in message.items() if field != name}
                # A template may write whatever a message has, without naming it.
                if self._text(messages, options) == self._text(
                    [*messages[:index], without, *messages[index + 1 :]], options
                ):
                    raise RowError(
                        UNKNOWN,
                        f"messages[{index}].{name} is unknown, and the chat template does not read it; correct the "
                        "name or take the field out",
                    )

    def _options(self, conversation: Conversation) -> dict[str, Any]:
        return {
            "tools": conversation.tools,
            "template_kwargs": conversation.template_kwargs or None,
            "now": self._now,
        }

    def _with_roles(
        self,
        messages: list[dict[str, Any]],
        ids: bytes,
        mask: bytes,
        untrained: frozenset[int],
        options: dict[str, Any],
    ) -> bytes:
        said = [
            index for index, message in enumerate(messages) if message["role"] in self._roles and index not in untrained
        ]
        if not said:
            return mask
        text = self._text(messages, options)
        assert self._offsets is not None
        spans = [self._span(text, messages, index, options) for index in said]
        encoded = self._offsets(text, add_special_tokens=False, return_offsets_mapping=True)
        offsets = encoded["offset_mapping"]
        if b"".join(token.to_bytes(4, "little") for token in encoded["input_ids"]) != ids:
            offsets = self._byte_offsets(text, ids)
            spans = [(len(text[:start].encode()), len(text[:end].encode())) for start, end in spans]
        trained = bytearray(mask)
        for token, (start, end) in enumerate(offsets):
            if any(first <= start < end <= last for first, last in spans):
                trained[token] = 1
        return bytes(trained)

    def _byte_offsets(self, text: str, ids: bytes) -> list[tuple[int, int]]:
        """Bytes of `text` that each token is, where `transformers` gives other ids: control tokens in it are text."""
        pieces = self._renderer.token_bytes(_tokens(ids, 0, len(ids) // 4)) if self._control_tokens is None else []
        if b"".join(pieces) != text.encode():
            raise RowError(TEMPLATE, "transformers' tokenizer gives other ids; only the assistant can be trained on")
        ends = list(accumulate(map(len, pieces)))
        return list(pairwise([0, *ends]))

    def _found(self, messages: list[dict[str, Any]]) -> tuple[str, ...]:
        return () if self._control_tokens is None else self._control_tokens.found(messages)

    def _span(self, text: str, messages: list[dict[str, Any]], index: int, options: dict[str, Any]) -> tuple[int, int]:
        """Characters of `text` that messages[index] is responsible for."""
        before, found, after = self._text(replaced(messages, index, content=SENTINEL), options).partition(SENTINEL)
        start, end = len(before), len(text) - len(after)
        told = found and SENTINEL not in after and start <= end and text.startswith(before) and text.endswith(after)
        if not told or text[start:end].strip() != content_text(messages[index]).strip():
            raise RowError(
                TEMPLATE, f"messages[{index}]: the chat template rewrites what the {messages[index]['role']} says"
            )
        following = text[end:]
        stop = max((stop for stop in self._stops if following.startswith(stop)), key=len, default="")
        return start, end + len(stop)

    def _text(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> str:
        return str(self._renderer.render_text(messages, add_generation_prompt=False, **options))


def _mapped(
    pool: ThreadPoolExecutor, work: Callable[..., Columns | RowError], *rows: Sequence[Any]
) -> list[Columns | RowError]:
    """As `pool.map`, with several rows a task: to hand over a single one takes longer than most take."""
    parts = [[column[start : start + ROWS_A_TASK] for column in rows] for start in range(0, len(rows[0]), ROWS_A_TASK)]
    return [done for part in pool.map(lambda part: list(map(work, *part)), parts) for done in part]


def _tokens(ids: bytes, start: int, end: int) -> list[int]:
    return list(memoryview(ids).cast("I")[start:end])


def _useless_option(name: str) -> RowError:
    return RowError(
        UNKNOWN, f"chat_template_kwargs.{name}: the chat template does nothing with it; take it out of the row"
    )


def _tokenizer_with_offsets(model_folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelError(f"model.path: {model_folder}: {error}") from error
    if not tokenizer.is_fast:
        raise ModelError(f"model.path: {model_folder} has no fast tokenizer; data.loss_mask needs one for this role")
    return tokenizer
