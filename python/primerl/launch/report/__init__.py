"""What a launcher shows: console, status, notices, scores of evaluations, the summary."""
