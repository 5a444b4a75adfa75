"""Versions of what is installed by what primerl asks for, and what is missing. Nothing is imported but metadata."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib import metadata

from primerl._core import __version__ as compiled
from primerl.doctor.finding import Finding, note, ok, problem
from primerl.envs.generations.choice import BOUNDS
from primerl.envs.versions import version_of
from primerl.process.extras import described

USES = {
    "train": "the trainer, `primerl sft`, `primerl verify` and the embedded engine",
    "envs": "env workers",
    "report": "curves in `primerl report`",
    "data": "datasets in other formats than JSON lines",
    "wandb": "W&B",
    "prime": "samples on the Prime platform",
    "vllm": "vLLM in this interpreter (`inference.python` may name another one)",
}
"""What each extra is for."""
NEEDED = ("train", "envs")
"""Extras without which `primerl rl` cannot run here."""
REQUIREMENT = re.compile(r"([\w.-]+)(?:\[[\w,-]+\])?\s*([^;]*)(?:;\s*(.*))?")
CLASSIC = BOUNDS["classic"]


def findings(requires: list[str] | None = None) -> Iterator[Finding]:
    """`requires`: as in a package's metadata; by default primerl's own."""
    yield from _primerl()
    extras: dict[str, list[tuple[str, str]]] = {}
    for line in requires if requires is not None else _declared():
        found = REQUIREMENT.fullmatch(line)
        if found is not None:
            named = re.search(r"""extra\s*==\s*["']([\w-]+)["']""", found[3] or "")
            extras.setdefault(named[1] if named else "", []).append((found[1], found[2].strip()))
    for extra in ("", *USES):
        yield from _extra(extra, extras.get(extra, []))


def _primerl() -> Iterator[Finding]:
    try:
        version = metadata.version("primerl")
    except metadata.PackageNotFoundError:
        yield note(
            "primerl", f"{compiled}, run without having been installed", "plug-ins of other packages work as usual"
        )
        return
    if version != compiled:
        yield problem(
            "primerl",
            f"Python files of {version}, a compiled part of {compiled}",
            "install primerl again; `make build` in a clone",
        )
    else:
        yield ok("primerl", version)


def _declared() -> list[str]:
    try:
        return metadata.requires("primerl") or []
    except metadata.PackageNotFoundError:
        return []


def _extra(extra: str, wanted: list[tuple[str, str]]) -> Iterator[Finding]:
    there: dict[str, str] = {}
    missing, others = [], []
    for name, bounds in wanted:
        version = version_of(name)
        if version is None:
            missing.append(name)
        elif fits(version, bounds) or (name == "verifiers" and _is_classic(version)):
            there[name] = version
        else:
            others.append(f"{name} {version} ({bounds} is needed)")
    about = f"extra {extra}" if extra else "packages"
    use = USES.get(extra, "every command")
    if others:
        yield problem(about, ", ".join(others), f"{use} may fail or compute something else: {_install(extra)}")
    elif missing and len(missing) == len(wanted) and extra:
        level = problem if extra in NEEDED else ok
        yield level(about, "not installed", f"for {use}: {_install(extra)}")
    elif missing:
        yield problem(about, f"{', '.join(missing)} not installed", f"for {use}: {_install(extra)}")
    elif wanted:
        yield ok(about, _listed(there))


def _is_classic(version: str) -> bool:
    return CLASSIC[0] <= _numbers(version) < CLASSIC[1]


def _install(extra: str) -> str:
    return described(extra) if extra else "install primerl again"


def _listed(there: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in there.items())


def fits(version: str, bounds: str) -> bool:
    """Whether a version is within bounds such as `>=0.4,<0.5`: numbers of releases alone are compared, which is all
    that our own requirements name."""
    numbers = _numbers(version)
    for bound in filter(None, map(str.strip, bounds.split(","))):
        operator, limit = re.fullmatch(r"([<>=~!]+)\s*(.+)", bound).groups()  # type: ignore[union-attr]
        width = max(len(numbers), len(_numbers(limit)))
        has, wanted = (one + (0,) * (width - len(one)) for one in (numbers, _numbers(limit)))
        holds = {">=": has >= wanted, "<": has < wanted, "==": has == wanted, "<=": has <= wanted, ">": has > wanted}
        if not holds.get(operator, True):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    release = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(number) for number in release[0].split(".")) if release else ()
