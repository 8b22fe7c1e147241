"""Names that other packages keep to themselves, and that dualform cannot do without.

No other file of dualform uses a private name of another package. Each name stands here once, with
what it is for and what would replace it. `NAMES` says on which public releases each was tried, from
the lowest to the highest (`make test-lowest` tries the lowest). `tests/test_private.py` says which
name an installed release does not have.
"""

from __future__ import annotations

import atexit
import operator
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import Node
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

__all__ = ["TorchDispatchMode", "tree_flatten", "tree_map", "tree_unflatten"]

TORCH = "torch 2.8.0 to 2.15.0"
NAMES = {
    "torch.utils._python_dispatch.TorchDispatchMode": TORCH,
    "torch.utils._python_dispatch._disable_current_modes": TORCH,
    "torch.utils._pytree.tree_flatten": TORCH,
    "torch.utils._pytree.tree_map": TORCH,
    "torch.utils._pytree.tree_unflatten": TORCH,
    "torch._C._are_functorch_transforms_active": TORCH,
    "torch._C._current_graph_task_id": TORCH,
    "torch._C._will_engine_execute_node": TORCH,
    "torch._dynamo": TORCH,
    "torch._dynamo.exc.TorchDynamoException": "torch 2.13.0",
    "torch._higher_order_ops.wrap.tag_activation_checkpoint": "torch 2.13.0",
    "torch._grouped_mm": TORCH,
    "torch._standard_gamma": TORCH,
    "torch._weight_norm": TORCH,
    "torch.ops.aten._flash_attention_forward": TORCH,
    "torch.autograd.Variable._execution_engine": TORCH,
    "torch.autograd.graph.Node._raw_saved_result3": TORCH,
    "torch.Tensor._backward_hooks": TORCH,
    "torch.Tensor._base": TORCH,
    "torch.Tensor._indices": TORCH,
    "torch.Tensor._values": TORCH,
    "torch.Tensor._version": TORCH,
    "torch.UntypedStorage._cdata": TORCH,
    "torch._ops.OpOverload._schema": TORCH,
    "torch.nn.Module._compiled_call_impl": TORCH,
    "torch.nn.Module._parameters": TORCH,
    "torch.distributed.algorithms.join.Joinable._join_config": TORCH,
    "torch.nn.modules.batchnorm._BatchNorm": TORCH,
    "torch.nn.modules.dropout._DropoutNd": TORCH,
    "torch._dynamo.eval_frame.OptimizedModule._orig_mod": TORCH,
    "torch._dynamo.eval_frame.OptimizedModule.dynamo_ctx": "torch 2.11.0 to 2.13.0",
    "torch.utils.data.DataLoader._iterator": TORCH,
    "transformers.PreTrainedConfig._attn_implementation": "transformers 5.22.2",
    "transformers.models.llama.modeling_llama.ALL_ATTENTION_FUNCTIONS": "transformers 5.22.2",
    "lightning.LightningModule._compiler_ctx": "lightning 2.6.6",
    "lion_pytorch.Lion._init_lr": "lion-pytorch 0.2.5",
    "threading._register_atexit": "Python 3.11",
}
"""Each private name, with the public releases that it was tried on."""


# --- functions of torch -----------------------------------------------------------------------


grouped_product: Callable[..., Tensor] = torch._grouped_mm
"""`F.grouped_mm` hands its whole work to it, so it is what a mode sees. Public: nothing."""
weight_norm: Callable[..., Tensor] = torch._weight_norm
"""The same for `nn.utils.parametrizations.weight_norm`. Public: nothing."""

in_function_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Whether `torch.func` is transforming: fused kernels have no rules for it. Public: nothing."""
current_backward: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward pass that is running; -1 where none is. Public: nothing."""
will_execute: Callable[[Node], bool] = torch._C._will_engine_execute_node
"""Whether the backward pass that is running will reach a node. Public: nothing."""
standard_gamma: Callable[..., Tensor] = torch._standard_gamma
"""Gamma numbers from a generator of one's own. Public: `torch.distributions.Gamma`, without one."""
without_modes: Callable[[], Any] = _disable_current_modes
"""What is computed inside is seen by no mode. Public: nothing; TorchDispatchMode is documented."""


def at_backward_end(action: Callable[[], None]) -> None:
    """Has something run when the backward pass that is running is over. Public: nothing."""
    torch.autograd.Variable._execution_engine.queue_callback(action)


def flash_attention(*args: Any, **options: Any) -> Any:
    """Attention of packed sequences. Public: `F.scaled_dot_product_attention` of nested tensors."""
    return torch.ops.aten._flash_attention_forward(*args, **options)


# --- attributes of torch's objects ------------------------------------------------------------


version_of: Callable[[Tensor], int] = operator.attrgetter("_version")
"""How often a tensor was changed in place. Public: nothing."""


def base_of(tensor: Any) -> Tensor | None:
    """The tensor that another is a view of, or None. Public: nothing.

    >>> x = torch.zeros(2)
    >>> base_of(x[:1]) is x, base_of(x), base_of("no tensor")
    (True, None, None)
    """
    return getattr(tensor, "_base", None)


def has_hooks(tensor: Tensor) -> bool:
    """Whether `register_hook` was called on a tensor. Public: nothing.

    >>> x = torch.zeros(2, requires_grad=True)
    >>> before, handle = has_hooks(x), x.register_hook(print)
    >>> before, has_hooks(x)
    (False, True)
    """
    return bool(tensor._backward_hooks)


def saved_reserve(node: Node | None) -> Any:
    """What cuDNN's recurrent layers keep for their backward pass, or None. Public: nothing.

    `data` is the memory, as long as the node holds it; `unpack_hook` is set where it does not.

    >>> saved_reserve(torch.ones(1, requires_grad=True).exp().grad_fn) is None
    True
    """
    is_cudnn = node is not None and node.name() == "CudnnRnnBackward0"
    return getattr(node, "_raw_saved_result3", None) if is_cudnn else None


def sparse_parts(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Places and values, where places may repeat. Public: the same of a coalesced tensor only.

    >>> [part.tolist() for part in sparse_parts(torch.tensor([0.0, 7.0]).to_sparse())]
    [[[1]], [7.0]]
    """
    return tensor._indices(), tensor._values()


def storage_key(storage: UntypedStorage) -> int:
    """One number for one piece of memory, also for empty ones. Public: `data_ptr`, else.

    >>> x = torch.zeros(2)
    >>> storage_key(x.untyped_storage()) == storage_key(x[1:].untyped_storage())
    True
    """
    return int(storage._cdata)


def schema_of(operation: Any) -> Any:
    """Arguments and results of an operation, and which it changes. Public: nothing.

    >>> [argument.name for argument in schema_of(torch.ops.aten.relu.default).arguments]
    ['self']
    """
    return operation._schema


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """A module's parameters, without those of its parts, and None for one that it does without.

    Public: `named_parameters(recurse=False)`, which takes ten times as long, at every call.

    >>> list(own_parameters(nn.Linear(2, 2, bias=False)))
    ['weight', 'bias']
    """
    return module._parameters


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile(module)` or `module.compile()` was called. Public: nothing.

    >>> is_compiled(nn.Linear(2, 2))
    False
    """
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def may_have_compiled() -> bool:
    """Whether torch's compiler was loaded: else nothing is compiled. Public: nothing.

    >>> isinstance(may_have_compiled(), bool)
    True
    """
    return "torch._dynamo" in sys.modules


def before_compile(module: nn.Module) -> nn.Module:
    """The module that was given to `torch.compile`, or the module itself. Public: nothing.

    >>> module = nn.Linear(2, 2)
    >>> before_compile(module) is module
    True
    """
    inner: nn.Module = getattr(module, "_orig_mod", module)
    return inner


def is_joining(module: Any) -> bool:
    """Whether a `DistributedDataParallel` is inside of its `join()`. Public: nothing.

    >>> is_joining(nn.Linear(2, 2))
    False
    """
    joining = getattr(module, "_join_config", None)
    return joining is not None and bool(joining.enable)


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """What runs in place of a module since `module.compile()`, or None. Public: nothing.

    >>> compiled_call(nn.Linear(2, 2)) is None
    True
    """
    return module._compiled_call_impl


def compiled_like(module: nn.Module, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function, compiled as `torch.compile` compiled a module. Public: nothing.

    Its code is a copy: else torch would count it with what was compiled of other modules.
    """
    function.__code__ = function.__code__.replace()
    compiled: Callable[..., Any] = module.dynamo_ctx(function)  # type: ignore[operator]
    return compiled


def set_compiled_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Has something else run in its place. Public: nothing.

    >>> module = nn.Linear(2, 2)
    >>> set_compiled_call(module, lambda x: "ran"); module(None)
    'ran'
    """
    module._compiled_call_impl = call


def is_one_graph(module: nn.Module) -> bool:
    """Whether `torch.compile(module, fullgraph=True)` made it, as far as that is known.

    Public: nothing. Of `module.compile()` it is not known.

    >>> is_one_graph(nn.Linear(2, 2))
    False
    """
    return bool(getattr(getattr(module, "dynamo_ctx", None), "fullgraph", False))


def uses_cuda_graphs(module: nn.Module) -> bool:
    """Whether a compiled module writes into the same memory at every call. Public: nothing.

    >>> uses_cuda_graphs(nn.Linear(2, 2))
    False
    """
    made_by = module if hasattr(module, "_orig_mod") else module._compiled_call_impl
    settings = getattr(made_by, "get_compiler_config", lambda: None)()
    return bool(settings and settings.get("triton.cudagraphs"))


def checkpoint_in_graphs() -> Any:
    """What torch.utils.checkpoint is to a mode while torch compiles. Public: nothing."""
    from torch._higher_order_ops.wrap import tag_activation_checkpoint

    return tag_activation_checkpoint


def compiler_error() -> type[Exception]:
    """What torch raises where it cannot compile. Public: nothing."""
    from torch._dynamo.exc import TorchDynamoException

    return TorchDynamoException


DROPOUT = nn.modules.dropout._DropoutNd
"""What all dropout layers are. Public: a list of them, one class for each dimension."""
BATCH_NORM = nn.modules.batchnorm._BatchNorm
"""What all batch norms are, SyncBatchNorm too. Public: a list of them."""
LOADER_ITERATOR = "_iterator"
"""Where a DataLoader keeps its workers from one epoch to the next. Public: nothing."""


# --- other packages ---------------------------------------------------------------------------

ATTENTION_REGISTRY = "ALL_ATTENTION_FUNCTIONS"
"""What models of transformers call their table of attention functions. Public: nothing."""


def attention_of(config: Any) -> str:
    """The attention that a model of transformers was asked to use. Public: nothing."""
    return str(config._attn_implementation)


def is_compiled_by_lightning(module: Any) -> bool:
    """Whether a LightningModule was given to `torch.compile`. Public: nothing.

    >>> is_compiled_by_lightning(nn.Linear(2, 2))
    False
    """
    return getattr(module, "_compiler_ctx", None) is not None


def first_lr_of(optimizer: Any) -> Any:
    """The learning rate that lion-pytorch was made with, or None. Public: nothing."""
    return getattr(optimizer, "_init_lr", None)


at_exit: Callable[..., Any] = getattr(threading, "_register_atexit", atexit.register)
"""Calls a function when Python ends, before its thread pools do. Public: `atexit`, which is late.
"""
