"""The keys as text: help, `primerl config explain`, the reference page."""
