"""Speed, measured as ratios of runs interleaved in one process: `python -m benchmarks`."""
