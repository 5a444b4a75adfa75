"""What `primerl buffer` prints for people, from the answer of `_core.inspect_buffer`."""

from __future__ import annotations

from typing import Any

from primerl.runs.tables import table

POOLS = ("easy", "normal", "hard")


def show(answer: dict[str, Any]) -> str:
    filtering = (
        "filters groups without signal" if answer["online_difficulty_filtering"] else "off: pools are only recorded"
    )
    lines = [f"difficulty buffer ({filtering}), before step {answer['next_step']} is cut"]
    if not answer["environments"]:
        return "\n".join([*lines, "  no training environment has listed its examples yet"])
    header = ("environment", "examples", "seen", *POOLS, "groups filtered", "in a row", "returned")
    lines += table(header, [environment_row(one) for one in answer["environments"]])
    lines.append("draws")
    decks = [deck_row(one["name"], deck) for one in answer["environments"] for deck in one["decks"]]
    lines += table(("environment", "from", "weight", "examples", "drawn in this epoch", "epochs"), decks)
    if answer["steps"]:
        lines.append(
            f"the last {len(answer['steps'])} steps: pools at the cut; since the cut before, examples that came in"
        )
        names = {one["environment"]: one["name"] for one in answer["environments"]}
        into = [f"into {pool}" for pool in POOLS]
        lines += table(
            ("step", "environment", *POOLS, *into, "groups filtered", "returned"), step_rows(answer["steps"], names)
        )
    if answer["example"]:
        lines += history(answer["example"])
    return "\n".join(lines)


def environment_row(one: dict[str, Any]) -> tuple[Any, ...]:
    pools = (one["pools"][pool] for pool in POOLS)
    filtered = (one["filtered_groups"], one["filtered_in_a_row"], one["returned"])
    return (one["name"], one["examples"], one["seen"], *pools, *filtered)


def deck_row(environment: str, deck: dict[str, Any]) -> tuple[Any, ...]:
    return (environment, deck["pool"] or "all", f"{deck['weight']:g}", deck["examples"], deck["drawn"], deck["epochs"])


def step_rows(steps: list[dict[str, Any]], names: dict[int, str]) -> list[tuple[Any, ...]]:
    return [
        (
            step["step"],
            names.get(one["environment"], str(one["environment"])),
            *(one["pools"][pool] for pool in POOLS),
            *(one["movement"]["into"][pool] for pool in POOLS),
            one["movement"]["filtered"],
            one["movement"]["returned"],
        )
        for step in steps
        for one in step["environments"]
    ]


def history(example: dict[str, Any]) -> list[str]:
    last = example["last_mean_reward"]
    reward = "no group was completed yet" if last is None else f"last mean reward {last:.3f}"
    counts = f"{example['groups']} groups, {example['moves']} moves"
    lines = [f"example {example['example']}: {example['pool']}, {counts}, {reward}"]
    if example["recent"]:
        rows = [(seen["step"], seen["mean_reward"], seen["pool"]) for seen in example["recent"]]
        lines += table(("before step", "mean reward", "filed as"), rows)
    return lines
