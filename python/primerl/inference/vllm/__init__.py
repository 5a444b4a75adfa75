"""vLLM as the engine of a run: starting its server (`process`), and what runs inside its processes (`serve`, `worker`).

vLLM may be installed in another environment than the rest. Its processes get this package from this folder, whatever is
installed there (`serve`). Of it they import `worker`, what that needs here (`checkpoint`, `computed`, `adapters`), and
`weights`, `adapters` and `settings` of `primerl.train`: torch, safetensors, xxhash, vLLM.
"""
