"""Sets of trainings: a queue that works through a suite, the ledger of results, the demo."""
