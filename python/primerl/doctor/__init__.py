"""`primerl doctor`: what this machine has, and what it means for a run.

| module | what it looks at |
|---|---|
| `finding` | what every check returns |
| `machine` | cores, memory, limits, control groups, GPUs and their driver |
| `packages` | versions that have to fit together, what is not installed, and what needs it |
| `folders` | folders that runs write to: whether they can, and the space that is left |
| `network` | ports, proxies, the hub, W&B, the variables of schedulers |

Nothing here imports torch, and nothing is changed: a file that is written to try a folder is removed again.
"""
