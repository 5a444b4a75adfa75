"""Libraries that verifiers imports, and that an env worker imports when they are used: nobody sees a difference."""

from __future__ import annotations

import subprocess
import sys

import pytest

PREPARE = """
import sys
from importlib import import_module
from primerl.envs import deferred, generations
"""
PREPARED = f"{PREPARE}generations.prepared('v1')\n"
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
generations.prepared("v1"){MESSAGE}
assert "anthropic.resources" in sys.modules
import anthropic
assert issubclass(dialect.ModdedAnthropicMessage, anthropic.types.Message)
assert not any(isinstance(finder, deferred._Library) and "anthropic" in finder._names for finder in sys.meta_path)
"""
    run(code)
