"""What every process of primerl sets up for itself. Standard library only."""
