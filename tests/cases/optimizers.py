"""Optimizers by name, each with a rate that changes weights appreciably in a few steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer


def packaged() -> ModuleType:
    """The package with Shampoo and SOAP; it takes a second to import."""
    return import_module("pytorch_optimizer")


OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], Optimizer]] = {
    "SGD": lambda p: optim.SGD(p, lr=0.3),
    "SGD, Nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD, fused": lambda p: optim.SGD(p, lr=0.2, momentum=0.5, dampening=0.1, fused=True),
    "Adam": lambda p: optim.Adam(p, lr=0.1, foreach=False),
    "Adam, foreach": lambda p: optim.Adam(p, lr=0.1, weight_decay=0.01, foreach=True),
    "AdamW, amsgrad": lambda p: optim.AdamW(p, lr=0.1, amsgrad=True),
    "AdamW, fused": lambda p: optim.AdamW(p, lr=0.1, fused=True),
    "NAdam": lambda p: optim.NAdam(p, lr=0.1),
    "RAdam": lambda p: optim.RAdam(p, lr=0.3),
    "Adamax": lambda p: optim.Adamax(p, lr=0.1),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.02, centered=True, momentum=0.5),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.1),
    "Adadelta": lambda p: optim.Adadelta(p, lr=1.0, eps=1e-2),
    "Adafactor": lambda p: optim.Adafactor(p, lr=0.1),
    "ASGD": lambda p: optim.ASGD(p, lr=0.3),
    "Rprop": lambda p: optim.Rprop(p, lr=0.05),
    "Lion": lambda p: import_module("lion_pytorch").Lion(p, lr=0.1, weight_decay=0.01),
    "Muon": lambda p: optim.Muon(p, lr=0.1),
    "Shampoo": lambda p: packaged().Shampoo(p, lr=1.0, matrix_eps=40.0),
    "SOAP": lambda p: packaged().SOAP(p, lr=0.1, eps=0.03, precondition_frequency=2),
}

if find_spec("lion_pytorch") is None:  # a package of its own
    del OPTIMIZERS["Lion"]
if find_spec("pytorch_optimizer") is None:  # likewise
    del OPTIMIZERS["Shampoo"], OPTIMIZERS["SOAP"]
if not hasattr(optim, "Muon"):  # new in torch 2.9
    del OPTIMIZERS["Muon"]

LOOSER = {"Muon": {torch.float32: 1e-2, torch.float64: 5e-2}}
"""Remainders that are larger for a known cause: torch's Newton–Schulz computes in bfloat16."""


def trained(model: nn.Module) -> list[nn.Parameter]:
    """What an optimizer is given."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def takes(optimizer: str, model: nn.Module) -> bool:
    """Whether an optimizer trains the model's parameters; Muon takes matrices only."""
    return optimizer != "Muon" or all(parameter.ndim == 2 for parameter in trained(model))
