"""Several processes as one run: collectives, sharded weights, and a watchdog."""
