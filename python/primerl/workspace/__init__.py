"""What `primerl lab setup` and `primerl env init` write: configs to start from, and environment packages."""
