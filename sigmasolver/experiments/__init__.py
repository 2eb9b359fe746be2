"""Sets of training runs: a queue that works through a suite and the ledger of results."""
