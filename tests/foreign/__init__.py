"""Wallets of other authors: drivers that run in environments of their own, and what is checked against them."""
