"""Everything in MongoDB, through txmongo."""
