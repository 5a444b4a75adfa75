"""What of a run on Ray needs no Ray: the plan, what is refused, how roles end, the manifests of the page."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml
from primerl.config.schema.deployment import Deployment, Ray
from primerl.launch.placement import registry
from primerl.launch.placement.protocol import PlacementError, Process, Resources, Role
from primerl.launch.placement.ray import agent, driver, keeper, planning, reserving
from primerl.launch.placement.ray.planning import Node, Shape
from primerl.launch.placement.ray.roles import Part, Started
from primerl.process import extras
from pydantic import ValidationError
from run_helpers import config_of

ORCHESTRATOR = Role("orchestrator", "orchestrator")
WORKER = Role("env_a_0", "env-worker")


def node(name: str, cpus: float = 8, gpus: float = 0) -> Node:
    return Node(name, f"host-{name}", f"10.0.0.{name}", cpus, gpus)


def trainer(ranks: int) -> Role:
    return Role("trainer", "trainer", Resources(ranks, ranks), ranks)


def engine(number: int = 0, gpus: int = 1) -> Role:
    return Role(f"inference_{number}", "inference", Resources(gpus, 1))


def placed(
    *roles: Role, total: list[Node], free: list[Node] | None = None, shape: Shape | None = None
) -> planning.Placed:
    return planning.placed(roles, total, free or total, total[0].id, shape or Shape(), "auto")


def test_gpus_of_a_node_go_to_one_role_each_and_engines_fill_nodes() -> None:
    nodes = [node("1", 16, 0), node("2", 16, 4), node("3", 16, 4)]
    found = placed(ORCHESTRATOR, trainer(4), engine(0, 2), engine(1, 1), WORKER, total=nodes)
    assert {name: (slot.nodes, slot.gpus) for name, slot in found.slots.items()} == {
        "trainer": (("2",), ((0, 1, 2, 3),)),
        "inference_0": (("3",), ((0, 1),)),
        "inference_1": (("3",), ((2,),)),
        "env_a_0": (("1",), ()),
    }
    assert found.bundles == {"2": (4, 4), "3": (2, 3), "1": (1, 0)}
    assert [place.host for place in found.plan.places] == ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.3", "10.0.0.1"]


def test_nodes_of_the_trainer_and_of_engines_are_kept_apart_where_asked() -> None:
    nodes = [node("1"), node("2"), node("3")]
    found = placed(trainer(2), engine(0), engine(1), total=nodes, shape=Shape(2, 1))
    assert found.slots["trainer"].nodes == ("1", "2")
    assert {found.slots[f"inference_{number}"].nodes for number in (0, 1)} == {("3",)}
    assert not found.slots["trainer"].gpus  # no node has one: everything computes on CPUs


def test_what_others_use_is_waited_for_and_what_is_not_there_is_refused() -> None:
    total, free = [node("1", 8, 2)], [node("1", 8, 1)]
    found = placed(trainer(2), total=total, free=free)
    assert "waits for what others use" in found.plan.table()
    with pytest.raises(PlacementError, match=r"trainer needs a node with 4 GPUs, 4 CPUs; the cluster has 1 node \(10"):
        placed(trainer(4), total=total)
    with pytest.raises(PlacementError, match=r"3 nodes are asked for .* and the Ray cluster has 1 \(10.0.0.1\)"):
        placed(trainer(2), total=total, shape=Shape(2, 1))
    with pytest.raises(PlacementError, match=r"trainer.ranks \(3\) is no multiple of deployment.num_train_nodes \(2\)"):
        placed(trainer(3), total=[node("1"), node("2")], shape=Shape(2))
    with pytest.raises(PlacementError, match="at auto has no node that is alive"):
        planning.placed([ORCHESTRATOR], [], [], "1", Shape(), "auto")


def test_a_lost_role_gets_as_much_elsewhere_or_nothing() -> None:
    nodes = [node("1", 8, 0), node("2", 8, 2), node("3", 8, 4)]
    before = placed(engine(0, 2), total=nodes).slots["inference_0"]
    assert before.nodes == ("2",)
    after = planning.again(engine(0, 2), before, [nodes[0], nodes[2]])
    assert after is not None
    assert (after.nodes, after.gpus) == (("3",), ((0, 1),))
    assert planning.again(engine(0, 2), before, [nodes[0]]) is None


@pytest.mark.parametrize(
    ("fact", "said"),
    [
        ({"error": "FileNotFoundError: python"}, "cannot run .* at the same path on all nodes"),
        ({"primerl": "0.0.1"}, "node 10.0.0.2 has primerl 0.0.1, and the launcher's has"),
        ({"python": "3.9.1"}, "has python 3.9.1, and the launcher's has"),
        ({"sees": False}, "output_dir: /shared/o is not the same folder on node 10.0.0.2 as here"),
    ],
)
def test_a_node_that_differs_is_named(tmp_path: Path, fact: dict[str, Any], said: str) -> None:
    seat = reserving.Seat("0.0", "2", "host", "10.0.0.2", 1, 0)
    witness = tmp_path / "witness"
    witness.write_text("text")
    good = keeper.facts(str(witness), "text")
    assert reserving.difference(seat, good, Path("/shared/o")) is None
    found = reserving.difference(seat, {**good, **fact}, Path("/shared/o"))
    assert found is not None
    assert re.search(said, found)


def test_a_role_on_two_nodes_ends_as_the_first_part_that_failed() -> None:
    process = Process("trainer", Path("trainer.log"))
    first, second = Part("a", "0.0", "10.0.0.1"), Part("b", "0.1", "10.0.0.2")
    started = Started(process, [first, second])
    started.hear(first, json.dumps({"started": 7}))
    started.hear(second, json.dumps({"started": 8}))
    assert process.pid == 7
    started.lose(second, "its node is gone")
    assert not process.ended
    assert started.first_bad is second
    started.hear(first, json.dumps({"exited": -15, "cpu_s": 2.0}))
    assert process.describe_end() == "was lost on node 10.0.0.2: its node is gone"
    assert process.cpu_s == 2.0


def test_a_frozen_node_is_named_in_time_and_has_ended_its_processes_by_then() -> None:
    assert agent.ALONE_S > 2 * driver.POLL_S
    assert agent.ALONE_S + 2 < driver.SILENT_S < 30


def test_keepers_hear_that_they_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A keeper ends its process when it has heard nothing for some time, as on Slurm."""
    assert agent.ALIVE_S + agent.LOOK_S < keeper.agent.ORPHAN_S / 3
    monkeypatch.setattr(agent, "ALIVE_S", 0.0)
    monkeypatch.setattr(agent, "LOOK_S", 0.0)
    heard: asyncio.Queue[bytes] = asyncio.Queue()

    async def scenario() -> None:
        found = agent.Agent("n1")
        found.keepers["key"] = cast("Any", SimpleNamespace(stdin=SimpleNamespace(write=heard.put_nowait)))
        found.do(found.watch())
        for _ in range(3):
            assert json.loads(await heard.get()) == {"alive": True}
        for task in found.tasks:
            task.cancel()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_settings_that_do_not_go_with_ray_are_refused() -> None:
    assert config_of(ray={}).ray == Ray()
    for given, said in [
        ({"ray": {"address": "ray://h:10001"}}, "start the command on a node of the cluster, or by `ray job submit`"),
        ({"ray": {}, "slurm": {}}, "ray and slurm name two places"),
        ({"ray": {}, "deployment": {"type": "mine:Own"}}, "ray and deployment.type name two places"),
        ({"ray": {}, "deployment": {"gpus_per_node": 8}}, "gpus_per_node is not to be given with Ray"),
        ({"ray": {}, "deployment": {"engine_share": 0.3}}, "engine_share shares GPUs of this machine alone"),
        ({"deployment": {"num_infer_nodes": 1}}, r"add a section \[slurm\] or \[ray\]"),
    ]:
        with pytest.raises(ValidationError, match=said):
            config_of(**given)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "is_installed", lambda module: module != "ray")
    for deployment, ray in ((Deployment(), Ray()), (Deployment(type="ray"), None)):
        with pytest.raises(extras.MissingExtraError, match="needs ray, which is not installed"):
            registry.chosen(deployment, ray)


GROUP = {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}
CLUSTER = {"rayVersion", "headGroupSpec", "workerGroupSpecs"}
JOB = {"entrypoint", "runtimeEnvYAML", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished", "backoffLimit"}
CONTAINER = {"name", "image", "resources", "volumeMounts"}


@pytest.mark.parametrize(("file", "kind"), [("raycluster", "RayCluster"), ("rayjob", "RayJob")])
def test_manifests_have_fields_of_kuberay(repository: Path, file: str, kind: str) -> None:
    """The fields of `ray.io/v1` that they use, as KubeRay's definitions of August 2026 have them."""
    manifest = yaml.safe_load((repository / "docs" / "kubernetes" / f"{file}.yaml").read_text())
    assert manifest.keys() == {"apiVersion", "kind", "metadata", "spec"}
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", kind)
    cluster = manifest["spec"]
    if kind == "RayJob":
        assert cluster.keys() - {"rayClusterSpec"} <= JOB
        assert yaml.safe_load(cluster["runtimeEnvYAML"]).keys() == {"env_vars"}
        assert isinstance(cluster["shutdownAfterJobFinishes"], bool)
        cluster = cluster["rayClusterSpec"]
    assert cluster.keys() == CLUSTER
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        assert group.keys() <= GROUP
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        pod = group["template"]["spec"]
        assert pod.keys() == {"containers", "volumes"}
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert container.keys() == CONTAINER
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            limits = container["resources"]["limits"]
            assert container["resources"]["requests"] == limits
            assert all(isinstance(value, str) for value in limits.values())
