"""Nightly batch jobs over the daemon's event logs: what was carried, how fast, what was lost, what tomorrow needs."""
