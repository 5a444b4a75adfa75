"""Inference engines: the protocol of a backend (`backend`), the ones of primerl (`backends`, `torch/`, `vllm/`), and
`primerl inference` (`server`), which serves one."""
