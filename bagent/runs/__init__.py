"""How do the rooms make one run? Options, run directory, servers, signals, the end."""
