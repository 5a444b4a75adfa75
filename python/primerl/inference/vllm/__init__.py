"""vLLM as the engine of a run: starting its server (`process`), and what runs inside its processes (`serve`, `worker`).

vLLM may be installed in another environment than the rest. Its processes get this package from this folder, whatever is
installed there (`serve`), and of it they import `worker` and `checkpoint` only: torch, safetensors, xxhash, vLLM.
"""
