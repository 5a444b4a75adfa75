"""The loss of a step: its components, and the log-probabilities they need."""
