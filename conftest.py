"""What all tests share: one thread, examples that repeat, no adapter without its package."""

import os
from importlib.util import find_spec

import torch
from hypothesis import settings

collect_ignore = [] if find_spec("quanda") else ["src/dualform/evaluate/quanda.py"]

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start
torch.set_num_threads(1)  # tests run side by side; threads of each would wait for the others

settings.register_profile("same", derandomize=True)  # a commit passes or fails, and stays so
settings.load_profile("same")
