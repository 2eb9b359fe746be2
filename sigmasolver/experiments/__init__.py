"""Sets of trainings: a queue that works through a suite and the ledger of results."""
