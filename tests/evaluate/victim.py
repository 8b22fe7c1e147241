"""Retrains with two workers until it is killed; run by test_retraining in a process of its own."""

import sys

from tests.evaluate.tasks import SAMPLES, slow_ridge

from dualform.evaluate import Retraining

if __name__ == "__main__":
    Retraining(slow_ridge, SAMPLES, sys.argv[1], subsets=100, seeds=2, workers=2).run()
