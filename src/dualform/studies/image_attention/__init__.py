"""A small vision transformer with each attention layer: `dualform study image-attention`."""

from dualform.studies.image_attention.study import run_study
from dualform.studies.image_attention.training import SETTINGS, ImageSetting

__all__ = ["SETTINGS", "ImageSetting", "run_study"]
