"""Drivers for third-party wallets, which run in their own environments, and the checks against them."""
