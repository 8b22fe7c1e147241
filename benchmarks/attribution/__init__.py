"""Data attribution against its peers: `python -m benchmarks.attribution`."""
