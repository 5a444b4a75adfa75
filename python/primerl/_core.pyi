"""Bindings of the Rust crates: conversions only."""

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Self, final

__all__ = [
    "REASONING_PARSERS",
    "TOOL_PARSERS",
    "AnswerStream",
    "Answered",
    "Cancelled",
    "Ended",
    "EngineError",
    "EnvClient",
    "EvaluatedRollouts",
    "GrammarMasks",
    "InferenceEngine",
    "Lease",
    "Leased",
    "LeasesVoid",
    "NotExtendableError",
    "Orchestrator",
    "PageServer",
    "ParsedAnswer",
    "PrimerlError",
    "Problem",
    "Registered",
    "RenderError",
    "Renderer",
    "RunCurves",
    "__version__",
    "ask_models",
    "check_config",
    "check_parser",
    "evaluated_rollouts",
    "inspect_buffer",
    "inspect_run",
    "inspect_samples",
    "orchestrate",
    "page_files",
    "run_health",
    "simulate",
]

__version__: str

# Env worker's lease client (rust/primerl-py/src/envs.rs)

@final
class Lease:
    """A rollout to run."""

    @property
    def rollout(self) -> int: ...
    @property
    def group(self) -> int: ...
    @property
    def example(self) -> int:
        """Index in the environment's list of examples."""
    @property
    def base_url(self) -> str:
        """Of the rollout's OpenAI-compatible endpoint, ending in `/v1`."""
    @property
    def api_key(self) -> str:
        """What is sent there as API key; good for this rollout alone."""
    @property
    def sampling(self) -> dict[str, Any]:
        """As in a chat request."""
    @property
    def deadline_s(self) -> float:
        """Seconds from the lease after which the orchestrator gives the rollout up."""

@final
class Registered:
    @property
    def worker(self) -> int: ...
    @property
    def environment(self) -> int: ...
    @property
    def model(self) -> str:
        """Name to put into requests."""
    @property
    def heartbeat_s(self) -> float: ...
    @property
    def demonstration(self) -> str | None:
        """Where examples have what an expert answered, which traces are reported with; None: it is not asked for."""

@final
class Leased:
    @property
    def leases(self) -> list[Lease]: ...

@final
class Cancelled:
    """Stop these rollouts and `release` them; nothing is to be reported."""

    @property
    def rollouts(self) -> list[int]: ...

@final
class LeasesVoid:
    """The orchestrator does not know this worker any more: stop all rollouts; they are released already."""

@final
class Answered:
    """The end of a model call."""

    @property
    def call(self) -> int: ...
    @property
    def status(self) -> int:
        """HTTP status; 0 when no answer came."""
    @property
    def body(self) -> bytes: ...
    @property
    def error(self) -> str | None:
        """Why no answer came."""
    @property
    def timed_out(self) -> bool:
        """Whether no answer came within the call's time limit."""

@final
class Problem:
    """Something for the log."""

    @property
    def message(self) -> str: ...

@final
class Ended:
    """There will be no more leases."""

    @property
    def kind(self) -> Literal["finished", "unreachable", "refused"]: ...
    @property
    def message(self) -> str: ...

@final
class EnvClient:
    """Registers with an orchestrator and holds its leases, on a thread of its own."""

    def __new__(
        cls,
        *,
        orchestrator_url: str,
        api_key: str | None,
        environment: str,
        role: str,
        name: str,
        examples: int,
        listing: dict[str, Any],
        max_concurrent: int,
        give_up_s: float,
        whole_groups: bool = False,
    ) -> Self:
        """Starts the thread.

        Args:
            orchestrator_url: `http://host:port`.
            environment: Name in the run.
            role: "train" or "eval".
            name: Unique to this process.
            examples: How many there are; all workers of an environment must agree.
            listing: `{"digest", "first", "last", "packages": {name: version}, "keys": [...]}`: what else they must
                agree on; `keys` are those of single examples, by which the same one is found in other runs.
            max_concurrent: Most rollouts held at once.
            give_up_s: Ends when the orchestrator answered nothing for this long.
            whole_groups: Rewards come from all rollouts of a group together: each `Leased` holds whole groups only.

        Raises:
            ValueError: A value cannot be used; the message names it.
            OSError: The thread or its sockets cannot be made.
        """
    def fileno(self) -> int:
        """Readable while `notices` has something to give: for `loop.add_reader`."""
    def notices(self) -> list[Registered | Leased | Cancelled | LeasesVoid | Answered | Problem | Ended]:
        """What happened since the last call, oldest first."""
    def report(self, rollout: int, outcome: dict[str, Any]) -> None:
        """Sends the outcome of a rollout until it is answered. Ignored where the rollout is not held.

        Args:
            outcome: `{"ok", "traces": [{"session", "trainable", "ok", "reward", "metrics", "stop_condition",
                "truncated"}], "error": {"kind", "message", "exception", "status"} | None}`. An error's `exception` (the
                name of its type) and `status` (of HTTP) may be left out.
        """
    def turned(self) -> None:
        """The event loop has turned: to be said once a second. One that does not for 10 s is told of as blocked."""
    def held(self, at: str | None, rollout: int | None) -> None:
        """Where the event loop is held up, and by which rollout, as far as that is known."""
    def release(self, rollout: int) -> None:
        """The rollout was stopped without an outcome."""
    def call(self, url: str, api_key: str, session: str, body: bytes, timeout_s: float) -> int:
        """Starts a model call; its end comes as `Answered` with the number returned here.

        A connection that fails is tried again; an answer of any status is final.
        """
    def abort(self, call: int) -> None:
        """Hangs up; no `Answered` follows."""
    def leave(self, patience_s: float) -> None:
        """Waits for reports under way, says goodbye, stops the thread; all within the time given."""

# Exception tree (rust/primerl-py/src/errors.rs)

class PrimerlError(Exception):
    """Base of the errors that primerl raises."""

class RenderError(PrimerlError, ValueError):
    """A model folder, conversation or text that cannot be rendered. The message names file, or message and field."""

class NotExtendableError(RenderError):
    """New messages that cannot be appended to recorded tokens: render the conversation in full."""

    reason: Literal[
        "no_new_messages",
        "template_failed",
        "answer_not_verbatim",
        "no_turn_end",
        "other_stop_token",
        "depends_on_history",
        "tokens_merge",
        "control_tokens",
    ]
    """`docs/templates.md` says what each means."""

# Messages to tokens and back (rust/primerl-py/src/render.rs)

@final
class ParsedAnswer:
    """What sampled ids stand for (`Renderer.parse_answer`)."""

    @property
    def message(self) -> dict[str, Any]:
        """The assistant message. Arguments of tool calls are JSON text; content is None where there are only calls."""
    @property
    def text(self) -> str:
        """The decoded ids with special tokens, without the stop token that ended the answer."""
    @property
    def segments(self) -> list[tuple[Literal["content", "reasoning", "tool_call", "hidden"], str, int, int]]:
        """Kind, text, first token and the token after the last of each stretch. The texts add up to `text`; a token
        that crosses a border belongs to both sides."""
    @property
    def malformed(self) -> list[tuple[str, str]]:
        """Reason and text of what looked like a tool call and is content."""

@final
class AnswerStream:
    """An answer that arrives id by id (`Renderer.answer_stream`). It is the same for any split of the ids.

        stream = renderer.answer_stream()
        pieces = stream.push(renderer.encode("It is ")) + stream.push(renderer.encode("4."))
        last, answer = stream.finish()
        assert "".join(text for kind, text in pieces + last) == answer.message["content"]

    Pieces of a kind add up to the message's field.
    """

    def push(self, ids: Sequence[int]) -> list[tuple[Literal["content", "reasoning", "tool_call"], Any]]:
        """Take the next sampled ids; return what is certain by now: texts of content and reasoning, whole tool calls.

        Raises:
            RenderError: The answer is finished.
        """
    def finish(
        self,
    ) -> tuple[list[tuple[Literal["content", "reasoning", "tool_call"], Any]], ParsedAnswer]:
        """The answer is over: the remaining pieces, and all of it. Can be called once.

        Raises:
            RenderError: The answer is finished already.
        """

TOOL_PARSERS: tuple[str, ...]
"""Names of the parsers of tool calls."""
REASONING_PARSERS: tuple[str, ...]
"""Names of the parsers of reasoning."""

def check_parser(description: dict[str, Any]) -> None:
    """Check the description of a parser (`docs/render.md`).

    Raises:
        RenderError: It cannot be used; the message names the field.
    """

@final
class Renderer:
    """A model folder's tokenizer and chat template.

    Messages are dicts in OpenAI's shape: role, content (text, None or a list of text parts), tool_calls,
    tool_call_id, name, reasoning_content. Tools are OpenAI tool schemas. `template_kwargs` are further variables
    of the template, such as `enable_thinking`; `documents` are mappings (by custom `title` and `text`) for templates
    that know them. None and an empty list of tools or documents differ to some templates. `now` is the time that a
    template's `strftime_now` formats in the local time zone, in seconds since 1970; None asks the clock. All methods
    may be called from many threads at once; they release the GIL.

    Values are those of JSON: dicts with text keys (or any mapping), lists (or any sequence), text, numbers, booleans
    and None. NaN, integers of more than 64 bits, halves of surrogate pairs, other keys, and values nested more than
    127 deep or within themselves are refused by their place, as in `messages[0].content`. All of this is a
    `RenderError`, which is a `ValueError`; so is a template that refuses the messages.
    """

    def __new__(
        cls,
        model_dir: str | Path,
        *,
        tool_parser: str | dict[str, Any] | None = None,
        reasoning_parser: str | dict[str, Any] | None = None,
        control_tokens: Literal["keep", "neutralize"] | None = None,
    ) -> Self:
        """Read the folder: a second for a vocabulary of 128k. The error names the file that is missing or wrong.

        Args:
            model_dir: A local model folder.
            tool_parser: How tool calls are read from answers: one of `TOOL_PARSERS`, or a description
                (`primerl.render.describe_parser`). Default: by the model's chat template, else by its `config.json`.
            reasoning_parser: How reasoning is told from content: one of `REASONING_PARSERS`, or a description. Default:
                by the description that is the tool parser, else by the chat template.
            control_tokens: What becomes of control tokens of the model in the text of messages: "keep", the default:
                they are control tokens, as in `transformers`; "neutralize": they are encoded as text
                (docs/templates.md).

        Raises:
            RenderError: A file is missing or wrong, there is no such parser, or the description cannot be used.
        """
    def render_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        now: float | None = None,
    ) -> str:
        """Text of the conversation, byte for byte that of `apply_chat_template(..., tokenize=False)`.

            messages = [{"role": "user", "content": "What is 2 + 2?"}]
            renderer.render_text(messages, template_kwargs={"enable_thinking": False})

        Raises:
            RenderError: A value is not JSON, content is not text, or the template refuses the messages.
        """
    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        now: float | None = None,
    ) -> list[int]:
        """Token ids of that text: `encode(render_text(...))`, with its errors."""
    def trainable(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[dict[str, Any]]:
        """The messages as the masked methods render them: `developer` is `system` where the template knows only that,
        null content of an answer is empty text where the template cannot write null.

        Raises:
            RenderError: The template leaves out tools, a message of a role, or the tool calls or reasoning of answers.
                Reasoning that it writes of the last answer only is none of these.
        """
    def render_with_mask(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        now: float | None = None,
    ) -> tuple[bytes, bytes]:
        """Ids (int32) and mask (uint8) of a whole conversation, without a generation prompt.

        The mask is 1 on each assistant message and on the stop token that ends it, not on white space after it; for
        a template with `{% generation %}` blocks, on these blocks. Both are columns for `torch.frombuffer`:

            conversation = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
            ids, mask = renderer.render_with_mask(conversation)
            assert len(ids) == 4 * len(mask)

        Raises:
            RenderError: As `render` and `trainable`; or it cannot be told exactly which tokens are the assistant's.
        """
    def render_many_with_mask(
        self,
        conversations: Sequence[Sequence[Mapping[str, Any]]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        now: float | None = None,
    ) -> list[tuple[bytes, bytes]]:
        """`render_with_mask` of each conversation, on all cores. The error names the conversation."""
    def render_many_with_text(
        self,
        conversations: Sequence[Sequence[Mapping[str, Any]]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        now: float | None = None,
    ) -> list[tuple[bytes, bytes, str]]:
        """`render_many_with_mask`, and of each conversation the text that its ids encode."""
    def extend(
        self,
        answer: Mapping[str, Any],
        sampled: Sequence[int],
        new_messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        now: float | None = None,
    ) -> list[int]:
        """Ids to append to `prompt ids + sampled` so that the conversation goes on with `new_messages`.

        They begin with the stop token that closes the answer, unless it was sampled.

            sampled = renderer.encode("It is 4.")
            answer = renderer.parse(sampled)
            new = [{"role": "user", "content": "And 3 + 3?"}]
            try:
                suffix = renderer.extend(answer, sampled, new)
            except NotExtendableError as error:
                print(error.reason)

        Args:
            answer: The assistant message that `sampled` stands for.
            sampled: Its ids; the last one tells whether the answer was closed.
            new_messages: What follows it.

        Raises:
            NotExtendableError: Not allowed by the template; `reason` says why in a word. Render in full (a fork).
            RenderError: A value is not JSON.
        """
    def check_template(self, conversations: str | Path | None = None) -> list[dict[str, Any]]:
        """Every turn after an assistant message, and whether it extends the recorded tokens.

        Of built-in scenarios, or of a file with a JSON object a line (`messages`; optional `tools`, `documents`,
        `chat_template_kwargs`). Each dict has conversation, answer (which message is continued), new_messages (roles)
        and verdict: `extends` (with tokens, closes_with, keeps_history), `forks` (with reason, detail) or `refused`
        (with detail).

        Raises:
            RenderError: Names the file, line and field that cannot be read.
        """
    def parse(
        self,
        sampled: Sequence[int],
        tools: Sequence[Mapping[str, Any]] | None = None,
        starts_in_reasoning: bool = False,
    ) -> dict[str, Any]:
        """The assistant message that sampled ids stand for: `parse_answer(...).message`."""
    def parse_answer(
        self,
        sampled: Sequence[int],
        tools: Sequence[Mapping[str, Any]] | None = None,
        starts_in_reasoning: bool = False,
    ) -> ParsedAnswer:
        """The assistant message that sampled ids stand for, and which tokens became what.

        Args:
            sampled: The answer's ids; a stop token at its end is left out.
            tools: Those of the request. Without tools no call is parsed: its text stays content.
            starts_in_reasoning: Whether the prompt opened the reasoning: `starts_in_reasoning(prompt)`.

        Nothing that a model writes is an error: a call that cannot be read is content, and listed in `malformed`.

            answer = renderer.parse_answer(renderer.encode("<think>\\nEasy.\\n</think>\\n\\nIt is 4."))
            for kind, text, first, end in answer.segments:
                print(kind, repr(text), "tokens", first, "to", end)
        """
    def answer_stream(
        self, tools: Sequence[Mapping[str, Any]] | None = None, starts_in_reasoning: bool = False
    ) -> AnswerStream:
        """`parse_answer` for an answer that is still being sampled."""
    def starts_in_reasoning(self, prompt: Sequence[int]) -> bool:
        """Whether the generation prompt at the end of these ids opened a reasoning block."""
    def encode(self, text: str) -> list[int]:
        """Token ids of a text; special tokens written in it become their ids, none is added."""
    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD.

        Ids without a token have no text. As `transformers` decodes, but for byte tokens of SentencePiece that are not
        UTF-8: each becomes U+FFFD by itself, not together with the good ones beside it.
        """
    def token_bytes(self, ids: Sequence[int]) -> list[bytes]:
        """The bytes that each token stands for by itself, which may end within a character."""
    @property
    def tool_parser(self) -> str:
        """Name of the parser of tool calls."""
    @property
    def reasoning_parser(self) -> str:
        """Name of the parser of reasoning."""
    @property
    def stop_token_ids(self) -> list[int]:
        """Ids that end the assistant's turn, ascending."""
    @property
    def max_positions(self) -> int | None:
        """Context length in tokens, None when config.json does not say it."""
    @property
    def backend(self) -> Literal["fast", "stable"]:
        """Which tokenizer library encodes: the fast one is trusted only after it gave the reference's ids."""
    @property
    def backend_reason(self) -> str | None:
        """Why the fast one is not used, if it is not."""

# Other servers (rust/primerl-py/src/clients.rs)

def ask_models(base_url: str, *, api_key_env: str | None = None, within_s: float) -> tuple[int, bytes]:
    """`GET <base_url>/models`, asked as a run asks that server: status, and up to 1 MiB of the body as it came.

    Over https the server has to have a certificate of an authority that this machine trusts, or one that
    `SSL_CERT_FILE` or `SSL_CERT_DIR` names. `api_key_env` names the variable that holds the key. Raises
    `ValueError`, with the setting's name as its attribute `key`, where one cannot be used, `TimeoutError` after
    `within_s` seconds, `ConnectionError` with the reason, and what to do, where nobody answers.
    """

# Structured outputs (rust/primerl-py/src/grammar.rs)

@final
class GrammarMasks:
    """The tokens of a model's tokenizer, by which the masks of an answer follow from its grammar."""

    def __new__(cls, model: str | PathLike[str], vocabulary_size: int) -> GrammarMasks:
        """`model`: a folder with `tokenizer.json`; `vocabulary_size`: ids the model computes a probability for.

        Raises ValueError: the tokenizer cannot be read, or does not decode token by token.
        """
    @property
    def identity(self) -> str:
        """Names vocabulary and library: equal ones give equal masks."""
    def after(self, spec: str, token_ids: Sequence[int]) -> bytes:
        """The mask of the token that follows these: one bit an id, lowest first, padded to 32. Raises as `replay`."""
    def replay(self, spec: str, token_ids: Sequence[int]) -> tuple[bytes, list[int]]:
        """The masks of an answer, or of its first tokens.

        Returns the different masks one after another, each one bit an id, lowest first, padded to 32, and for each
        token the place of its mask among them.

        Raises ValueError: the spec cannot be enforced, or the answer was not sampled by it.
        """

# Reading a journal (rust/primerl-py/src/inspect.rs)

def inspect_run(output_dir: str | PathLike[str], what: str = "summary", number: int | None = None) -> dict[str, Any]:
    """What the journal in `output_dir` tells; nothing is written, and the run may be going on.

    `what` is `summary`, `idle`, `dropped`, `evaluated` or `check`; or `rollout`, `group` or `step`, with its number.
    Fields are those of `rust/primerl-record/src/inspect`; times in seconds of the run's clock. Raises
    `PrimerlError` if the journal cannot be read or holds no such thing.
    """

@final
class EvaluatedRollouts:
    """Rollouts that evaluations counted, each made when it is asked for."""

    def __iter__(self) -> EvaluatedRollouts: ...
    def __next__(self) -> dict[str, Any]: ...

def evaluated_rollouts(output_dir: str | PathLike[str]) -> EvaluatedRollouts:
    """What evaluations of a run measured: `rollouts` of `inspect_run(.., "evaluated")`, one after the other, in the
    order of versions, environments (as in the config), examples and slots.

    Raises `PrimerlError` if the journal cannot be read.
    """

def run_health(output_dir: str | PathLike[str]) -> list[dict[str, str]]:
    """What the rules of docs/recipes/not-learning.md find wrong with a run, by its `metrics.jsonl` and `steps.jsonl`,
    the first to look at first: `rule`, `what` is seen, `advice`, and the `curve` that shows it. Empty where nothing is,
    or in the first steps. Raises `PrimerlError` if a file cannot be read.
    """

def inspect_buffer(
    output_dir: str | PathLike[str], environment: str | None = None, example: int | None = None
) -> dict[str, Any]:
    """The difficulty buffer as the journal leaves it; with an environment and an example's index, its history too.

    Raises `PrimerlError` if the journal cannot be read or there is no such example.
    """

def inspect_samples(output_dir: str | PathLike[str], steps: Sequence[int], share: float = 1.0) -> dict[str, Any]:
    """What was trained in `steps`: `{"story": .., "steps": {step: [sample]}}`, of the steps that the journal holds.

    Each sample has its reward, advantage and lengths; `text` (`token_ids` and `learnt`, one value a token) is None but
    for the first `share` of each environment's, in an order without a meaning (`place`) that is the same each time.
    Fields are those of `rust/primerl-record/src/inspect/samples.rs`. Raises `PrimerlError` if the journal cannot
    be read.
    """

# The page of a run from its files (rust/primerl-py/src/page.rs)

@final
class PageServer:
    """Serves the page of the run in `output_dir`, on this machine only, from the moment it is made.

    `model` is the folder of the tokenizer that tokens are written out by; without a readable one they are shown by
    their ids. Raises `PrimerlError` if the folder holds no journal, `OSError` if the port cannot be bound.
    """

    def __new__(
        cls, output_dir: str | PathLike[str], model: str | PathLike[str] | None = None, *, port: int = 0
    ) -> Self: ...
    @property
    def url(self) -> str:
        """`http://127.0.0.1:port`, with the port that was bound."""
    def stop(self) -> None:
        """Ends it. Stopping twice is harmless."""

def page_files() -> tuple[dict[str, tuple[str, str]], str]:
    """The files that the page consists of, content type and text by name; and the `Content-Security-Policy` that they
    are served with."""

@final
class RunCurves:
    """Curves and evaluations of the run in `output_dir`, read on from its files with every question. Missing files
    are no error; a file that cannot be read raises OSError. Answers are JSON text, to be passed on as they are."""

    def __new__(cls, output_dir: str | PathLike[str]) -> Self: ...
    def curves(self, names: Sequence[str], *, first: int = 0, last: int = ..., points: int = 500) -> str:
        """As `GET /page/curves`: `{steps, names, curves}` of at most 64 names from step `first` to `last`, at most
        1,000 `points` each; and `damaged`, of each file that is `{file, lines, first, missing, first_missing, is_cut}`:
        how many lines are omitted because no run writes such, and the number of the first; how many steps between
        others have no line, and the first of them; whether it ends within a line, as while one is written. And `last`:
        `{file: step}`, where the files of metrics end."""
    def evaluations(self, limit: int = 1_000) -> str:
        """As `GET /page/evaluations`: `{evaluations, next}`, the newest last."""
    def health(self) -> str:
        """As `GET /page/health`: `{steps, findings}`."""

# Orchestrator (rust/primerl-py/src/orchestrator.rs)

def orchestrate(argv: Sequence[str]) -> int:
    """Run the command `primerl-orchestrate` and return its exit code: 0 finished, 1 failed, 2 bad input."""

def check_config(config: dict[str, Any]) -> tuple[str | None, str] | None:
    """What an orchestrator's config, the keys of its TOML file, is refused for before its model is read.

    The key to change first, if it is about one, and the message; None where nothing is wrong.
    """

@final
class Orchestrator:
    """The orchestrator in this process, for a trainer of your own. Errors are `PrimerlError`.

    It serves engines and environment workers over HTTP as ever. Not usable after a fork; a clear error says so.
    """

    def __new__(cls, config: dict[str, Any]) -> Self:
        """Takes the keys of the orchestrator's TOML file. The error names the field that is wrong."""
    def start(self) -> None:
        """Check the model folder, bind `host` and `port`, begin the run."""
    @property
    def url(self) -> str:
        """Where it listens."""
    def next_batch(self, step: int, rank: int) -> bytes | None:
        """Wait for a rank's batch (msgpack, `docs/architecture.md`); None when there are no more. Ctrl-C interrupts."""
    def publish_weights(self, version: int, manifest_path: str | Path) -> None:
        """Publish the weights that `manifest.json` describes as this policy version; returns once that is on disk."""
    def resume_after(self, step: int) -> None:
        """Training goes on after this step (0: begins): from there on batches are asked for and versions published."""
    def checkpoint_saved(self, step: int, saved: int | None = None) -> None:
        """Batches up to this step will not be asked for again; returns once that is on disk. The weights after the step
        have to be published before. `saved`: the checkpoint, in the run's folder, that was just written; the run's
        state is kept next to it."""
    def status(self) -> dict[str, Any]:
        """What every part is doing and waiting for, as `GET /status`."""
    def shutdown(self, reason: str = "shutdown was called") -> None:
        """End the run in order: cancel, answer whoever waits, close journal and spool. Harmless to repeat."""
    def __enter__(self) -> Self: ...
    def __exit__(self, *_exception: object) -> None:
        """Shut down."""

# The embedded inference engine (rust/primerl-py/src/engine.rs)

class EngineError(PrimerlError):
    """The engine failed while it was serving; the message is the reason."""

@final
class InferenceEngine:
    """vLLM's HTTP surface over a model that is a Python object, on threads of its own. It does not survive a fork."""

    def __new__(cls, config: Mapping[str, Any], backend: object, *, host: str, port: int) -> Self:
        """Binds `host:port` (0: a free port) and serves at once.

        `backend` has the methods of `primerl.inference.torch.step.TorchBackend`; they are called on one thread.
        `ValueError` names a setting that cannot be served, `OSError` says why the port cannot be bound.
        """
    @property
    def url(self) -> str:
        """`http://host:port`, with the port that was bound."""
    def wait(self, timeout_s: float) -> bool:
        """Whether the engine has ended within `timeout_s`. Handles signals meanwhile; `EngineError` if it failed."""
    def stop(self) -> None:
        """Ends the engine: requests in flight are answered with what they have. Stopping twice is harmless."""

# Capacity planner (rust/primerl-py/src/simulate.rs)

def simulate(plan: dict[str, Any], what_if: bool = True) -> dict[str, Any]:
    """Play a plan in virtual time: `report` and `what_if` (numbers), `table` (text), `picture` (SVG).

    Raises ValueError for a plan that cannot be simulated; the message begins with the field's name.
    """
