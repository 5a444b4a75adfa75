"""Generations of verifiers: an implementation of [`Generation`][primerl.envs.interface.Generation] each, and the choice
among them."""
