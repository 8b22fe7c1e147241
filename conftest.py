"""What pytest leaves out: an adapter whose package is not installed."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("quanda") else ["src/dualform/evaluate/quanda.py"]
