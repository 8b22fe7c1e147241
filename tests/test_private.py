"""Private names of other packages: which of them the installed releases do not have."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Joinable, JoinHook

from dualform import private
from dualform.owners import calls


class Uneven(Joinable):
    """Something that processes may leave early."""

    def __init__(self) -> None:
        super().__init__()

    join_device, join_process_group = torch.device("cpu"), None

    def join_hook(self, **given: Any) -> JoinHook:
        return JoinHook()


HELD: dict[str, Callable[[], Any]] = {
    "torch.UntypedStorage._cdata": lambda: torch.zeros(1).untyped_storage(),
    "torch._dynamo.eval_frame.OptimizedModule._orig_mod": lambda: torch.compile(nn.Linear(1, 1)),
    "torch._dynamo.eval_frame.OptimizedModule.dynamo_ctx": lambda: torch.compile(nn.Linear(1, 1)),
    "torch.autograd.graph.Node._raw_saved_result3": lambda: _recurrent_node(),
    "torch._ops.OpOverload._schema": lambda: torch.ops.aten.relu.default,
    "torch.distributed.algorithms.join.Joinable._join_config": lambda: Uneven(),
    "torch.nn.Module._parameters": lambda: nn.Linear(1, 1),
    "torch.utils.data.DataLoader._iterator": lambda: torch.utils.data.DataLoader([1]),
    "lightning.LightningModule._compiler_ctx": lambda: _made("lightning", "LightningModule"),
    "lion_pytorch.Lion._init_lr": lambda: _made("lion_pytorch", "Lion", [torch.ones(1)]),
    "transformers.PreTrainedConfig._attn_implementation": lambda: _made(
        "transformers", "PreTrainedConfig"
    ),
}
"""Something that has a name which its class does not have."""


def _made(module: str, name: str, *args: Any) -> Any:
    return getattr(importlib.import_module(module), name)(*args)


def _recurrent_node() -> Any:
    """The node of cuDNN's recurrent layers, which needs no device where tensors have no memory."""
    x, h, memory = (torch.zeros(n, 2, 4, device="meta", requires_grad=True) for n in (5, 1, 1))
    weights = [torch.zeros(16, 4, device="meta", requires_grad=True) for _ in range(2)]
    options = (2, 4, 0, 1, False, 0.0, True, False, [], None)
    return torch._cudnn_rnn(x, weights, 2, memory.detach().flatten(), h, h, *options)[0].grad_fn


def resolve(name: str) -> Any:
    """What a dotted name is; modules are imported on the way."""
    if name in HELD:
        return getattr(HELD[name](), name.rpartition(".")[2])
    found: Any = None
    for part in name.split("."):
        if found is None:
            found = importlib.import_module(part)
        else:
            if not hasattr(found, part):
                importlib.import_module(f"{found.__name__}.{part}")
            found = getattr(found, part)
    return found


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", private.NAMES)
def test_an_installed_release_has_the_name(name: str) -> None:
    package = name.partition(".")[0]
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    try:
        resolve(name)
    except (AttributeError, ImportError) as error:
        installed = "" if package == "threading" else version(package)
        tried = private.NAMES[name]
        pytest.fail(f"{package} {installed} has no {name}, which was tried on {tried}: {error}")


def test_every_private_name_is_listed() -> None:
    """What the file uses is what its table says."""
    assert private.__file__ is not None
    with open(private.__file__, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    ours = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    used = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    used |= {a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names}
    used |= {
        n.value
        for n in ast.walk(tree)
        if isinstance(n, ast.Constant) and str(n.value).isidentifier()
    }
    private_names = {name for name in map(str, used) if name.startswith("_") and "__" not in name}
    listed = {part for name in private.NAMES for part in name.split(".")}
    assert private_names - ours <= listed
    assert {name.rpartition(".")[2] for name in private.NAMES} - {"_dynamo"} <= used


def test_operations_of_the_tables_exist() -> None:
    """A renamed operation would no longer be treated with the care that its table asks for."""
    tables = calls.MOVING | calls.LOOKUPS | calls.CALLING | calls.BATCH_NORMS | calls.CHOOSING
    missing = {name for name in tables | calls.SHAPES_ONLY if not hasattr(torch.ops.aten, name)}
    assert missing == set()
