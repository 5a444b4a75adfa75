"""The live page: in a real browser, over a run that goes on and over its files; `primerl top` and `primerl page`."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import browser
import httpx
import pytest
from engine_helpers import mock_command, running
from primerl._core import Orchestrator, PageServer, PrimerlError
from primerl.cli import main
from primerl.launch.report import addresses
from primerl.run_key import run_key, run_key_header
from primerl.train.loop.metrics import MetricsWriter
from test_orchestrator_in_process import PATIENCE_S, GoneError, begin, post, publish, settings

CHROMIUM = browser.installed()
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed (Debian: apt install chromium)")
# What a model, or whoever writes the prompts, may try.
HOSTILE = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"


@dataclass
class Run:
    url: str
    output: Path
    model: Path

    def page(self, view: str = "") -> str:
        """Its address, as a launcher prints it."""
        return f"{self.url}/#key={run_key(self.output)}/{view}"


def work(url: str) -> None:
    """An env worker; the reward depends on the rollout, and every fifth one fails."""
    registration = {"environment": "task", "role": "train", "name": "env_task_0:1", "pid": os.getpid(), "examples": 10}
    worker = post(f"{url}/envs/register", registration)["worker"]
    while True:
        answer = post(f"{url}/envs/lease", {"worker": worker, "max": 4})
        if answer["finished"]:
            return
        for lease in answer["rollouts"]:
            messages: list[dict[str, Any]] = [{"role": "user", "content": f"{HOSTILE} example {lease['example']}"}]
            for _ in range(2):
                body = {"model": "m", "messages": messages}
                headers = {"authorization": f"Bearer {lease['api_key']}"}
                chat = f"{lease['base_url']}/chat/completions"
                reply = httpx.post(chat, json=body, headers=headers, timeout=PATIENCE_S)
                if reply.status_code == 410:
                    return
                messages += [reply.json()["choices"][0]["message"], {"role": "user", "content": "again"}]
            fails = lease["rollout"] % 5 == 4
            trace = {"session": "", "trainable": True, "ok": True, "reward": float(lease["rollout"] % 3), "metrics": {}}
            error = {"kind": "environment", "message": f"ValueError: {HOSTILE}"} if fails else None
            traces = [] if fails else [{**trace, "stop_condition": None, "truncated": False}]
            outcome = {"ok": not fails, "traces": traces, "error": error}
            post(f"{url}/envs/result", {"worker": worker, "rollout": lease["rollout"], "outcome": outcome})


def work_until_it_is_gone(url: str) -> None:
    try:
        work(url)
    except (httpx.TransportError, GoneError):
        return


def rollouts_of(url: str, **query: Any) -> dict[str, Any]:
    answer = httpx.get(f"{url}/page/rollouts", params=query, headers=run_key_header(url), timeout=60)
    return dict(answer.json())


@pytest.fixture(scope="module")
def run(model: Path, mock_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Three of nine steps are trained, and it goes on."""
    output = tmp_path_factory.mktemp("page") / "run"
    log = output.parent / "engine.log"
    with (
        running("mock", mock_command(mock_binary), None, log) as engine,
        Orchestrator(settings(model, output, engines=[engine.url], max_steps=9)) as orchestrator,
    ):
        begin(orchestrator, output)
        worker = threading.Thread(target=work_until_it_is_gone, args=(orchestrator.url,))
        worker.start()
        publish(orchestrator, output, 0)
        with MetricsWriter(output) as metrics:
            for step in (1, 2, 3):
                assert orchestrator.next_batch(step, 0) is not None
                metrics.write(step, {"reward/all/mean": step / 4, "loss/mean": -0.5 * step, "staleness/mean": 1.0})
                publish(orchestrator, output, step)
        deadline = time.monotonic() + PATIENCE_S
        while rollouts_of(orchestrator.url, fate="trained")["matching"] < 12:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield Run(orchestrator.url, output, model)
        orchestrator.shutdown("the test is over")
        worker.join(PATIENCE_S)


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Tab]:
    assert CHROMIUM is not None
    with browser.tab(CHROMIUM, tmp_path_factory.mktemp("profile")) as tab:
        yield tab


def check_nothing_is_wrong(tab: browser.Tab) -> None:
    assert tab.evaluate("window.hacked") is None
    assert tab.evaluate("document.querySelectorAll('main script, main img').length") == 0
    assert tab.complaints == []


@needs_browser
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (800, True)])
def test_the_overview(run: Run, tab: browser.Tab, width: int, dark: bool) -> None:
    tab.size(width, 900, dark=dark)
    tab.goto(run.page())
    tab.until("document.querySelectorAll('.chart path').length >= 3")
    text = tab.until("document.querySelector('#idle .shares') && document.body.innerText")
    assert re.search(r"\d / 9", text)
    for title in ("Reward", "Loss", "Staleness", "Where the time goes", "Who waits for what", "Engines"):
        assert title in text
    assert re.search(r"Trainer\n", text)
    assert "logs/envs/*/task/env_worker_0.log" in text
    background = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background)[:3])) < 200) == dark
    # Nothing hangs out of the window.
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    # By keyboard: a curve tells its values.
    tab.evaluate("document.querySelector('.chart svg').focus()")
    tab.key("ArrowLeft")
    tab.until("document.querySelector('.row .end').textContent.startsWith('step ')")
    check_nothing_is_wrong(tab)


@needs_browser
def test_from_the_list_to_a_rollout_to_its_group(run: Run, tab: browser.Tab) -> None:
    tab.size(1280, 900)
    tab.goto(run.page("rollouts?fate=trained&step=2"))
    tab.until("document.querySelectorAll('.list tbody tr').length === 4")
    tab.evaluate("document.querySelector('.list tbody a').click()")
    tab.until("document.querySelectorAll('.tokens').length === 2 && document.querySelectorAll('.tokens span').length")
    assert HOSTILE in tab.evaluate("document.querySelector('.prompt').textContent")
    assert "extends turn 0" in tab.text()
    tab.evaluate("document.querySelector('.tokens').focus()")
    tab.key("ArrowRight")
    told = tab.until("!document.querySelector('.inspect').hidden && document.querySelector('.inspect').innerText")
    assert "log-probability" in told
    seen = set()
    for key in "123":
        tab.key(key)
        # Kept while colours change.
        seen.add(
            tab.evaluate("[...document.querySelectorAll('.tokens span')].map(n => n.style.backgroundColor).join()")
        )
    assert len(seen) == 3
    tab.evaluate("document.querySelector('a[href^=\"#/groups/\"]').click()")
    tab.until("document.querySelectorAll('.columns > section').length >= 2")
    tab.until("document.querySelectorAll('.columns .tokens span').length > 2")
    check_nothing_is_wrong(tab)


@needs_browser
def test_a_group_is_drawn_whatever_one_of_its_rollouts_answers(run: Run, tab: browser.Tab) -> None:
    trained = rollouts_of(run.url, fate="trained")["rollouts"]
    group = trained[-1]["group"]
    members = rollouts_of(run.url, group=group)["rollouts"]
    assert len(members) >= 2
    # They are drawn with the best first.
    lost = min(members, key=lambda one: (-(one["reward"] or 0), one["rollout"]))["rollout"]
    tab.goto(run.page("rollouts"))
    tab.until("document.querySelector('.list tbody a') !== null")
    gone = f"/page/rollouts/{lost}/turns/"
    tab.evaluate(f"""{{
        const fetched = window.fetch;
        window.fetch = (path, options) => path.startsWith({gone!r})
            ? Promise.resolve(new Response('{{"error": {{"message": "the turn is gone"}}}}', {{ status: 404 }}))
            : fetched(path, options);
        location.hash = "#/groups/{group}";
    }}""")
    drawn = "document.querySelectorAll('.columns > section .tokens').length"
    tab.until(f"{drawn} === {sum(one['turns'] > 0 for one in members) - 1}")
    text = tab.evaluate("document.querySelector('.columns > section').innerText")
    assert f"Rollout {lost}" in text
    assert "the turn is gone" in text
    check_nothing_is_wrong(tab)


@needs_browser
def test_a_key_is_asked_for_and_kept_out_of_the_address(
    model: Path, tab: browser.Tab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIMERL_API_KEY", "the-key%/1")
    with Orchestrator(settings(model, tmp_path / "run")) as orchestrator:
        orchestrator.start()
        tab.goto(f"{orchestrator.url}/")
        tab.until("!!document.querySelector('#problem input')")
        tab.evaluate("document.querySelector('#problem input').value = 'another'")
        tab.evaluate("document.querySelector('#problem button').click()")
        tab.until("!!document.querySelector('#problem input') && !document.querySelector('#problem input').value")
        assert all("401" in complaint for complaint in tab.complaints), "which the browser tells of"
        tab.goto(f"{orchestrator.url}/#key=the-key%25%2F1")
        tab.until("document.body?.innerText.includes('0 / 2')")
        assert tab.evaluate("location.hash") == "#/"
        # Encoded or not, and with a view behind it.
        shown = "!!document.querySelector('main h1') && document.getElementById('folder').textContent === 'run'"
        for fragment, view in (
            ("the-key%/1", "#/"),
            ("the-key%/1/rollouts?fate=failed", "#/rollouts?fate=failed"),
            ("the-key%25%2F1/groups/3", "#/groups/3"),
        ):
            tab.evaluate("sessionStorage.clear()")
            tab.goto(f"{orchestrator.url}/#key={fragment}")
            tab.until(f"location.hash === {view!r} && {shown}")
            assert tab.evaluate("sessionStorage.getItem('primerl-key')") == "the-key%/1"
        tab.complaints.clear()


@needs_browser
def test_a_failure_is_told_and_what_is_unknown_is_said(run: Run, tab: browser.Tab) -> None:
    failed = rollouts_of(run.url, fate="failed")["rollouts"][0]["rollout"]
    tab.goto(run.page(f"rollouts/{failed}"))
    tab.until(f"document.body?.innerText.includes({'environment: ValueError: ' + HOSTILE!r})")
    check_nothing_is_wrong(tab)
    tab.goto(run.page("rollouts/999999"))
    tab.until("document.body?.innerText.includes('there is no rollout 999999')")
    # The browser itself tells of the 404.
    assert all("404" in complaint for complaint in tab.complaints)
    tab.complaints.clear()


def test_top_shows_the_same(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    for place in (str(run.output), run.url):
        assert main(["top", place, "--once"]) == 0
        text = capsys.readouterr().out
        for word in ("/9 ", "reward", "▁", "where the time goes", "trainer", "engines", "v3"):
            assert word in text, text


def test_the_page_of_files(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = PageServer(run.output, run.model)
    try:
        answer = httpx.get(f"{server.url}/page/rollouts", params={"fate": "trained"}, timeout=60).json()
        assert answer["matching"] >= 12
        told = httpx.get(f"{server.url}/page/rollouts/{answer['rollouts'][0]['rollout']}/turns/0", timeout=60).json()
        assert HOSTILE in told["prompt"]["text"]
        assert httpx.get(f"{server.url}/page/now", timeout=60).json()["is_live"] is False
    finally:
        server.stop()
    with pytest.raises(PrimerlError, match="holds no journal"):
        PageServer(tmp_path)
    assert main(["page", str(tmp_path)]) == 2
    assert "holds no journal" in capsys.readouterr().err
    assert main(["page", str(run.output), "--port", "65536"]) == 2


def test_the_command_serves_until_it_is_interrupted(run: Run) -> None:
    command = [sys.executable, "-m", "primerl", "page", str(run.output)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:\d+/", process.stdout.readline())
        assert found
        assert "<title>primerl</title>" in httpx.get(found[0], timeout=60).text
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout and process.stdout.close()


@pytest.mark.parametrize(
    ("command", "server"),
    [("page", "primerl._core.PageServer"), ("dashboard", "primerl.runs.dashboard.server.Dashboard")],
)
def test_a_stop_that_is_asked_for_while_it_starts_ends_it_in_order(
    command: str, server: str, run: Run, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = []

    class Asked:
        url = "http://127.0.0.1:1"

        def __init__(self, *_: object, **__: object) -> None:
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)

        def stop(self) -> None:
            stopped.append(command)

    monkeypatch.setattr(server, Asked)
    assert main([command, *([str(run.output)] if command == "page" else [])]) == 0
    assert stopped == [command]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()


def test_the_key_is_printed_only_where_no_log_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIMERL_API_KEY", "configured")
    for url, shown in [
        ("http://127.0.0.1:5", "http://127.0.0.1:5/"),
        ("http://[::1]:5", "http://[::1]:5/"),
        ("http://0.0.0.0:5", f"http://{socket.gethostname()}:5/"),
        ("http://[::]:5", f"http://{socket.gethostname()}:5/"),
    ]:
        address = addresses.page(url, tmp_path, is_seen_once=True)
        assert address == f"{shown}#key=... (the value of PRIMERL_API_KEY)"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "key").write_text("made\n")
    kept = addresses.page("http://127.0.0.1:5", tmp_path, is_seen_once=False)
    assert kept == f"http://127.0.0.1:5/#key=... (the content of {tmp_path / 'run' / 'key'})"
    assert addresses.page("http://127.0.0.1:5", tmp_path, is_seen_once=True) == "http://127.0.0.1:5/#key=made"
