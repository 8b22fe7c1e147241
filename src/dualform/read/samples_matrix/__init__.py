"""The ledger as a matrix, samples × parameters; README.md tells the story."""
