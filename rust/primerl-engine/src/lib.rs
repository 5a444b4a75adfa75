//! The engine side of vLLM's HTTP surface over a batching scheduler and a Backend trait.
