"""What a failing test shows of the logs of its run; and that fast tests are held to start nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

PLUGINS = ("-p", "tiers", "-p", "failure_logs", "-p", "no:cacheprovider", "-p", "no:xdist")
MARKS = """
[pytest]
markers =
    processes
    end_to_end
    vllm
    long
    fast
"""


@pytest.fixture
def inner(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    pytester.makefile(".ini", pytest=MARKS)
    return pytester


def test_a_failing_test_shows_the_ends_of_its_logs(inner: pytest.Pytester) -> None:
    inner.makepyfile(
        """
        from types import SimpleNamespace
        import pytest

        @pytest.fixture
        def run(tmp_path_factory):
            output = tmp_path_factory.mktemp("run")
            (output / "logs").mkdir()
            (output / "logs" / "trainer.log").write_text("".join(f"line {number}\\n" for number in range(100)))
            (output / "logs" / "empty.log").touch()
            (output / "journal").mkdir()
            (output / "journal" / "0.log").write_bytes(b"\\xff frames")
            return SimpleNamespace(output=output)

        def test_fails(tmp_path, run):
            for number in range(9):
                (tmp_path / f"{number}.log").write_bytes(b"\\xff not text")
            assert False

        def test_passes(tmp_path, run):
            (tmp_path / "quiet.log").write_text("nobody asks")
        """
    )
    result = inner.runpytest_inprocess(*PLUGINS)
    result.assert_outcomes(failed=1, passed=1)
    shown = result.stdout.str()
    assert shown.count("the end of ") == 8
    assert "\ufffd not text" in shown
    for absent in ("nobody asks", "frames", "empty.log"):
        assert absent not in shown


def test_of_a_long_log_the_last_lines_are_shown(inner: pytest.Pytester) -> None:
    inner.makepyfile(
        """
        import pytest

        @pytest.fixture
        def ready(tmp_path):
            (tmp_path / "engine.log").write_text("".join(f"line {number}\\n" for number in range(50_000)))
            raise RuntimeError("the engine did not start")

        def test_uses_it(ready, tmp_path):
            pass
        """
    )
    result = inner.runpytest_inprocess(*PLUGINS)
    result.assert_outcomes(errors=1)
    lines = result.stdout.lines
    assert [line for line in lines if line.startswith("line ")] == [f"line {n}" for n in range(49_960, 50_000)]


@pytest.mark.processes
def test_a_fast_test_that_starts_a_process_fails(inner: pytest.Pytester) -> None:
    inner.makepyfile(
        """
        import contextlib, subprocess, sys
        import pytest

        COMMAND = [sys.executable, "-c", ""]

        def test_unmarked():
            subprocess.run(COMMAND)

        def test_hides_it():
            with contextlib.suppress(BaseException):
                subprocess.run(COMMAND)

        def test_of_another_program():
            subprocess.run(["uname"], check=True)

        @pytest.mark.processes
        def test_marked():
            subprocess.run(COMMAND, check=True)
        """
    )
    result = inner.runpytest_subprocess(*PLUGINS)
    result.assert_outcomes(failed=2, passed=2)
    result.stdout.fnmatch_lines(["*a fast test started *mark test_*::test_hides_it with @pytest.mark.processes*"])
    inner.runpytest_subprocess(*PLUGINS, "-m", "fast").assert_outcomes(failed=2, passed=1, deselected=1)
