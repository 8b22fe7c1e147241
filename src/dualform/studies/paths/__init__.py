"""What attention paths tell: `dualform study paths`."""

from dualform.studies.paths.setting import SETTINGS, PathsSetting
from dualform.studies.paths.study import run_study

__all__ = ["SETTINGS", "PathsSetting", "run_study"]
