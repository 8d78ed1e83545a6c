"""Writing results: the warehouse of tables, publication of runs, retention."""
