"""Why settings of verifiers' evaluations have no counterpart, as flags and in files."""

COLUMNS = "results.jsonl has messages, metrics and errors of each rollout; omit it"
UPLOAD = "primerl uploads no results; results.jsonl is in the evaluation's folder"
RESUME = "the same command with the folder as --output-dir resumes an evaluation"
HEADERS = "primerl sends a key and no headers of your own; omit it"
RETRIES = "a rollout that fails is tried once more, and --retry-errors measures what failed again; omit it"
CLIENT = "primerl asks servers by openai_chat_completions only; omit it"
