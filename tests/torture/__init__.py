"""Random faults under load, chosen by a seed, with ledgers reconciled after each."""
