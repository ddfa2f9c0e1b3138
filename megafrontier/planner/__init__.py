"""Memory and time of a step before any job runs: the engine itself, on a clock."""
