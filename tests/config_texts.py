"""Small configs of a run in both forms, whose model is MODEL."""

SHORT = """\
model = "MODEL"
max_steps = 10
batch_size = 16
rollouts_per_example = 4

[sampling]
max_tokens = 64

[[env]]
id = "owner/reverse-text"
"""
FULL = """\
max_steps = 10

[model]
path = "MODEL"

[orchestrator]
batch_size = 16
group_size = 4

[[orchestrator.train.env]]
id = "reverse-text"
"""
