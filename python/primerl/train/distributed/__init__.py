"""Ranks: how they start, share a model, agree with each other and notice a dead one."""
