"""Placement: what is asked for a process, who gets which GPU, and placements that other packages bring."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import forks
import outside
import placements
import pytest
import recorded_gpus
import tomli_w
from end_to_end import start, until
from primerl import run_key
from primerl.config.command_line.load import ConfigError
from primerl.config.process_files import resolve
from primerl.config.schema.deployment import Deployment
from primerl.launch import cluster, configs
from primerl.launch.placement import commands, gpus, registry
from primerl.launch.placement.gpus import Gpu
from primerl.launch.placement.local import LocalPlacement
from primerl.launch.placement.protocol import Command, Listener, PlacementError, Resources, Role, machines
from run_helpers import config_of, write_run
from sft_helpers import metrics, settings, write_rows


def numbered(names: list[str]) -> list[Gpu]:
    return [Gpu(name) for name in names]


def roles_of(ranks: int, *engines: int) -> list[Role]:
    asked = [Role("trainer", "trainer", Resources(gpus=ranks), ranks)]
    asked += [Role(f"inference_{index}", "inference", Resources(gpus=many)) for index, many in enumerate(engines)]
    return [*asked, Role("env_a_0", "env-worker")]


@pytest.mark.parametrize(
    ("found", "roles", "gpus_of"),
    [
        ([], roles_of(2, 1), [(), (), ()]),
        (["0"], roles_of(1, 1), [("0",), ("0",), ()]),
        (["0", "1", "2", "3"], roles_of(1, 2), [("0",), ("2", "3"), ()]),
        (["0", "1", "2"], roles_of(1, 2), [("0",), ("1", "2"), ()]),
        (["0", "1", "2", "3"], roles_of(1, 1, 1), [("0",), ("1",), ("2",), ()]),
        (["4", "GPU-5", "6", "7"], roles_of(2, 2), [("4", "GPU-5"), ("6", "7"), ()]),
    ],
)
def test_each_role_has_gpus_of_its_own(found: list[str], roles: list[Role], gpus_of: list[tuple[str, ...]]) -> None:
    plan = LocalPlacement(find_gpus=lambda: numbered(found)).plan(roles)
    assert [place.gpus for place in plan.places] == gpus_of


def test_one_gpu_is_shared_and_the_plan_says_so() -> None:
    plan = LocalPlacement(find_gpus=lambda: numbered(["3"])).plan(roles_of(1, 1))
    assert plan.table().splitlines() == [
        "  trainer      this machine  1 GPU, 1 CPU  GPU 3; shared",
        "  inference_0  this machine  1 GPU, 1 CPU  GPU 3; shared",
        "  env_a_0      this machine  1 CPU",
    ]


@pytest.mark.parametrize(("found", "roles"), [(["0"], roles_of(2)), (["0", "1"], roles_of(1, 1, 1))])
def test_more_gpus_than_there_are_is_refused_with_the_plan(found: list[str], roles: list[Role]) -> None:
    with pytest.raises(PlacementError) as refused:
        LocalPlacement(find_gpus=lambda: numbered(found)).plan(roles)
    first, *plan = str(refused.value).splitlines()
    asked = sum(role.resources.gpus for role in roles)
    assert first.startswith(f"deployment: {asked} GPUs are asked for, and this machine has {len(found)}")
    assert [line.split()[0] for line in plan] == [role.name for role in roles]
    assert any(line.endswith("not enough GPUs are left") for line in plan)


@pytest.mark.parametrize(
    ("visible", "names"),
    [(None, ["0", "1"]), ("", []), ("-1", []), ("2", ["2"]), ("GPU-a, 1", ["GPU-a", "1"]), ("0,-1,1", ["0"])],
)
def test_gpus_are_found_as_cuda_sees_them(
    visible: str | None, names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    for bus in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / bus).mkdir()
    assert gpus.found({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}, tmp_path) == names
    assert gpus.found({}, tmp_path / "absent") == []


@pytest.mark.parametrize(
    ("machine", "names"),
    [
        ("8xH100", ["0", "1", "2", "3", "4", "5", "6", "7"]),
        ("old driver", ["0"]),
        ("MIG", ["MIG-0000-0000", "MIG-0000-0001", "MIG-0000-0002"]),
        ("MIG and whole", ["MIG-0000-0000", "MIG-0000-0001", "GPU-00000001-aaaa"]),
        ("MIG without parts", []),
        ("none", []),
        ("no driver", []),
    ],
)
def test_machines_as_nvml_describes_them(
    machine: str, names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded_gpus.use(machine, monkeypatch)
    found = gpus.machine(tmp_path / "absent")
    assert [one.name for one in found] == names
    for one in found:
        part = one.uuid.startswith("MIG")
        assert (one.is_part, one.memory) == (part, recorded_gpus.PART_BYTES if part else recorded_gpus.H100_BYTES)
    assert [one.numa for one in found] == (
        [0] * 4 + [1] * 4 if machine == "8xH100" else [None if machine == "old driver" else 0] * len(names)
    )


def test_what_is_visible_is_known_by_number_and_by_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded_gpus.use("8xH100", monkeypatch)
    found = gpus.visible({"CUDA_VISIBLE_DEVICES": "5,GPU-00000002,GPU-unknown"})
    assert [(one.name, one.numa, one.memory is None) for one in found] == [
        ("5", 1, False),
        ("GPU-00000002", 0, False),
        ("GPU-unknown", None, True),
    ]


def test_tensor_parallel_engines_are_beside_one_numa_node(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded_gpus.use("8xH100", monkeypatch)
    plan = LocalPlacement().plan(roles_of(3, 2, 2))
    assert [place.gpus for place in plan.places] == [("0", "1", "2"), ("4", "5"), ("6", "7"), ()]
    # What is left counts before where it is.
    plan = LocalPlacement().plan(roles_of(3, 4, 1))
    assert [place.gpus for place in plan.places] == [("0", "1", "2"), ("4", "5", "6", "7"), ("3",), ()]


def test_a_run_asks_for_what_its_config_says() -> None:
    workers = {"num_workers": 2, "cpus": 3, "memory_mb": 2048}
    given = {
        "trainer": {"ranks": 2, "threads": 4},
        "inference": {"replicas": 2, "device": "cuda"},
        "orchestrator": {
            "batch_size": 8,
            "group_size": 4,
            "sampling": {"max_tokens": 16},
            "train": {"env": [{"id": "a", **workers}]},
            "port": 8123,
        },
    }
    found = {role.name: role for role in map(commands.role_of, configs.processes(config_of(**given)))}
    assert list(found) == ["trainer", "orchestrator", "inference_0", "inference_1", "env_a_0", "env_a_1"]
    assert (found["trainer"].ranks, found["trainer"].resources) == (2, Resources(gpus=2, cpus=8))
    assert found["inference_1"].resources == Resources(gpus=1)
    assert found["env_a_1"].resources == Resources(cpus=3, memory_mb=2048)
    assert found["orchestrator"].listens == (Listener("orchestrator", "127.0.0.1", 8123),)


@pytest.mark.parametrize(
    ("engine", "asked"),
    [
        ({"device": "cpu"}, 0),
        ({"device": "cuda:1"}, 0),
        ({"device": "auto"}, 1),
        ({"backend": "vllm", "vllm": {"tensor-parallel-size": 2, "pipeline-parallel-size": 2}}, 4),
    ],
)
def test_gpus_of_an_engine(engine: dict[str, Any], asked: int) -> None:
    [process] = resolve.inference(config_of(inference={"max_model_len": 128, **engine}), "http://o:1")
    assert commands.role_of(process).resources.gpus == asked


def test_a_command_names_the_variables_that_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("OF_THE_LAUNCHER", "x")
    command = commands.command_of(resolve.trainer(config_of(), "http://o:1"))
    assert command.environment["OF_THE_LAUNCHER"] == "x"
    assert {"OMP_NUM_THREADS", "PYTHONUNBUFFERED"} <= command.own
    assert "OF_THE_LAUNCHER" not in command.own


@pytest.mark.processes
def test_a_role_is_started_with_its_gpus_and_hears_signals(tmp_path: Path) -> None:
    says = "import os, signal; print(os.environ['CUDA_VISIBLE_DEVICES'], flush=True); signal.pause()"
    placement = LocalPlacement(find_gpus=lambda: numbered(["0", "1", "2"]))
    role = roles_of(1, 2)[1]
    with pytest.raises(RuntimeError, match="before the placement is entered"):
        placement.start(role, Command([sys.executable], {}, tmp_path / "log"))
    placement.plan(roles_of(1, 2))
    with placement:
        process = placement.start(role, Command([sys.executable, "-c", says], os.environ, tmp_path / "log"))
        log = placement.logs(role.name)
        until(lambda: placement.watch(0.05) == [] and log.is_file() and log.read_text() == "1,2\n", 30, "its output")
        placement.signal(role.name, signal.SIGUSR1)
        until(lambda: process in placement.watch(0.1), 30, "its end")
        assert process.code == -signal.SIGUSR1
        placement.signal(role.name, signal.SIGUSR1)
        assert placement.by_name == {role.name: process}


def test_a_placement_is_found_by_its_name_or_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = str(tmp_path / "record")
    assert isinstance(registry.chosen(Deployment()), LocalPlacement)
    by_path = registry.chosen(Deployment(type="placements:Plain", args={"record": record}))
    assert isinstance(by_path, placements.Plain)
    source = "class Full:\n    def __init__(self):\n        raise RuntimeError('no room')\n\ndef empty():\n    pass\n"
    points = "plain = placements:Plain\nbad = acme_bad:Any\nfull = acme_places:Full\nempty = acme_places:empty\n"
    outside.use(monkeypatch, outside.install(tmp_path, "acme_places", source, {registry.GROUP: points}))
    (tmp_path / "acme_bad.py").write_text("raise RuntimeError('half installed')\n")
    assert isinstance(registry.chosen(Deployment(type="plain", args={"record": record})), placements.Plain)
    for given, said in [
        (
            Deployment(type="flurm"),
            "deployment.type: there is no placement 'flurm'; there are 'local', 'slurm', 'ray', 'bad', 'empty', ",
        ),
        (Deployment(type="bad"), "deployment.type: 'bad', the entry point acme_bad:Any of primerl.placements, cannot "),
        (Deployment(type="full"), "deployment: 'full' cannot be made: RuntimeError: no room"),
        (Deployment(type="empty"), "deployment.type: 'empty' has no plan, start, watch, stop"),
        (Deployment(type="no_such_module:Plain"), "deployment.type: 'no_such_module:Plain' cannot be imported"),
        (Deployment(type="placements:TICK_S"), "deployment.type: 'placements:TICK_S' names no class or function"),
        (Deployment(type="plain"), "deployment.args: 'plain' does not take these args: missing"),
    ]:
        with pytest.raises(ConfigError) as refused:
            registry.chosen(given)
        assert str(refused.value).startswith(said)


def test_nodes_are_for_the_placement_that_takes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = {"record": str(tmp_path / "record")}

    def deployment(**more: Any) -> Deployment:
        return config_of(deployment={"args": args, **more}).deployment

    two = registry.chosen(deployment(type="placements:TwoNodes", num_infer_nodes=1, gpus_per_node=8))
    assert isinstance(two, placements.TwoNodes)
    assert two.nodes == ["node_0", "node_1"]
    for name in ("num_train_nodes", "num_infer_nodes"):
        said = rf"^deployment.{name} is 2, and the placement 'placements:Plain' takes no {name}; omit it$"
        with pytest.raises(ConfigError, match=said):
            registry.chosen(deployment(type="placements:Plain", **{name: 2}))
    # One of primerl, too.
    with monkeypatch.context() as patched:
        patched.setitem(registry.PATHS, "plain", "placements:Plain")
        patched.setitem(registry.BUILT_IN, "plain", registry.BuiltIn("placements:Plain"))
        with pytest.raises(ConfigError, match="the placement 'plain' takes no num_train_nodes"):
            registry.chosen(deployment(type="plain", num_train_nodes=2))
    # One that takes them as arguments of its own has them there.
    own = {**args, "num_train_nodes": 1, "num_infer_nodes": 0}
    assert registry.chosen(deployment(type="placements:TwoNodes", num_infer_nodes=1, args=own)).nodes == ["node_0"]
    # A file with `[slurm]` is one for `primerl.Run` as well, which starts all on this machine.
    assert isinstance(registry.chosen(Deployment(num_train_nodes=2)), LocalPlacement)


def test_what_a_placement_does_not_say_is_as_on_one_machine(tmp_path: Path) -> None:
    plain = placements.Plain(str(tmp_path / "record"))
    config = config_of()
    assert cluster.placed(config, plain) is config
    cluster.prepare(plain, tmp_path, print, lambda: None)
    assert machines(plain).own_address() == "127.0.0.1"


def test_other_nodes_reach_what_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(run_key.VARIABLE, raising=False)
    monkeypatch.setattr(run_key, "made", lambda folder: f"of {folder.name}")
    config = config_of(output_dir=str(tmp_path / "out"))
    two = placements.TwoNodes(str(tmp_path / "record"), num_train_nodes=1, num_infer_nodes=1)
    found = cluster.placed(config, two)
    assert (found.orchestrator.host, found.inference.host) == ("localhost", "0.0.0.0")
    assert os.environ[run_key.VARIABLE] == "of out"
    # The stored config has the hosts that were given.
    assert "host" not in found.orchestrator.model_fields_set | found.inference.model_fields_set
    one = placements.TwoNodes(str(tmp_path / "record"), num_train_nodes=1, num_infer_nodes=0)
    assert cluster.placed(config, one) is config


@pytest.mark.processes
def test_a_fine_tuning_on_a_placement_of_another_package(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", {"prompt": "a", "completion": "b"})
    record = tmp_path / "record.jsonl"
    deployment = {"type": "placements:Plain", "args": {"record": str(record)}}
    file = tmp_path / "sft.toml"
    file.write_text(tomli_w.dumps(settings(tmp_path, max_steps=2, deployment=deployment)))
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "primerl", "sft", "@", str(file)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2]
    noted = [json.loads(line) for line in record.read_text().splitlines()]
    assert [entry["start"] for entry in noted if "start" in entry] == ["sft"]


@pytest.mark.processes
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_run_on_a_placement_of_another_package(nodes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    record = tmp_path / "record.jsonl"
    given = ["@", str(write_run(tmp_path)), "--deployment.type", "placements:Plain"]
    if nodes == 2:
        given[-1:] = ["placements:TwoNodes", "--deployment.num-infer-nodes", "1"]
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    with forks.own_servers():
        run = start(
            tmp_path / "outputs" / "small",
            *given,
            "--deployment.args",
            json.dumps({"record": str(record)}),
            variables={"PYTHONPATH": path},
        )
    try:
        code, output = run.ended(240)
    finally:
        run.kill()
    assert code == 0, output
    assert run.steps() == 2
    noted = [json.loads(line) for line in record.read_text().splitlines()]
    names = ["trainer", "orchestrator", "inference", "env_reverse-text_0"]
    assert {role[0] for entry in noted for role in entry.get("plan", [])} == set(names)
    assert sorted(entry["start"] for entry in noted if "start" in entry) == sorted(names)
    assert noted[-1] == {"stop": []}
    if nodes == 2:
        assert noted[0] == {"nodes": [1, 1]}
        assert {"listens": ["localhost", "0.0.0.0"]} in noted
        assert "two nodes are reserved for small" in output
