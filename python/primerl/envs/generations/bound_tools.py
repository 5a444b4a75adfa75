"""Plain functions as tools: one tool server for all toolsets of an environment's config.

    tools     = ["my_env.tools:search"]              what the model may call
    objects   = { index = "my_env.tools:load" }      made once, when the server starts
    bindings  = { "search.index" = "objects.index" } arguments that the model is not asked for

Run by verifiers as `python -m primerl.envs.generations.bound_tools`, once for each env worker.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import verifiers.v1 as vf

Function = Callable[..., Any]
OBJECTS = "objects."


class BoundToolsConfig(vf.ToolsetConfig):  # type: ignore[misc]
    toolsets: dict[str, dict[str, Any]] = {}  # noqa: RUF012 - pydantic copies it
    """Name of a toolset -> `tools`, `objects`, `bindings`."""


class BoundTools(vf.Toolset[BoundToolsConfig, vf.State]):  # type: ignore[misc]
    # The model sees the functions' own names.
    TOOL_PREFIX = None

    async def setup(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        for toolset, settings in self.config.toolsets.items():
            made = {name: await _call(imported(path)) for name, path in settings.get("objects", {}).items()}
            self.objects[toolset] = made

    def register(self, mcp: Any) -> None:
        for name, function in functions_of(self.config.toolsets, self.objects).items():
            mcp.add_tool(self._with_state(function), name=name, description=inspect.getdoc(function) or None)


def functions_of(toolsets: dict[str, dict[str, Any]], objects: dict[str, dict[str, Any]] | None) -> dict[str, Function]:
    """The tools by name, with what is bound to them. Without `objects` they are checked only.

    Raises ValueError, ImportError or TypeError that names the tool.
    """
    found: dict[str, Function] = {}
    for toolset, settings in toolsets.items():
        own = {function.__name__: function for function in map(imported, settings["tools"])}
        bound: dict[str, dict[str, Any]] = {name: {} for name in own}
        for place, value in settings.get("bindings", {}).items():
            tool, _, argument = place.partition(".")
            if tool not in own or argument not in inspect.signature(own[tool]).parameters:
                raise ValueError(f"{toolset}.bindings: {place!r} is no argument of a tool, written as `tool.argument`")
            bound[tool][argument] = _value(toolset, settings, value, objects)
        for name, function in own.items():
            if name in found:
                raise ValueError(f"{toolset}.tools: two tools are called {name!r}; rename one of the functions")
            found[name] = _bound(function, bound[name])
    return found


def imported(path: str) -> Function:
    """The function that `module:function` names."""
    module, _, name = path.partition(":")
    function = getattr(import_module(module), name, None)
    if not callable(function):
        raise TypeError(f"{path!r} is no function")
    found: Function = function
    return found


def _value(toolset: str, settings: dict[str, Any], value: Any, objects: dict[str, dict[str, Any]] | None) -> Any:
    if not isinstance(value, str) or not value.startswith(OBJECTS):
        return value
    name = value.removeprefix(OBJECTS)
    if name not in settings.get("objects", {}):
        raise ValueError(f"{toolset}.bindings: there is no {value!r}; objects has {list(settings.get('objects', {}))}")
    return None if objects is None else objects[toolset][name]


def _bound(function: Function, values: dict[str, Any]) -> Function:
    signature = inspect.signature(function, eval_str=True)
    asked = [parameter for name, parameter in signature.parameters.items() if name not in values]

    @functools.wraps(function)
    async def tool(**arguments: Any) -> Any:
        return await _call(function, **arguments, **values)

    tool.__signature__ = signature.replace(parameters=asked)  # type: ignore[attr-defined]
    hints = inspect.get_annotations(function, eval_str=True)
    tool.__annotations__ = {name: hint for name, hint in hints.items() if name not in values}
    return tool


async def _call(function: Function, **arguments: Any) -> Any:
    """In a thread, where it is a plain function: others are served meanwhile."""
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)
    return await asyncio.to_thread(function, **arguments)


if __name__ == "__main__":
    BoundTools.run()
