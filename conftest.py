"""What all tests share: one thread each, and no adapter whose package is not installed."""

import os
from importlib.util import find_spec

import torch

collect_ignore = [] if find_spec("quanda") else ["src/dualform/evaluate/quanda.py"]

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start
torch.set_num_threads(1)  # tests run side by side; threads of each would wait for the others
