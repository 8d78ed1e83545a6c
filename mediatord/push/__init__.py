"""Wakes sleeping wallets through push services: registration, scheduling, and the services themselves."""
