"""The papers' experiments, one module each, one command each: `dualform study NAME`."""
