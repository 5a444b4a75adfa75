"""Env workers in a tailnet: what is checked before the start, and how the node of a worker lives and ends. Tailscale's
own programs are stood in for: what they do in a real tailnet is not shown here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from end_to_end import start, until
from env_orchestrator import Chat, Orchestrator, completion
from primerl.cli import main
from primerl.config.errors.fail import ConfigError
from primerl.config.process_files import resolve, run_file
from primerl.config.schema.env_worker import EnvWorkerConfig
from primerl.config.schema.rl import RLConfig
from primerl.config.schema.services import Tailscale, node_name
from primerl.envs import tailnet as node
from primerl.launch import configs, secrets, tailnet
from primerl.launch.placement.protocol import Process
from primerl.process import redaction
from run_helpers import CONFIG, write_run
from settings_helpers import worker_json
from tailnet_programs import KEY, Programs
from test_env_worker import MAIN

ENVIRONMENTS = Path(__file__).parent / "environments"
START_S = 180.0
ENV = "reverse-text"
JOIN = """
import sys, time
from primerl.envs import tailnet
from primerl.envs.tailnet import TailnetConfig, TailnetError, join
# A daemon that is told to end has time to note it, also where the machine is slow.
tailnet.STOP_S = 3.0 if sys.argv[3:] == ["leave"] else 60.0
try:
    node = join(TailnetConfig("lab-env-0-abc", sys.argv[1], float(sys.argv[2])))
except TailnetError as error:
    sys.exit(f"error: {error}")
print("joined", flush=True)
if sys.argv[3:] == ["leave"]:
    node.leave()
else:
    time.sleep(600)
"""
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc and PR_SET_PDEATHSIG")


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIMERL_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr(redaction, "_known", set())
    for name in ("TAILSCALE_AUTH_KEY", *node.PROXY_VARIABLES, "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    return Programs(tmp_path / "programs")


def config_of(**tailscale: Any) -> RLConfig:
    return RLConfig.model_validate(tomllib.loads(CONFIG) | {"tailscale": {"enabled": True, **tailscale}})


def is_gone(pid: int) -> bool:
    """Ended; a zombie that init has yet to reap counts."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


# Before the start


def test_programs_that_are_missing_are_named(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "MORE_FOLDERS", ())
    monkeypatch.setenv("PATH", "/no/such/folder")
    tailnet.check_programs(RLConfig.model_validate(tomllib.loads(CONFIG)))
    with pytest.raises(ConfigError, match=r"tailscaled and tailscale cannot be found .* install Tailscale"):
        tailnet.check_programs(config_of())
    monkeypatch.setenv("PATH", str(programs.folder))
    tailnet.check_programs(config_of())
    (programs.folder / "tailscale").unlink()
    with pytest.raises(ConfigError, match="is set, and tailscale cannot be found"):
        tailnet.check_programs(config_of())


def test_the_key_of_the_environment_goes_before_secrets_and_those_before_the_config(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def key(variables: dict[str, str], **tailscale: Any) -> str:
        return tailnet.with_key(config_of(**tailscale), {ENV: variables})[ENV]["TAILSCALE_AUTH_KEY"]

    of_config, of_secrets, of_environment = (f"tskey-auth-{name}" for name in ("config", "secrets", "environment"))
    assert key({}, auth_key=of_config) == of_config
    assert key({"TAILSCALE_AUTH_KEY": of_secrets}, auth_key=of_config) == of_secrets
    monkeypatch.setenv("TAILSCALE_AUTH_KEY", of_environment)
    assert key({"TAILSCALE_AUTH_KEY": of_secrets}, auth_key=of_config) == of_environment
    assert redaction.redact(f"{of_config} {of_secrets} {of_environment}") == "<secret> <secret> <secret>"
    assert tailnet.with_key(config_of(enabled=False), {ENV: {}}) == {ENV: {}}
    elsewhere = config_of()
    elsewhere.orchestrator.train.env[0].num_workers = 0
    assert tailnet.with_key(elsewhere, {ENV: {}}) == {ENV: {}}
    # Others that join have networks of their own, and are not asked for it.
    assert secrets.names_of_variables({"e": {"TAILSCALE_AUTH_KEY": "k", "A": "b"}}) == {"e": ["A"]}


@pytest.mark.parametrize(
    ("variable", "stored", "complaint"),
    [
        (None, None, "tailscale.enabled is set, and there is no key for 'reverse-text'; make a reusable auth key"),
        ("tskey-api-SECRET", None, "but TAILSCALE_AUTH_KEY of the environment does not begin with 'tskey-auth-'"),
        (None, "SECRET", "TAILSCALE_AUTH_KEY of env_files or the stored secrets does not begin with 'tskey-auth-'"),
    ],
)
def test_a_key_that_cannot_be_used_is_refused_and_not_shown(
    variable: str | None, stored: str | None, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable is not None:
        monkeypatch.setenv("TAILSCALE_AUTH_KEY", variable)
    with pytest.raises(ConfigError) as caught:
        tailnet.with_key(config_of(), {ENV: {"TAILSCALE_AUTH_KEY": stored} if stored else {}})
    assert complaint in str(caught.value)
    assert "SECRET" not in str(caught.value)


@pytest.mark.processes
def test_a_dry_run_says_what_is_missing_and_exits_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(node, "MORE_FOLDERS", ())
    monkeypatch.setenv("PATH", "/no/such/folder")
    (tmp_path / "rl.toml").write_text(CONFIG)
    assert main(["rl", "@", "rl.toml", "--tailscale.enabled", "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert "tailscaled and tailscale cannot be found" in said
    assert "there is no key for 'reverse-text'" in said
    assert not Path("outputs").exists()


def test_no_name_is_longer_than_dns_has_room_for() -> None:
    assert node_name("lab", 3, "0a1b2c3d") == "lab-env-3-0a1b2c3d"
    assert node_name("lab", 0, "My Run_7 (second try, of many)") == "lab-env-0-my-run-7-second"
    assert node_name("lab", 0, "--") == "lab-env-0-run"
    assert len(node_name(Tailscale(hostname_prefix="a" * 30).hostname_prefix, 10**9, "x" * 200)) <= 63


def test_each_worker_of_the_run_has_a_name_and_no_file_has_the_key(tmp_path: Path) -> None:
    config = config_of(hostname_prefix="lab", auth_key=KEY, login_s=7).model_copy(update={"output_dir": str(tmp_path)})
    entries = config.orchestrator.train.env
    entries.append(entries[0].model_copy(update={"name": "other", "num_workers": 2}))
    variables = tailnet.with_key(config, secrets.of_workers(config))
    workers = [
        process
        for process in configs.write(config, "http://o:1", variables, "0a1b2c3d")
        if isinstance(process.config, EnvWorkerConfig)
    ]
    told = [process.config.tailnet for process in workers if isinstance(process.config, EnvWorkerConfig)]
    assert [one and one.name for one in told] == [f"lab-env-{index}-0a1b2c3d" for index in range(3)]
    assert told[2] is not None
    assert (told[2].log, told[2].login_s) == (str(tmp_path / "logs/envs/train/other/tailscaled_1.log"), 7)
    assert {process.variables["TAILSCALE_AUTH_KEY"] for process in workers} == {KEY}
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) > 5
    assert not [path for path in written if KEY in path.read_text()]
    # What is written down is the same run, but for the key.
    again = RLConfig.model_validate(tomllib.loads(run_file.path(config).read_text()))
    assert again.tailscale == config.tailscale.model_copy(update={"auth_key": None})


def test_only_a_worker_that_was_a_node_has_lost_one(tmp_path: Path) -> None:
    def why(code: int, **tailscale: Any) -> str | None:
        [worker] = resolve.env_workers(config_of(**tailscale), "http://o:1")
        return tailnet.lost(worker, Process("env_reverse-text_0", tmp_path / "log", code=code))

    assert why(node.NODE_LOST) == "its node in the tailnet was lost"
    (tmp_path / "log").write_text("  | said by the daemon\nerror: node n has left the tailnet\n")
    assert why(node.NODE_LOST) == "node n has left the tailnet"
    assert why(node.NODE_LOST, enabled=False) is None
    assert why(1) is why(-9) is None


# A node


class Joining:
    """A process that joins as an env worker does, before it loads anything."""

    def __init__(self, programs: Programs, folder: Path, *arguments: str, login_s: float = 60.0, **more: str) -> None:
        self.log = folder / "logs" / "tailscaled_0.log"
        self.process = subprocess.Popen(
            [sys.executable, "-c", JOIN, str(self.log), str(login_s), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=programs.variables(**more),
        )

    def ended(self) -> tuple[int, str]:
        _, said = self.process.communicate(timeout=60)
        return self.process.returncode, said


@pytest.fixture
def ends(programs: Programs) -> Iterator[list[Joining]]:
    """Whatever is left of them, or of their daemons, at the end is killed."""
    started: list[Joining] = []
    yield started
    for joining in started:
        if joining.process.poll() is None:
            joining.process.kill()
        joining.process.communicate()
    for entry in programs.noted("started"):
        if not is_gone(entry["pid"]):
            os.kill(entry["pid"], signal.SIGKILL)


@pytest.mark.processes
@linux
def test_a_node_joins_and_leaves_nothing_behind(programs: Programs, tmp_path: Path, ends: list[Joining]) -> None:
    # Longer than a socket's path may be; and what a daemon must not be misled by, or see.
    deep = tmp_path / ("a" * 90)
    deep.mkdir()
    ends.append(Joining(programs, tmp_path, "leave", TMPDIR=str(deep), PORT="1", JUDGE_KEY="s", HTTPS_PROXY="http://p"))
    assert ends[0].ended() == (0, "")
    [daemon] = programs.noted("started")
    assert not {"JUDGE_KEY", "TAILSCALE_AUTH_KEY", "PORT"} & set(daemon["variables"])
    assert "HTTPS_PROXY" in daemon["variables"]
    [joined] = programs.noted("joined")
    assert joined["hostname"] == "lab-env-0-abc"
    assert [entry["pid"] for entry in programs.noted("left")] == [daemon["pid"]]
    assert is_gone(daemon["pid"])
    assert not Path(daemon["folder"]).exists()
    assert ends[0].log.read_text() == "tailscaled is up\n"


@pytest.mark.processes
@linux
def test_a_refused_key_a_dead_daemon_and_a_login_that_never_ends_are_told(
    programs: Programs, tmp_path: Path, ends: list[Joining]
) -> None:
    (programs.folder / "key").write_text("another")
    ends.append(Joining(programs, tmp_path))
    code, refused = ends[-1].ended()
    assert code == 1
    assert "error: node lab-env-0-abc could not join the tailnet: `tailscale up` exited with code 1 (backend error" in (
        refused
    )
    assert "reusable" in refused
    assert "<secret>" in ends[-1].log.read_text()
    programs.set("pending")
    ends.append(Joining(programs, tmp_path, login_s=2.0))
    code, late = ends[-1].ended()
    assert (code, "did not join the tailnet within tailscale.login_s = 2 s" in late) == (1, True)
    assert "pre-approved" in late
    programs.set("crash")
    ends.append(Joining(programs, tmp_path))
    code, crashed = ends[-1].ended()
    assert (code, "cannot join the tailnet: tailscaled exited with code 1" in crashed) == (1, True)
    assert "no such host" in ends[-1].log.read_text()
    assert KEY not in refused + late + crashed + ends[-1].log.read_text()
    for daemon in programs.noted("started"):
        assert is_gone(daemon["pid"])
        assert not Path(daemon["folder"]).exists()


@pytest.mark.processes
@linux
def test_whoever_is_told_to_stop_or_killed_takes_its_daemon_along(
    programs: Programs, tmp_path: Path, ends: list[Joining]
) -> None:
    def daemons(what: str, count: int) -> list[int]:
        return until(lambda: len(found := programs.noted(what)) == count and [one["pid"] for one in found], 60, what)

    ends.append(Joining(programs, tmp_path))
    [killed] = daemons("joined", 1)
    assert ends[-1].process.stdout is not None
    assert ends[-1].process.stdout.readline() == "joined\n"
    ends[-1].process.kill()
    assert daemons("left", 1) == [killed]
    # In the middle of the login.
    programs.set("pending")
    ends.append(Joining(programs, tmp_path))
    [_, told] = daemons("asked", 2)
    ends[-1].process.terminate()
    assert ends[-1].ended() == (0, "")
    assert daemons("left", 2) == [killed, told]
    assert not Path(programs.noted("started")[1]["folder"]).exists()
    # A daemon that does not heed it.
    (programs.folder / "pending").unlink()
    programs.set("stubborn")
    ends.append(Joining(programs, tmp_path, "leave"))
    assert ends[-1].ended() == (0, "")
    assert len(programs.noted("ignored")) == 1
    assert is_gone(programs.noted("started")[2]["pid"])


def test_what_the_worker_and_its_children_get() -> None:
    variables = node.proxy_variables(1055, "http://[fd00::7]:9")
    assert variables["http_proxy"] == variables["HTTPS_PROXY"] == variables["all_proxy"] == "http://127.0.0.1:1055"
    assert variables["no_proxy"] == variables["NO_PROXY"] == "127.0.0.1,localhost,::1,fd00::7"
    assert variables[node.SOCKS_VARIABLE] == "socks5h://127.0.0.1:1055"


# A worker


class Private(BaseHTTPRequestHandler):
    """The service that only the tailnet reaches."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1")
        self.end_headers()
        self.wfile.write(b"4")

    def log_request(self, code: object = "-", size: object = "-") -> None:
        pass


async def answer(chat: Chat) -> web.Response:
    return completion("spoken")


@pytest.mark.processes
@linux
def test_a_worker_reaches_private_services_and_ends_with_its_node(programs: Programs, tmp_path: Path) -> None:
    service = ThreadingHTTPServer(("127.0.0.1", 0), Private)
    threading.Thread(target=service.serve_forever, daemon=True).start()
    (programs.folder / "hosts.json").write_text(json.dumps({"private.internal:80": service.server_port}))
    log = tmp_path / "worker.log"
    with Orchestrator() as orchestrator, log.open("w") as output:
        orchestrator.reply = answer
        rollout = orchestrator.add()
        config = {
            "orchestrator_url": orchestrator.url,
            "environment": "private",
            "id": "private-env",
            "args": {"taskset": {"gateway": orchestrator.url}},
            "tailnet": {"name": "lab-env-0-abc", "log": str(tmp_path / "tailscaled_0.log")},
        }
        path = os.pathsep.join([str(ENVIRONMENTS), *sys.path])
        command = [sys.executable, "-c", MAIN, worker_json(config)]
        # The user's own proxy is not there; neither the worker nor what it starts may ask it.
        dead = {"HTTP_PROXY": "http://127.0.0.1:9", "NO_PROXY": ".internal", "PYTHONPATH": path}
        worker = subprocess.Popen(command, stdout=output, stderr=output, env=programs.variables(**dead))
        try:
            result = orchestrator.result(rollout, START_S)
            assert result["error"] is None, result
            assert result["traces"][0]["reward"] == 4.0
            [daemon] = programs.noted("joined")
            proxied = [(entry["host"], entry["how"]) for entry in programs.noted("proxied")]
            assert proxied == [("private.internal", how) for how in ("http", "http", "http", "socks5")]
            assert KEY not in Path(f"/proc/{worker.pid}/cmdline").read_text()
            os.kill(daemon["pid"], signal.SIGKILL)
            assert worker.wait(60) == node.NODE_LOST
        finally:
            worker.kill()
            worker.wait()
            service.shutdown()
            service.server_close()
    lost = "error: node lab-env-0-abc has left the tailnet: tailscaled was killed by signal 9; its log is "
    assert log.read_text().splitlines()[-1].startswith(lost)
    assert KEY not in log.read_text() + (tmp_path / "tailscaled_0.log").read_text()


# A run


@linux
@pytest.mark.end_to_end
def test_a_run_starts_a_worker_again_that_lost_its_node_and_leaves_no_daemon(
    programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    output = tmp_path / "outputs" / "small"
    given = ["--max-steps", "100000", "--tailscale.enabled", "--tailscale.hostname-prefix", "lab"]
    run = start(output, "@", str(write_run(tmp_path)), *given, variables=programs.variables())

    def joined(count: int) -> dict[str, Any]:
        return until(lambda: len(found := programs.noted("joined")) >= count and found[-1], 180, f"node {count}")

    try:
        first = joined(1)
        run.note_mark()
        until(lambda: run.steps() >= 1, 120, "the first step")
        os.kill(first["pid"], signal.SIGKILL)
        second = joined(2)
        assert first["hostname"] == second["hostname"]
        assert second["hostname"].startswith("lab-env-0-")
        steps = run.steps()
        until(lambda: run.steps() > steps + 1, 120, "a step with the new node")
        os.kill(run.launcher.pid, signal.SIGKILL)
        _, said = run.ended(60)
        assert f"env_reverse-text_0 exited with code 3 (node {first['hostname']} has left the tailnet" in said
        assert "); it is started again" in said
        until(lambda: is_gone(second["pid"]), 60, "the end of the daemon")
    finally:
        run.kill()
    written = [path for path in output.rglob("*") if path.is_file()]
    assert output / "logs/envs/train/reverse-text/tailscaled_0.log" in written
    assert not [path for path in written if KEY.encode() in path.read_bytes()]
