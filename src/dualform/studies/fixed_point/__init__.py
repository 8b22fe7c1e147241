"""Does iterated attention converge to a Gaussian? `dualform study fixed-point`."""

from dualform.studies.fixed_point.study import SETTINGS, FixedPointSetting, run_study

__all__ = ["SETTINGS", "FixedPointSetting", "run_study"]
