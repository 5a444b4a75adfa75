"""What `primerl trace` prints for people: one function a question, each taking the answer of `_core.inspect_run`."""

from __future__ import annotations

from typing import Any

from primerl.runs.tables import seconds, share, table

ENDED = ("trained", "filtered", "stale", "failed", "cancelled", "evaluated")


def summary(answer: dict[str, Any]) -> str:
    rollouts = answer["rollouts"]
    ends = ", ".join(f"{name} {rollouts[name]}" for name in ENDED if rollouts[name])
    facts = [
        ("steps", f"{answer['steps']} of {answer['max_steps']}"),
        ("rollouts leased", f"{rollouts['dispatched']}: {ends or 'none has ended'}"),
        (
            "under way",
            f"{rollouts['in_flight']} in flight, {rollouts['finished']} finished, {rollouts['queued']} queued",
        ),
        ("groups dropped", str(answer["groups_dropped"])),
        ("version", f"published {text(answer['published_version'])}, proved {text(answer['policy_version'])}"),
        ("orchestrator", f"restarted {times(answer['restarts'])}"),
        ("trainer", f"started {times(answer['trainer_starts'])}"),
        ("engines", f"{answer['engines']}, lost {times(answer['engines_lost'])}"),
        ("workers", f"{answer['workers_joined']} joined, {answer['workers_lost']} lost"),
        ("evaluations", str(len(answer["evaluations"]))),
        ("the end", answer["finished"] or "not yet"),
    ]
    events = sorted(answer["events"].items(), key=lambda item: -item[1])
    return join(told(answer), table(("", ""), facts), ["", *table(("event", "count"), events)])


def rollout(answer: dict[str, Any]) -> str:
    name = answer["worker_name"]
    kind = "" if answer["evaluates"] is None else f", evaluates version {answer['evaluates']}"
    lines = [
        f"rollout {answer['rollout']}: example {answer['example']} of {answer['environment']}, "
        f"slot {answer['slot']} of group {answer['group']}{kind}",
        f"  {seconds(answer['leased_s'])}: leased to worker {answer['worker']}{f' ({name})' if name else ''}",
    ]
    lines += [f"  {seconds(at)}: an engine begins to sample, version {version}" for at, version in answer["sampling"]]
    if answer["turns"]:
        header = (
            "turn",
            "at s",
            "took s",
            "session",
            "extends",
            "prompt",
            "new",
            "sampled",
            "versions",
            "engine",
            "ended by",
        )
        lines += table(header, [turn_row(turn) for turn in answer["turns"]])
    lines += [f"  a turn failed: {message}" for message in answer["turn_failures"]]
    if answer["reported_s"] is not None:
        lines.append(f"  {seconds(answer['reported_s'])}: reported by its environment")
    lines += [f"    {report_line(report)}" for report in answer["reports"]]
    if answer["error"]:
        lines.append(f"    error {answer['error']['kind']}: {answer['error']['message']}")
    end = answer["end"]
    lines.append(f"  {answer['now']}" if end is None else f"  {seconds(end['at_s'])}: {end_line(end)}")
    return "\n".join(lines)


def turn_row(turn: dict[str, Any]) -> tuple[Any, ...]:
    versions = " ".join(f"v{version}:{tokens}" for version, tokens in turn["versions"])
    engines = "|".join(map(str, turn["engines"]))
    extends = f"turn {turn['parent']}" if turn["parent"] is not None else turn["fork"]
    return (
        turn["turn"],
        turn["at_s"],
        turn["after_s"],
        turn["session"],
        extends,
        turn["prompt_tokens"],
        turn["new_prompt_tokens"],
        turn["sampled_tokens"],
        turn.get("model", versions),
        engines,
        turn["finish"],
    )


def report_line(report: dict[str, Any]) -> str:
    flags = [] if report["trainable"] else ["not trained"]
    flags += [] if report["ok"] else ["failed"]
    flags += ["truncated"] if report["truncated"] else []
    flags += [f"stopped by {report['stop_condition']}"] if report["stop_condition"] else []
    # A journal of a version that did not record seats has none.
    names = [f"{kind} {report[kind]!r}" for kind in ("seat", "session") if report.get(kind)]
    session = f"{', '.join(names)}: " if names else ""
    metrics = "".join(f", {name} {number(value)}" for name, value in report["metrics"].items())
    return f"{session}reward {number(report['reward'])}{metrics}" + (f" ({', '.join(flags)})" if flags else "")


def end_line(end: dict[str, Any]) -> str:
    if end["step"] is not None:
        return f"trained at step {end['step']}"
    return f"{end['ended']}{why(end)}"


def why(end: dict[str, Any]) -> str:
    blame = f", error of kind {end['error']}" if end.get("error") else ""
    reason = f" ({end['reason']}{blame})" if end["reason"] else ""
    return reason + (f": {end['message']}" if end["message"] else "")


ROLLOUT_LINE = ("rollout", "slot", "worker", "leased s", "finished s", "turns", "sampled", "reward", "end")


def rollout_rows(rollouts: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [
        (
            line["rollout"],
            line["slot"],
            line["worker"],
            line["leased_s"],
            line["finished_s"],
            line["turns"],
            line["sampled_tokens"],
            " ".join("-" if reward is None else f"{reward:g}" for reward in line["rewards"]),
            (line["ended"] or "waits" if line["finished_s"] is not None else line["ended"] or "in flight") + why(line),
        )
        for line in rollouts
    ]


def group(answer: dict[str, Any]) -> str:
    kind = "" if answer["evaluates"] is None else f", evaluates version {answer['evaluates']}"
    lines = [f"group {answer['group']}: example {answer['example']} of {answer['environment']}{kind}"]
    lines += table(ROLLOUT_LINE, rollout_rows(answer["rollouts"]))
    lines.append(f"  {seconds(answer['began_s'])}: begun")
    if answer["complete_s"] is not None:
        lines.append(
            f"  {seconds(answer['complete_s'])}: complete, {seconds(answer['complete_s'] - answer['began_s'])} later"
        )
    dropped = answer["dropped"]
    if answer["step"] is not None:
        lines.append(f"  {seconds(answer['cut_s'])}: cut into the batch of step {answer['step']}")
    elif dropped:
        lines.append(f"  {seconds(dropped['at_s'])}: dropped ({dropped['reason']}): {dropped['why']}")
    elif answer["evaluates"] is None:
        lines.append("  not cut, and not dropped, so far")
    return "\n".join(lines)


def trees(answer: dict[str, Any]) -> list[str]:
    """Micro-batches whose samples share tokens; empty where none does."""
    lines = answer["trees"]
    if not lines:
        return []
    share = answer["computed_tokens"] / answer["tokens"]
    rows = [
        (
            f"rank {line['rank']}",
            f"micro-batch {line['micro_batch']}",
            f"{line['samples']} samples in {line['trees']} {'tree' if line['trees'] == 1 else 'trees'}",
            f"{line['computed_tokens']} of {line['tokens']} tokens",
        )
        for line in lines
    ]
    return [
        f"  tokens that samples share are computed once: {answer['computed_tokens']} ({share:.0%})",
        *table(("", "", "", ""), rows),
    ]


def step(answer: dict[str, Any]) -> str:
    took = answer["took"]
    number = answer["step"]
    staleness = sorted(answer["staleness"].items(), key=lambda item: int(item[0]))
    lines = [
        f"step {number}: {answer['rollouts']} rollouts in {len(answer['groups'])} groups, {answer['samples']} samples, "
        f"{answer['tokens']} tokens ({answer['loss_tokens']} trained), {answer['micro_batches']} micro-batches a rank",
        *trees(answer),
        "  staleness (samples): " + "  ".join(f"{lag}: {count}" for lag, count in staleness),
    ]
    stages = [
        (f"{seconds(answer['cut_s'])}", "cut", f"{seconds(took['rollouts'])} after its first lease"),
        *(
            (seconds(f["fetched_s"]), f"fetched by rank {f['rank']}", f"asked at {seconds(f['asked_s'])}")
            for f in answer["fetched"]
        ),
        *((seconds(at), f"version {number} published", "") for at in answer["published_s"]),
        *(
            (seconds(p["proved_s"]), f"proved by engine {p['engine']}", f"told at {seconds(p['told_s'])}")
            for p in answer["proved"]
        ),
    ]
    lines += table(("", "", ""), stages)
    if answer["overtaken"]:
        lines.append(f"  version {number} was overtaken by a newer one before an engine loaded it")
    spans = [(name.replace("_", " "), seconds(span)) for name, span in took.items()]
    lines.append("  took: " + ", ".join(f"{name} {span}" for name, span in spans))
    for one in answer["groups"]:
        lines.append(f"group {one['group']}: example {one['example']} of {one['environment']}")
        lines += table(ROLLOUT_LINE, rollout_rows(one["rollouts"]))
    return "\n".join(lines)


def idle(answer: dict[str, Any]) -> str:
    lines = [f"trainer, {answer['seconds']:.1f} s"]
    lines += shares(answer["trainer"], answer["seconds"])
    if answer["longest_waits"]:
        waits = (
            f"step {wait['step']} {wait['seconds']:.2f} s (at {wait['from_s']:.1f} s)"
            for wait in answer["longest_waits"]
        )
        lines.append("  longest waits: " + ", ".join(waits))
    for engine in answer["engines"]:
        lines += ["", f"engine {engine['engine']}, {answer['seconds']:.1f} s"]
        lines += shares(engine["states"], answer["seconds"])
    for workers in answer["workers"]:
        lines += ["", f"workers of {workers['environment']}, {workers['worker_seconds']:.1f} worker-seconds"]
        lines += shares(workers["states"], workers["worker_seconds"])
    return join(told(answer), lines, ["", f"rollouts in flight: {answer['mean_in_flight']:.1f} in the mean over time"])


def shares(states: list[dict[str, Any]], whole: float) -> list[str]:
    rows = [(one["what"], f"{one['seconds']:.2f}", share(one["share"]).rjust(6)) for one in states]
    return table(("what", "seconds", "share"), [*rows, ("in all", f"{whole:.2f}", share(1.0).rjust(6))])


def dropped(answer: dict[str, Any]) -> str:
    lost = sum(one["count"] for one in answer["rollouts"])
    tokens = sum(one["sampled_tokens"] for one in answer["rollouts"])
    lines = [
        f"{lost} of {answer['rollouts_ended']} rollouts that ended were not trained, nor evaluated; "
        f"they had sampled {tokens} of {answer['sampled_tokens']} tokens"
    ]
    if lost:
        rows = [(one["ended"], one["reason"], one["count"], one["sampled_tokens"]) for one in answer["rollouts"]]
        lines += table(("end", "reason", "rollouts", "sampled tokens"), rows)
    for one in answer["rollouts"]:
        lines.append(f"last of {one['ended']} ({one['reason']}):")
        lines += table(
            ("", "", "", ""),
            [
                (
                    seconds(last["at_s"]),
                    f"rollout {last['rollout']}",
                    f"group {last['group']}, example {last['example']} of {last['environment']}",
                    first_line(last["message"]),
                )
                for last in one["last"]
            ],
        )
    for one in answer["groups"]:
        lines.append(f"{one['count']} groups dropped ({one['reason']}), the last:")
        lines += table(
            ("", "", ""),
            [(seconds(last["at_s"]), f"group {last['group']}", first_line(last["why"])) for last in one["last"]],
        )
    if answer["slots_refilled"] or answer["slots_lost"]:
        lines.append(f"slots of groups: {answer['slots_refilled']} filled again, {answer['slots_lost']} given up")
    for title, counts in (
        ("failures since the run began", answer["failures"]),
        ("errors by kind", answer["errors"]),
        ("ignored events", answer["ignored"]),
    ):
        if counts:
            lines.append(f"{title}: " + ", ".join(f"{name} {count}" for name, count in counts.items()))
    return join(told(answer), lines)


def check(answer: dict[str, Any]) -> str:
    story, broken = answer["story"], answer["broken"]
    what = f"{answer['steps']} steps, {answer['rollouts_trained']} rollouts trained, {story['events']} events"
    lines = told(answer)
    if answer["batches_owed"]:
        lines.append(
            f"{answer['batches_owed']} batches are not in the spool yet: the orchestrator writes them when it resumes"
        )
    if broken is None:
        return "\n".join([*lines, f"{what}: every invariant holds"])
    event = "" if broken["event"] is None else f" after event {broken['event']} ({seconds(broken['at_s'])})"
    return "\n".join([*lines, f"{what}: broken{event}: {broken['what']}"])


def told(answer: dict[str, Any]) -> list[str]:
    """What part of the run the answer is about, where it is not all of it."""
    story = answer["story"]
    if not story["events_before"]:
        return []
    return [
        f"the story begins after event {story['events_before']} ({seconds(story['from_s'])}, before step "
        f"{story['first_step']} was cut): earlier events are not kept"
    ]


def first_line(message: str | None, width: int = 100) -> str:
    line = (message or "").split("\n")[0]
    return line if len(line) <= width else line[: width - 3] + "..."


def text(value: int | None) -> str:
    return "none" if value is None else str(value)


def number(value: float | None) -> str:
    """JSON has no NaN and no infinity: they are null."""
    return "not a number" if value is None else f"{value:g}"


def times(count: int) -> str:
    return {0: "never", 1: "once"}.get(count, f"{count} times")


def join(*parts: list[str]) -> str:
    return "\n".join(line for part in parts for line in part)
