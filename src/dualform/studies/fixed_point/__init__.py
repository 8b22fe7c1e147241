"""Does iterated attention converge to a Gaussian? `dualform study fixed-point`."""

from dualform.studies.fixed_point.results import Study
from dualform.studies.fixed_point.study import run_study, save_study

__all__ = ["Study", "run_study", "save_study"]
