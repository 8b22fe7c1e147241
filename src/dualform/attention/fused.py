"""When the fused kernels may be used: they know neither function transforms nor second
derivatives."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from dualform.private import in_function_transform

LOW = (torch.bfloat16, torch.float16)


@cache
def has_triton() -> bool:
    """Whether the kernels' language is installed.

    >>> isinstance(has_triton(), bool)
    True
    """
    return find_spec("triton") is not None


def can_fuse(q: Tensor, k: Tensor) -> bool:
    """Whether the fused kernels serve these tensors: 16-bit, on CUDA, outside of transforms.

    `torch.nn.attention.sdpa_kernel(SDPBackend.MATH)` turns them off, as it does torch's own.

    >>> can_fuse(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4))
    False
    """
    return (
        q.is_cuda
        and q.dtype in LOW
        and q.ndim == 4
        and q.shape[-3] == k.shape[-3]
        and k.shape[-2] > 1
        and q.shape[-1] % 8 == 0
        and q.shape[-1] <= 256
        and not torch.compiler.is_compiling()
        and not in_function_transform()
        and torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
        and has_triton()
    )
