"""The loops: policy training and supervised fine-tuning, what they report and how they end."""
