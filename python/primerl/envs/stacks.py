"""Where code is held up: a task that waits, and a thread that does not come back. Standard library only."""

from __future__ import annotations

import asyncio
import inspect
import sys
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any

# How many tasks that wait for each other are followed.
DEEPEST = 50


def place(frames: list[FrameType], package: str) -> str | None:
    """`my_env/rewards.py:28` of frames, the outermost first: the innermost line of the environment's own package, else
    the innermost line."""
    own = [frame for frame in frames if _module(frame).split(".")[0] == package]
    frame = next(reversed(own or frames), None)
    return None if frame is None else f"{_file(frame)}:{frame.f_lineno}"


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _file(frame: FrameType) -> str:
    """The path of the file, from the folder that its package is in."""
    parts = frame.f_code.co_filename.split("/")
    depth = len(_module(frame).split(".")) + (parts[-1] == "__init__.py")
    return "/".join(parts[-depth:])


def of_thread(number: int) -> list[FrameType]:
    """The frames of another thread at this moment, the outermost first; none where it has ended."""
    frame = sys._current_frames().get(number)
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


def of_task(task: asyncio.Task[Any]) -> list[FrameType]:
    """Where a task waits, and below that where the tasks wait that it waits for: the outermost first."""
    return [frame for frames in _stacks(task, set()) for frame in frames]


def shown(task: asyncio.Task[Any]) -> str:
    """The stacks of a task as text for a log."""
    lines = []
    for frames in _stacks(task, set()):
        summary = traceback.StackSummary.extract(((frame, frame.f_lineno) for frame in frames), lookup_lines=True)
        lines += summary.format()
    return "".join(lines).rstrip()


def _stacks(task: asyncio.Task[Any], seen: set[int]) -> Iterator[list[FrameType]]:
    """`Task.get_stack` knows the outermost frame of a task that waits, and no other."""
    if id(task) in seen or len(seen) >= DEEPEST:
        return
    seen.add(id(task))
    frames = list(_frames(task.get_coro()))
    if frames:
        yield frames
    for other in _waited_for(task, frames):
        yield from _stacks(other, seen)


def _frames(waiting: Any) -> Iterator[FrameType]:
    """The frames of a coroutine and those that it awaits, as far as they are coroutines or generators."""
    while waiting is not None:
        if inspect.iscoroutine(waiting):
            frame, waiting = waiting.cr_frame, waiting.cr_await
        elif inspect.isgenerator(waiting):
            frame, waiting = waiting.gi_frame, waiting.gi_yieldfrom
        elif inspect.isasyncgen(waiting):
            frame, waiting = waiting.ag_frame, waiting.ag_await
        else:
            return
        if frame is not None:
            yield frame


def _waited_for(task: asyncio.Task[Any], frames: list[FrameType]) -> list[asyncio.Task[Any]]:
    """By `await task` and `gather`; by `wait`, `wait_for` and task groups, whose innermost frame knows them."""
    future = getattr(task, "_fut_waiter", None)
    candidates: list[Any] = [future, *getattr(future, "_children", ())]
    for value in frames[-1].f_locals.values() if frames else ():
        if isinstance(value, asyncio.TaskGroup):
            candidates += getattr(value, "_tasks", ())
        elif isinstance(value, list | tuple | set | frozenset):
            candidates += value
        else:
            candidates.append(value)
    return [other for other in candidates if isinstance(other, asyncio.Task) and not other.done() and other is not task]
