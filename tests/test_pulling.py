"""Weights that an engine pulls: an orchestrator in the form of a small server, and what can go wrong on the way."""

from __future__ import annotations

import http.server
import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import write_checkpoint
from primerl.inference import pulling
from primerl.inference.pulling import Pulled, Puller, PullError
from torch import Tensor

KEY = "the-runs-key"


class Orchestrator(http.server.ThreadingHTTPServer):
    """Serves `folder/broadcasts` in parts, with what is asked of it to go wrong."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.broadcasts = folder / "broadcasts"
        self.most = 1 << 10
        self.asked: list[tuple[str, int]] = []
        self.cut = 0
        """Answers that end in the middle, from now on."""
        self.flipped = 0
        """Parts with another byte, from now on."""


class Answers(http.server.BaseHTTPRequestHandler):
    server: Orchestrator

    def do_GET(self) -> None:
        assert self.headers["Authorization"] == f"Bearer {KEY}"
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"])
        assert found is not None
        begin = int(found[1])
        self.server.asked.append((self.path.rpartition("/")[2], begin))
        try:
            content = (self.server.broadcasts / self.path.removeprefix("/weights/")).read_bytes()
        except OSError:
            return self.send_error(404, "there is no such version")
        part = content[begin : min(int(found[2]) + 1, begin + self.server.most)]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {begin}-{begin + len(part) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        if self.server.flipped and self.path.endswith(".safetensors"):
            self.server.flipped -= 1
            part = part[:-1] + bytes([part[-1] ^ 1])
        if self.server.cut and begin:
            self.server.cut -= 1
            part = part[: len(part) // 2]
        self.wfile.write(part)
        return None

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def orchestrator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Orchestrator]:
    monkeypatch.setenv("PRIMERL_API_KEY", KEY)
    monkeypatch.setattr(pulling, "AGAIN_S", 0.0)
    with Orchestrator(tmp_path / "run") as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def tensors(seed: int) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {name: torch.randn(40, 16, generator=made) for name in ("a", "b")}


def publish(orchestrator: Orchestrator, version: int, seed: int) -> Path:
    folder = orchestrator.broadcasts / f"step_{version}"
    write_checkpoint(folder, tensors(seed), version)
    return folder


def puller(orchestrator: Orchestrator, tmp_path: Path) -> Puller:
    host, port = orchestrator.server_address[:2]
    return Puller(Pulled(f"http://{host!s}:{port}", str(tmp_path / "here")))


def same(one: Path, other: Path) -> bool:
    names = sorted(path.name for path in one.iterdir())
    assert sorted(path.name for path in other.iterdir()) == names
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


def test_a_version_comes_in_parts_and_once(orchestrator: Orchestrator, tmp_path: Path) -> None:
    there = publish(orchestrator, 3, seed=1)
    here = puller(orchestrator, tmp_path).folder(there)
    assert here == tmp_path / "here" / "step_3"
    assert same(there, here)
    files = [begin for name, begin in orchestrator.asked if name == "model.safetensors"]
    assert files == list(range(0, (there / "model.safetensors").stat().st_size, orchestrator.most))
    before = len(orchestrator.asked)
    assert puller(orchestrator, tmp_path).folder(there) == here
    # It is asked what the version is now, and nothing else.
    assert {name for name, _ in orchestrator.asked[before:]} == {"manifest.json"}


def test_engines_of_one_machine_pull_a_version_once(orchestrator: Orchestrator, tmp_path: Path) -> None:
    there = publish(orchestrator, 0, seed=1)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: puller(orchestrator, tmp_path).folder(there), range(4)))
    assert len(set(found)) == 1
    parts = [begin for name, begin in orchestrator.asked if name == "model.safetensors"]
    assert len(parts) == len(set(parts))


def test_a_cut_connection_is_resumed_where_it_ended(orchestrator: Orchestrator, tmp_path: Path) -> None:
    there = publish(orchestrator, 3, seed=1)
    orchestrator.cut = 2
    assert same(there, puller(orchestrator, tmp_path).folder(there))


def test_another_process_resumes_what_one_has_begun(
    orchestrator: Orchestrator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = publish(orchestrator, 3, seed=1)
    # The first one may ask four times for the file: the manifest takes others.
    asked = Puller._asked
    left = [4]

    def some(self: Puller, path: str, begin: int) -> Any:
        if path.endswith(".safetensors"):
            left[0] -= 1
            if left[0] < 0:
                raise OSError("the machine is gone")
        return asked(self, path, begin)

    with monkeypatch.context() as patch:
        patch.setattr(Puller, "_asked", some)
        with pytest.raises(PullError, match="cannot be pulled: the machine is gone"):
            puller(orchestrator, tmp_path).folder(there)
    assert not (tmp_path / "here" / "step_3").exists()
    before = len(orchestrator.asked)
    assert same(there, puller(orchestrator, tmp_path).folder(there))
    again = [begin for name, begin in orchestrator.asked[before:] if name == "model.safetensors"]
    assert again[0] == 4 * orchestrator.most


def test_damaged_bytes_are_noticed_and_pulled_again(orchestrator: Orchestrator, tmp_path: Path) -> None:
    there = publish(orchestrator, 3, seed=1)
    orchestrator.flipped = 10**6
    with pytest.raises(PullError, match="what was pulled is damaged"):
        puller(orchestrator, tmp_path).folder(there)
    orchestrator.flipped = 0
    assert same(there, puller(orchestrator, tmp_path).folder(there))


def test_a_version_that_is_published_again_replaces_the_first(orchestrator: Orchestrator, tmp_path: Path) -> None:
    there = publish(orchestrator, 3, seed=1)
    puller(orchestrator, tmp_path).folder(there)
    publish(orchestrator, 3, seed=2)
    assert same(there, puller(orchestrator, tmp_path).folder(there))


def test_the_two_newest_versions_are_kept(orchestrator: Orchestrator, tmp_path: Path) -> None:
    for version in (1, 2, 10, 11):
        puller(orchestrator, tmp_path).folder(publish(orchestrator, version, seed=version))
    assert sorted(path.name for path in (tmp_path / "here").iterdir()) == [".lock", "step_10", "step_11"]
    # A run that went back to an earlier checkpoint publishes lower numbers.
    puller(orchestrator, tmp_path).folder(publish(orchestrator, 5, seed=5))
    assert (tmp_path / "here" / "step_5").is_dir()


def test_what_cannot_be_pulled_is_named(orchestrator: Orchestrator, tmp_path: Path) -> None:
    one = puller(orchestrator, tmp_path)
    with pytest.raises(PullError, match=r"/weights/step_9/manifest.json is refused with status 404"):
        one.folder("/run/broadcasts/step_9")
    with pytest.raises(PullError, match="is no folder of a version"):
        one.folder("/run/broadcasts/latest")
    there = publish(orchestrator, 1, seed=1)
    contents = json.loads((there / "manifest.json").read_text())
    contents["files"][0]["name"] = "../../out"
    (there / "manifest.json").write_text(json.dumps(contents))
    with pytest.raises(PullError, match="which is not a plain name"):
        one.folder(there)
    (there / "manifest.json").write_text("{}")
    with pytest.raises(PullError, match="is no manifest of weights"):
        one.folder(there)
    orchestrator.shutdown()
    orchestrator.server_close()
    with pytest.raises(PullError, match="cannot be pulled"):
        one.folder(there)


def test_the_key_of_a_server_in_an_environment_of_its_own() -> None:
    settings = Pulled("http://o:1", "/here")
    assert "key" not in repr(Pulled("http://o:1", "/here", "secret"))
    assert pulling.as_variables(None) == {}
    assert pulling.from_variables({}) is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PRIMERL_API_KEY", KEY)
        variables = pulling.as_variables(settings)
    found = pulling.from_variables(variables)
    assert found is not None
    assert found._key == KEY
