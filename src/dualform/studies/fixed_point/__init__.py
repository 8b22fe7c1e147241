"""Does iterated attention converge to a Gaussian? `dualform study fixed-point`."""

from dualform.studies.fixed_point.study import Study, run_study

__all__ = ["Study", "run_study"]
