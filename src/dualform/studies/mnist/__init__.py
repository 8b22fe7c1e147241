"""Which training images a digit attends to, and whether they say its class: `study mnist`."""

from dualform.studies.mnist.setting import SETTINGS, MnistSetting
from dualform.studies.mnist.study import (
    paper_cifar10_model,
    paper_model,
    run_study,
    small_cifar10_model,
    small_model,
)

__all__ = [
    "SETTINGS",
    "MnistSetting",
    "paper_cifar10_model",
    "paper_model",
    "run_study",
    "small_cifar10_model",
    "small_model",
]
