"""Libraries that verifiers imports, and that an env worker imports when they are used: nobody sees a difference."""

from __future__ import annotations

import subprocess
import sys

import pytest
from primerl.envs.generations import reexports

pytestmark = [pytest.mark.processes, pytest.mark.plain]
PREPARE = """
import sys
from importlib import import_module
from primerl.envs.generations import choice, deferred, reexports
"""
PREPARED = f"{PREPARE}choice.prepared('v1')\n"
MESSAGE = """
import pickle
from verifiers.v1.dialects import anthropic as dialect
usage = {"input_tokens": 3, "output_tokens": 2, "service_tier": "provisioned"}
text = {"type": "text", "text": "hi"}
raw = {"id": "1", "type": "message", "role": "assistant", "model": "m", "content": [text], "usage": usage}
message = dialect.ModdedAnthropicMessage.model_validate(raw)
assert pickle.loads(pickle.dumps(message)) == message
assert dialect.response_from_wire(message).message.content == "hi"
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_neither_library_is_imported_with_verifiers() -> None:
    unused = "{'anthropic', 'anthropic.resources', 'anthropic.types.beta', 'math_verify', 'sympy', 'torch', 'datasets'}"
    assert run(f"{PREPARED}print({unused} & set(sys.modules))") == "set()\n"


@pytest.mark.parametrize("first", ["anthropic", "anthropic.types", "anthropic.resources.messages"])
def test_anthropic_that_is_imported_later_is_whole_and_has_the_same_classes(first: str) -> None:
    code = f"""{PREPARED}{MESSAGE}
import_module("{first}")
import anthropic, anthropic.types.message
assert issubclass(dialect.ModdedAnthropicMessage, anthropic.types.Message)
assert issubclass(dialect.ModdedUsage, anthropic.types.Usage)
assert isinstance(message.content[0], anthropic.types.TextBlock)
assert anthropic.types.Message is anthropic.types.message.Message is sys.modules["anthropic.types"].Message
assert anthropic.__spec__.loader is anthropic.__loader__ and type(anthropic.__loader__).__name__ == "SourceFileLoader"
assert anthropic.Anthropic(api_key="none").messages and anthropic._models.BaseModel
assert [finder._names for finder in sys.meta_path if isinstance(finder, deferred._Library)] == [["math_verify"]]
"""
    run(code)


def test_math_verify_is_imported_for_the_first_answer() -> None:
    code = f"""{PREPARED}
from verifiers.v1.utils import score
print(score.verify_boxed_math_answer("\\\\boxed{{1/2}}", "0.5"), score.verify_boxed_math_answer("\\\\boxed{{3}}", "2"))
import math_verify
assert score.parse is math_verify.parse and score.verify is math_verify.verify
assert score.MathVerifyTimeout is math_verify.errors.TimeoutException
"""
    assert run(code) == "1.0 0.0\n"


def test_a_math_verify_that_cannot_be_imported_scores_nothing() -> None:
    code = f"""{PREPARED}
from verifiers.v1.utils import score
sys.modules["sympy"] = None
try:
    print(score.verify_boxed_math_answer("\\\\boxed{{1/2}}", "0.5"))
except SystemExit as error:
    print(error)
"""
    said = run(code)
    assert said.startswith("math_verify, which verifiers scores with, cannot be imported: "), said


@pytest.mark.parametrize(
    "differs",
    [
        "deferred.KNOWN = ()",
        "deferred.CLASSES['Message'] = 'anthropic.types.gone'",
        "import anthropic, math_verify",
    ],
)
def test_libraries_that_cannot_be_deferred_are_imported_at_once(differs: str) -> None:
    code = f"""{PREPARE}{differs}
choice.prepared("v1"){MESSAGE}
assert "anthropic.resources" in sys.modules
import anthropic
assert issubclass(dialect.ModdedAnthropicMessage, anthropic.types.Message)
assert not any(isinstance(finder, deferred._Library) and "anthropic" in finder._names for finder in sys.meta_path)
"""
    run(code)


def test_names_of_openai_are_imported_one_by_one() -> None:
    code = f"""{PREPARED}
assert "openai.types.batch" not in sys.modules
import openai
from openai.types.chat import ChatCompletionChunk
assert ChatCompletionChunk is openai.types.chat.chat_completion_chunk.ChatCompletionChunk
assert openai.types.batch.Batch is openai.types.Batch
assert not hasattr(openai.types, "no_such") and "FileObject" in dir(openai.types)
assert openai.types.__spec__.loader is openai.types.__loader__
names = dict()
exec("from openai.types import *", names)
assert names["FileObject"] is openai.types.file_object.FileObject
assert not any(isinstance(finder, reexports._Finder) for finder in sys.meta_path)
"""
    run(code)


def test_every_name_that_openai_collects_can_be_imported() -> None:
    code = f"""{PREPARE}
from pathlib import Path
with reexports.by_name("openai.types"):
    import openai.types
    packages = [Path(file).parent for file in Path(openai.types.__path__[0]).rglob("__init__.py")]
    for package in packages:
        name = ".".join(("openai", "types", *package.relative_to(openai.types.__path__[0]).parts))
        module = import_module(name)
        for each, where in reexports.collected((package / "__init__.py").read_text()).items():
            assert getattr(module, each) is getattr(import_module(where, name), each)
print(len(packages))
"""
    assert int(run(code)) > 10


@pytest.mark.parametrize(
    ("source", "collected"),
    [
        ("# A comment.\n\nfrom __future__ import annotations\n\nfrom .a import A as A\n", {"A": ".a"}),
        ("from .a import (\n    A as A,\n    B as B,\n)\nfrom .b.c import B as B\n", {"A": ".a", "B": ".b.c"}),
        ("", {}),
        ("from .a import A\n", None),
        ("from .a import A as B\n", None),
        ("from .a import a as a\n", None),
        ("from .a import A as A\nA.x = 1\n", None),
        ("from a import A as A\n", None),
        ("if True:\n    from .a import A as A\n", None),
    ],
)
def test_only_packages_that_collect_names_are_imported_by_name(source: str, collected: dict[str, str] | None) -> None:
    assert reexports.collected(source) == collected
