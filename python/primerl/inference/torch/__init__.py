"""The embedded engine: HTTP, batching and bookkeeping in Rust, one call to torch per step."""
