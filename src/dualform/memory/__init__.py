"""y(x) = y0(x) + Σ_t κ(k_t, x) v_t: a layer is a memory of keys and values, read by a kernel.

`Memory` is the dual form (attention over the stored pairs), `PrimalMemory` holds the same numbers
as weights.
The share of the start, y0, is the caller's: a memory holds what was learned or given since.

>>> import torch
>>> from dualform.memory import Memory
>>> inputs = torch.tensor([[1.0, 0.0], [1.0, 2.0]])     # what a linear layer was trained on
>>> errors = torch.tensor([[3.0], [-1.0]])              # and what each sample asked it to change
>>> memory = Memory(keys=inputs, values=errors)
>>> memory.read(torch.tensor([[1.0, 1.0]]))             # (1·3) + (3·-1)
tensor([[0.]])
>>> memory.primal().W                                   # Σ_t v_t k_tᵀ, the weights it made
tensor([[ 2., -2.]])
"""

from dualform.memory.kernels import (
    Cosine,
    Dot,
    EluPlusOne,
    Exponential,
    FeatureMap,
    Kernel,
    Polynomial,
    Relu,
)
from dualform.memory.memory import Memory, PrimalMemory

__all__ = [
    "Cosine",
    "Dot",
    "EluPlusOne",
    "Exponential",
    "FeatureMap",
    "Kernel",
    "Memory",
    "Polynomial",
    "PrimalMemory",
    "Relu",
]
