"""Low-rank adapters (LoRA): training, merging into the base model, and their files."""
