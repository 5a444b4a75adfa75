"""`primerl simulate` as a user meets it: numbers that agree, files, and plans that are refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from primerl.config.command_line.load import load
from primerl.config.errors.fail import ConfigError
from primerl.config.schema.simulate import SimulateConfig

pytestmark = pytest.mark.processes

PLAN = """
max_steps = 4
seq_len = 512
[orchestrator]
batch_size = 16
group_size = 4
max_async_level = 2
oversampling_factor = 2.0
[inference]
engines = 1
max_num_seqs = 8
step_s = 0.01
step_per_sequence_s = 0.005
update_s = 0.1
[environment]
turns = { type = "uniform", min = 1, max = 3 }
answer_tokens = { type = "log_normal", mean = 40, max = 200 }
[trainer]
step_s = 0.1
publish_s = 0.05
"""


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    file = tmp_path / "plan.toml"
    file.write_text(PLAN)
    return file


def primerl(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "primerl", "simulate", *arguments], cwd=cwd, capture_output=True, text=True, timeout=120
    )


def report(plan: Path, *more: str) -> dict[str, Any]:
    done = primerl("@", str(plan), "--json", "--what-if", "False", *more, cwd=plan.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    numbers: dict[str, Any] = json.loads(done.stdout)["report"]
    return numbers


def test_numbers_agree(plan: Path) -> None:
    one = report(plan)
    assert one["completed"]
    assert one["rollouts"]["trained"] == 4 * 16 == sum(one["staleness"]["histogram"].values())
    for shares in (one["trainer"], one["engines"]["shares"], one["workers"], one["admission"]):
        assert sum(shares.values()) == pytest.approx(1)
    assert one == report(plan), "the same plan gives the same numbers"
    assert one != report(plan, "--seed", "1")
    assert one["limit"]["what"] == "engines", one["limit"]["sentence"]
    two = report(plan, "--inference.engines", "2")
    assert two["throughput"]["steps_per_hour"] > 1.2 * one["throughput"]["steps_per_hour"]


def test_table_and_files(plan: Path) -> None:
    done = primerl("@", str(plan), "--output", "out", cwd=plan.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = plan.parent / "out"
    assert (folder / "report.txt").read_text().rstrip("\n") in done.stdout
    numbers = json.loads((folder / "report.json").read_text())
    assert numbers["report"]["limit"]["sentence"] in done.stdout
    assert [case["gain"] for case in numbers["what_if"]] == sorted(
        (case["gain"] for case in numbers["what_if"]), reverse=True
    )
    assert ElementTree.parse(folder / "timeline.svg").getroot().tag.endswith("svg")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (("--inference.engines", "0"), "inference.engines"),
        (("--orchestrator.batch-size", "15"), "orchestrator.batch_size"),
        (("--orchestrator.max-off-policy-steps", "1"), "orchestrator.max_off_policy_steps"),
        (("--inference.kv-cache-tokens", "100"), "inference.kv_cache_tokens"),
        (("--inference.step-s", "-1"), "inference.step_s"),
        (("--environment.failure-probability", "1"), "environment.failure_probability"),
    ],
)
def test_bad_plans_are_refused_by_name(plan: Path, change: tuple[str, str], field: str) -> None:
    done = primerl("@", str(plan), *change, cwd=plan.parent)
    assert done.returncode == 2, done.stdout + done.stderr
    assert field in done.stderr, done.stderr


def test_files_of_others_are_not_replaced(plan: Path) -> None:
    for names, said in (
        (["run/launcher.lock"], "is the folder of a run"),
        (["report.txt", "report.json"], "report.json is there without timeline.svg, and would be replaced"),
    ):
        folder = plan.parent / names[0].replace("/", "-")
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("mine")
        done = primerl("@", str(plan), "--output-dir", str(folder), cwd=plan.parent)
        assert (done.returncode, done.stdout) == (2, "")
        assert f"output_dir: {folder}" in done.stderr
        assert said in done.stderr
        assert [path.read_text() for path in folder.rglob("*") if path.is_file()] == ["mine"] * len(names)
    done = primerl("@", str(plan), "--output-dir", str(plan), cwd=plan.parent)
    assert (done.returncode, done.stdout) == (2, "")
    assert "is not a folder" in done.stderr
    for _ in range(2):
        assert primerl("@", str(plan), "--output-dir", "again", cwd=plan.parent).returncode == 0


def test_an_empty_output_folder_is_refused(plan: Path) -> None:
    done = primerl("@", str(plan), "--output-dir", "", cwd=plan.parent)
    assert done.returncode == 2
    assert "output_dir (on the command line): String should have at least 1 character" in done.stderr
    assert [path.name for path in plan.parent.iterdir()] == [plan.name]


def test_unknown_key_is_named(plan: Path) -> None:
    plan.write_text(PLAN + "step_pertoken_s = 1\n")
    with pytest.raises(ConfigError, match="did you mean 'step_per_token_s'"):
        load(SimulateConfig, ["@", str(plan)], program="primerl simulate")


@pytest.mark.parametrize("name", ["demo", "gpus"])
def test_example_plans_are_valid(repository: Path, name: str) -> None:
    file = repository / "examples" / "plans" / f"{name}.toml"
    config = load(SimulateConfig, ["@", str(file)], program="primerl simulate")
    from primerl import _core

    plan = config.plan() | {"max_steps": 1}
    assert _core.simulate(plan, what_if=False)["report"]["completed"]


def with_value(config: SimulateConfig, field: str, value: Any) -> dict[str, Any]:
    """The plan as the simulator takes it, whatever the config would say of the value."""
    plan = config.plan()
    section, name = field.split(".")
    plan[section][name] = value
    return plan


@pytest.mark.parametrize(
    ("field", "longest"),
    [
        ("orchestrator.rollout_s", 86_400),
        ("inference.step_s", 60),
        ("inference.step_per_sequence_s", 1),
        ("inference.step_per_prefill_token_s", 1),
        ("inference.update_s", 86_400),
        ("environment.cpu_s", 86_400),
        ("trainer.step_s", 86_400),
        ("trainer.step_per_token_s", 1),
        ("trainer.publish_s", 86_400),
    ],
)
def test_a_time_without_end_is_refused_by_config_and_simulator(plan: Path, field: str, longest: int) -> None:
    from primerl import _core

    flag = "--" + field.replace("_", "-")
    arguments = ["@", str(plan), flag, str(longest)]
    config = load(SimulateConfig, arguments, program="primerl simulate")
    arguments[-1] = str(longest * 1.01)
    with pytest.raises(ConfigError, match=rf"{field} .*less than or equal to {longest} \(it is '?{longest * 1.01}"):
        load(SimulateConfig, arguments, program="primerl simulate")
    with pytest.raises(ValueError, match=f"^{field}: .* {longest}$"):
        _core.simulate(with_value(config, field, longest * 1.01), what_if=False)


@pytest.mark.parametrize("field", ["setup_s", "turn_s"])
def test_the_environments_times_have_an_end(plan: Path, field: str) -> None:
    plan.write_text(PLAN.replace("[environment]", f'[environment]\n{field} = {{ type = "constant", value = 1e12 }}'))
    done = primerl("@", str(plan), cwd=plan.parent)
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"environment.{field}: 1000000000000 is above 86400; lower it" in done.stderr
