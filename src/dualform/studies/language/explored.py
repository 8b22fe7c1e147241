"""The models of the study for the explorer, which brings the weights of a run.

The text in the folder DUALFORM_DATA says how many tokens there are.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from dualform.studies.data import data_folder
from dualform.studies.language.tasks import SETTINGS, load_task


def build_model(setting: str, name: str) -> nn.Module:
    """A model of a setting, by the name of both."""
    chosen = SETTINGS[setting]
    task = chosen.tasks[name]
    return task.make_model(load_task(data_folder(None), task, chosen.context).words)


small_fables = partial(build_model, "small", "fables")
small_wikitext = partial(build_model, "small", "wikitext")
small_shakespeare = partial(build_model, "small", "shakespeare")
paper_fables = partial(build_model, "paper", "fables")
paper_wikitext = partial(build_model, "paper", "wikitext")
paper_shakespeare = partial(build_model, "paper", "shakespeare")
