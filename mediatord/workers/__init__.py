"""Several processes on one host that share listeners and a store (`workers: N`)."""
