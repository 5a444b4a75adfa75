"""The process that checks environments, started before it is known which."""

from __future__ import annotations

import json

from primerl.launch import checker


def test_the_process_started_ahead_is_the_one_that_is_asked_once() -> None:
    with checker.environments_ahead():
        with checker.environments() as ahead:
            request = json.dumps([["reverse-text", {}, {}, "train", 8], ["no-such-environment", {}, {}, "eval", 1]])
            done = checker.ended(ahead, 120, request)
        assert done is not None
        assert done.returncode == 0, done.stderr
        fine, (problem, remark) = json.loads(done.stdout.splitlines()[-1])
        assert fine == [None, None]
        assert "cannot be imported" in problem
        assert remark is None
        with checker.environments() as another:
            assert another.pid != ahead.pid
            assert another.poll() is None
        assert another.poll() is not None


def test_nothing_is_left_of_it_where_the_config_is_refused() -> None:
    with checker.environments_ahead():
        process = checker._ahead[0]
        assert process.poll() is None
    assert process.returncode is not None
    assert checker._ahead == []


def test_who_does_not_end_in_time_is_told_apart() -> None:
    with checker.running("this") as process:  # prints, and ends
        assert checker.ended(process, 60) is not None
    with checker.environments() as process:
        assert checker.ended(process, 0.01) is None
    assert process.returncode is not None
