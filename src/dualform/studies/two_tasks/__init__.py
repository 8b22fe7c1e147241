"""Digits and garments, together and one after the other: `dualform study two-tasks`."""

from dualform.studies.two_tasks.study import paper_model, run_study, small_model
from dualform.studies.two_tasks.tasks import SETTINGS, TwoTasksSetting

__all__ = ["SETTINGS", "TwoTasksSetting", "paper_model", "run_study", "small_model"]
