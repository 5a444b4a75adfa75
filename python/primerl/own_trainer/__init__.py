"""Training loops of users: in the process of the orchestrator (`primerl.Run`), or with a run that was started without a
trainer (`primerl.connect`).

| module | what |
|---|---|
| `loop` | batches in, weights out, checkpoints: the same for both |
| `policy` | what can be published: a model with the tensors of the run's |
| `given_metrics` | what a script gives to be noted of a step |
| `lifetime`, `outcome` | when a run can be used, and how it ended |
| `checkpoints` | what a script saves, proved before it is used again |
| `connection` | a script in a process of its own |
| `errors` | how errors of the user's input are shown |
"""
