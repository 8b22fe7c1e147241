"""Time series of the UEA archive with each attention layer: `dualform study uea`."""

from dualform.studies.uea.study import run_study
from dualform.studies.uea.training import SETTINGS, UeaSetting

__all__ = ["SETTINGS", "UeaSetting", "run_study"]
