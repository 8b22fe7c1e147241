"""Experiments, one a module and one a command: `dualform study NAME`."""
