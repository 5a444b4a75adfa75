"""Which role gets which GPUs of a machine.

Roles take GPUs in their order, each its own. Those of one process that computes on several of them (a tensor-parallel
engine) are neighbours: next to one NUMA node where it has enough of them, beginning at a multiple of their number
where that is free, since links of pairs and fours begin there.

Roles that take a share of a GPU's memory (`Resources.share`) share GPUs: each goes where another one is, and the least
is taken.
"""

from __future__ import annotations

from collections.abc import Sequence

from primerl.launch.placement.gpus import Gpu
from primerl.launch.placement.protocol import Place, Role
from primerl.process.problems import Problem

MISSING = "not enough GPUs are left"
DIVIDED = "a process sees one part of a divided GPU (MIG)"
ROUNDING = 1e-6


def places(roles: Sequence[Role], found: Sequence[Gpu], host: str) -> list[Place]:
    """Without any GPU everything computes on the CPU. A single one that no role asked to share is shared all the
    same, by whatever fits into its memory."""
    most = max((role.resources.gpus for role in roles), default=0)
    if not found:
        return [Place(role, host) for role in roles]
    if len(found) == 1 and most == 1 and not any(role.resources.share for role in roles):
        return [Place(role, host, (found[0].name,) * role.resources.gpus, _shared(role)) for role in roles]
    taken = dict.fromkeys((one.name for one in found), 0.0)
    return [_place(role, found, taken, host) for role in roles]


def _shared(role: Role) -> str:
    return "shared" if role.resources.gpus else ""


def _place(role: Role, found: Sequence[Gpu], taken: dict[str, float], host: str) -> Place:
    wanted, share = role.resources.gpus, role.resources.share or 1.0
    if wanted > 1 and any(one.is_part for one in found):
        return Place(role, host, note=DIVIDED)
    free = [one for one in found if taken[one.name] + share <= 1.0 + ROUNDING]
    own = _chosen(free, found, taken, wanted)
    for one in own:
        taken[one.name] += share
    if len(own) < wanted:
        return Place(role, host, note=MISSING)
    return Place(role, host, tuple(one.name for one in own), _of_it(role))


def _of_it(role: Role) -> str:
    share = role.resources.share
    return f"{share:.0%} of its memory" if share is not None and role.resources.gpus else ""


def _chosen(free: Sequence[Gpu], found: Sequence[Gpu], taken: dict[str, float], wanted: int) -> list[Gpu]:
    """So many of the free GPUs; none where there are too few."""
    if len(free) < wanted or not wanted:
        return []
    # Beside others first: of the GPUs that are free, none has a share taken unless it is for roles that share.
    used = {one.name: (not taken[one.name], taken[one.name]) for one in free}
    if wanted == 1:
        return [min(free, key=lambda one: used[one.name])]
    position = {one.name: index for index, one in enumerate(found)}
    windows = [list(free[start : start + wanted]) for start in range(len(free) - wanted + 1)]

    def cost(window: list[Gpu]) -> tuple[int, float, bool, bool, bool]:
        first, last = position[window[0].name], position[window[-1].name]
        return (
            sum(not taken[one.name] for one in window),
            sum(taken[one.name] for one in window),
            len({one.numa for one in window}) > 1,
            last - first >= wanted,  # with another one between them
            first % wanted > 0,
        )

    return min(windows, key=cost)


def refusal(placed: Sequence[Place], found: Sequence[Gpu]) -> Problem | None:
    """Why they cannot be placed so, with what to change; None where they can."""
    divided = [place.role.name for place in placed if place.note == DIVIDED]
    if divided:
        return Problem.at(
            "deployment",
            f"{', '.join(divided)} would need several GPUs, and this machine has divided ones (MIG), of "
            "which a process sees one part; set trainer.ranks = 1 and no parallel sizes of engines, or let CUDA see "
            "whole GPUs (CUDA_VISIBLE_DEVICES)",
        )
    missing = [place.role.name for place in placed if place.note == MISSING]
    if not missing:
        return None
    asked = sum(place.role.resources.gpus for place in placed)
    return Problem.at(
        "deployment",
        f"{asked} GPUs are asked for, and this machine has {len(found)}, so that {', '.join(missing)} "
        "would have none; lower trainer.ranks or inference.replicas, share GPUs (deployment.engine_share), or let CUDA "
        "see more of them (CUDA_VISIBLE_DEVICES)",
    )
