"""Env workers: they lease rollouts from the orchestrator and run verifiers environments.

`worker` is the process, `adapter` turns a verifiers environment into examples and outcomes, `harness` is the chat
program that plays a seat, `interception` records its turns, `patches` is all that is changed in other libraries.
"""
