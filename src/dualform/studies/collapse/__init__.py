"""Which masks, norms and widths let tokens become alike: `dualform study collapse`."""

from dualform.studies.collapse.setting import SETTINGS, CollapseSetting
from dualform.studies.collapse.study import run_study

__all__ = ["SETTINGS", "CollapseSetting", "run_study"]
