"""Robust attention on clean and contaminated images: `dualform study robust`."""

from dualform.studies.robust.setting import SETTINGS, RobustSetting
from dualform.studies.robust.study import run_study

__all__ = ["SETTINGS", "RobustSetting", "run_study"]
