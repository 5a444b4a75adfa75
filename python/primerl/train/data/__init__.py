"""Training data: batches from the orchestrator, and rows of datasets as packed tokens."""
