"""From the config of a run to one resolved file for each process."""
