"""Nightly batch jobs over the event logs of a mediator: traffic, latency, losses, errors, capacity."""
