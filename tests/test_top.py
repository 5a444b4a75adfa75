"""`primerl top`: what it draws, where it finds a run, and what it says where it cannot."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from primerl.cli import looking, main
from primerl.runs import top
from primerl.runs.registry import Registry
from rich.console import Console, RenderableType


def drawn(picture: RenderableType, width: int) -> list[str]:
    """The lines of a picture in a terminal that is so wide."""
    console = Console(width=width)
    with console.capture() as capture:
        console.print(picture)
    return [line.rstrip() for line in capture.get().splitlines()]


STATUS: dict[str, Any] = {
    "run": {"step": 1234, "max_steps": 10000, "policy_version": 1233},
    "rollouts": {"in_flight": 128, "limit": 1024, "trained": 123456, "failed": 858, "stale": 3, "cancelled": 315},
    "tokens": {"per_second": 12345.0},
    "environments": [
        {
            "name": "a-name-that-is-long-enough-to-fill-half-a-line",
            "workers": 2,
            "in_flight": 100,
            "queued": 3,
            "errors": {"model": 0, "timeout": 58, "environment": 800},
        },
        {"name": "[b]fine", "workers": 1, "in_flight": 28, "queued": 0, "errors": {}},
    ],
    "failures": {"environment": 800, "timeout": 58, "turn": 7},
    "cancelled": {"group_dropped": 315},
    "voided": {"too_old": 3},
    "last_step": {"reward/all/mean": 0.5},
}
MEASURED = [
    {"environment": "held-out", "version": version, "mean_reward": reward, "rollouts": 64, "failed": failed}
    for version, reward, failed in ((0, 0.25, 0), (40, 0.75, 1))
] + [{"environment": "other", "version": 0, "mean_reward": None, "rollouts": 8, "failed": 8}]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_fact_of_the_headline_is_broken(width: int) -> None:
    lines = drawn(top.headline({}, STATUS), width)
    assert all(len(line) <= width for line in lines)
    assert len(lines) == {40: 4, 80: 2, 200: 1}[width]
    text = "\n".join(lines)
    for fact in ("step 1234/10000", "trained 123,456", "lost 1,176", "in flight 128/1024", "tokens/s 12,345"):
        assert fact in text


@pytest.mark.parametrize("width", [80, 160])
def test_environments_evaluations_and_what_was_lost_are_shown(width: int) -> None:
    lines = drawn(top.frame({"folder": "out", "status": STATUS}, {}, "http://127.0.0.1:1", MEASURED), width)
    assert all(len(line) <= width for line in lines)
    text = " ".join(" ".join(lines).replace("│", " ").split())
    assert "environment 800, timeout 58" in text
    assert "[b]fine 1 28 0 none" in text
    assert "failed environment 800, timeout 58" in text
    assert "turn 7" not in text, "which is no rollout"
    assert "cancelled group dropped 315" in text
    assert "ended well, not trained too old 3" in text
    assert "held-out v40 reward 0.75 +0.5 64 rollouts, 1 failed" in text
    assert "other v0 reward - 8 rollouts, 8 failed" in text


def test_scores_of_a_part_are_marked_and_compared_with_none() -> None:
    whole, part = MEASURED[0], {**MEASURED[1], "rollouts": 32, "expected": 64, "complete": False}
    for measured, told in (
        ([whole, part], "held-out v40, 32 of 64 rollouts reward 0.75 32 rollouts, 1 failed"),
        ([part, {**whole, "version": 80}], "held-out v80 reward 0.25 64 rollouts, 0 failed"),
    ):
        lines = drawn(top.frame({"folder": "out", "status": STATUS}, {}, "http://127.0.0.1:1", measured), 160)
        assert told in " ".join(" ".join(lines).replace("│", " ").split())


def test_nothing_is_shown_of_what_there_is_none() -> None:
    text = "\n".join(drawn(top.frame({"folder": "out", "status": {}}, {}, "http://127.0.0.1:1"), 80))
    assert "lost rollouts" not in text
    assert "last evaluations" not in text


def test_top_says_what_it_cannot_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", str(tmp_path / "none")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert main(["top", str(tmp_path)]) == 2
    assert "no orchestrator was started in" in capsys.readouterr().err
    (tmp_path / "run").mkdir()
    (tmp_path / "run/orchestrator.json").write_text('{"url": "http://127.0.0.1:9", "pid": 1}')
    assert main(["top", str(tmp_path), "--once"]) == 1
    assert "the run is not running: nothing answers at http://127.0.0.1:9" in capsys.readouterr().err
    for url in ("https://host", "http://host:abc", "http://host:65536", "http://[::1", "http://:8000"):
        capsys.readouterr()
        assert main(["top", url, "--once"]) == 2
        assert f"{url}: expected the URL of an orchestrator, http://host:port" in capsys.readouterr().err
    (tmp_path / "run/orchestrator.json").write_text('{"url": "http://127.0.0.1:none", "pid": 1}')
    assert main(["top", str(tmp_path), "--once"]) == 2
    assert main(["top", str(tmp_path), "--interval", "0"]) == 2


def test_top_says_how_a_run_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    orchestrator, summary = (tmp_path / "run" / name for name in ("orchestrator.json", "summary.json"))
    orchestrator.write_text('{"url": "http://127.0.0.1:9", "pid": 1}')
    for content, said in (
        (
            '{"exit_code": 1, "reason": "env_task_0 exited", "wall_s": 39.1}',
            "the run failed after 39 s: env_task_0",
        ),
        ('{"exit_code": 0, "reason": "finished", "wall_s": 5}', "the run finished after 5 s\n"),
    ):
        summary.write_text(content)
        os.utime(summary, (2e9, 2e9))
        assert main(["top", str(tmp_path), "--once"]) == 1
        assert said in capsys.readouterr().err
    # It was started again since, or what is there is no summary.
    os.utime(orchestrator, (3e9, 3e9))
    assert top.ending(str(tmp_path)) == ""
    summary.write_text("[]")
    os.utime(summary, (4e9, 4e9))
    assert top.ending(str(tmp_path)) == ""
    assert top.ending("http://127.0.0.1:9") == ""


def test_a_run_is_found_by_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PRIMERL_STATE_DIR", str(tmp_path / "state"))
    folder = tmp_path / "output"
    (folder / "run").mkdir(parents=True)
    (folder / "run/orchestrator.json").write_text('{"url": "http://127.0.0.1:9", "pid": 1}')
    with Registry() as registry:
        run_id = registry.begin(folder, "", goes_on=False, form="full", name="mine", model="m", environments=[])
    for given in (run_id, run_id[:5], "mine"):
        assert top.find(given) == "http://127.0.0.1:9"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    assert looking.meant("mine") == str(folder)
    assert f"mine is run {run_id}, in {folder}; give ./mine for the folder here" in capsys.readouterr().err
    (tmp_path / run_id[:5]).mkdir()
    for given in ("./mine", run_id[:5], "output", "elsewhere"):
        assert looking.meant(given) == given
    shutil.rmtree(tmp_path / "mine")
    assert not capsys.readouterr().err
    for command in ("top", "page"):
        assert main([command, "nowhere"]) == 2
        assert "there is no folder nowhere, and there is no run 'nowhere'" in " ".join(capsys.readouterr().err.split())
    shutil.rmtree(folder)
    assert main(["page", "mine"]) == 2
    assert "is gone" in capsys.readouterr().err


def test_names_of_engines_are_no_markup() -> None:
    engine = {"engine": 0, "name": "[red]a[/bold]", "version": 1, "running": 2, "limit": 4, "doing": "[b]serves"}
    console = Console(width=100)
    with console.capture() as capture:
        console.print(top.engines({"engines": [engine]}))
    text = capture.get()
    assert "[red]a[/bold]" in text
    assert "[b]serves" in text


def test_an_evaluation_has_no_trainer_to_show() -> None:
    states = [{"state": "busy", "what": "serves", "share": 1.0}]
    now = {
        "folder": "out",
        "only_evaluates": True,
        "idle": {"trainer": states, "engines": [{"engine": 0, "states": states}], "workers": []},
        "status": {
            "rollouts": {"evaluated": 1234, "in_flight": 3, "limit": 16},
            "environments": [{"errors": {"model": 2, "tool": 1}}, {"errors": {}}],
        },
    }
    console = Console(width=120)
    with console.capture() as capture:
        console.print(top.frame(now, {}, "http://127.0.0.1:1"))
    text = capture.get()
    for words in ("measured 1,234", "in flight 3/16", "errors 3", "engine 0"):
        assert words in text
    for words in ("trainer", "no step is trained yet", "staleness"):
        assert words not in text


def test_sparklines_span_what_there_is() -> None:
    assert top.spark([1.0, 2.0, 3.0]).plain == "▁▄█" or top.spark([1.0, 2.0, 3.0]).plain == "▁▅█"
    assert top.spark([2.0] * 5).plain == "▁▁▁▁▁"
    assert len(top.spark(list(map(float, range(10_000))), width=40)) == 40
