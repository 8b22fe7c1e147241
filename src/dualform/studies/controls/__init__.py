"""What the dual-form paper did not check: `dualform study controls`."""

from dualform.studies.controls.experiment import SETTINGS, ControlsSetting
from dualform.studies.controls.study import middle_model, paper_model, run_study, small_model

__all__ = [
    "SETTINGS",
    "ControlsSetting",
    "middle_model",
    "paper_model",
    "run_study",
    "small_model",
]
