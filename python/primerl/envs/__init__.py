"""Env workers: they lease rollouts from the orchestrator and run verifiers environments.

`worker` is the process, `interface` what it knows of an environment, `check` says before a run whether one can be used.
In `generations/`, `choice` says whether an environment is a v1 or a classic one; `v1` and `classic` turn it into
examples and outcomes. `harness` is the chat program that plays a seat of v1, `interception` records its turns,
`patches` is all that is changed in other libraries, `deferred` what of them is imported later (`reexports`: name by
name).
"""
