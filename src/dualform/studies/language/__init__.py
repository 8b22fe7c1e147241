"""Which training positions a next-token prediction uses: `dualform study language`."""

from dualform.studies.language.study import run_study
from dualform.studies.language.tasks import SETTINGS, LanguageSetting, LanguageTask

__all__ = ["SETTINGS", "LanguageSetting", "LanguageTask", "run_study"]
