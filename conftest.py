"""What all tests share: one thread, the same numbers, no adapter without its package."""

import os
from importlib.util import find_spec

import pytest
import torch
from hypothesis import settings

collect_ignore = [] if find_spec("quanda") else ["src/dualform/evaluate/quanda.py"]

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start
torch.set_num_threads(1)  # tests run side by side; threads of each would wait for the others

settings.register_profile("same", derandomize=True, deadline=None)  # on a busy machine, too
settings.load_profile("same")


def pytest_sessionstart() -> None:
    """Imports the package as users do, or doctests of `dualform.record` would see the module."""
    import dualform  # noqa: F401


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fixtures draw the same numbers, whichever tests came before."""
    torch.manual_seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """And so do tests, whichever fixtures were made for them."""
    torch.manual_seed(0)
