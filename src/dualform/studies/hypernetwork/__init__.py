"""Does attention as a hypernetwork generalize to new combinations of known rules?

`dualform study hypernetwork`.
"""

from dualform.studies.hypernetwork.setting import SETTINGS, HypernetworkSetting, TrainingSetting
from dualform.studies.hypernetwork.study import run_study

__all__ = ["SETTINGS", "HypernetworkSetting", "TrainingSetting", "run_study"]
