"""`primerl gepa`: a better system prompt for an environment, by the package `gepa`.

`search` is the run, `rollouts` measures a prompt on examples by `primerl eval`, `teacher` asks the reflection model,
`files` writes what is left.
"""
