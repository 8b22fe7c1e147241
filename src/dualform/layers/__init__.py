"""One file per kind of layer: which torch functions it is, and what rows their calls leave."""

from dualform.layers.composite import AttentionForward
from dualform.layers.conv import Conv, ConvTranspose
from dualform.layers.derived import SpectralNorm, WeightNorm
from dualform.layers.elementwise import Expansion, Offset, Repetition, Scale
from dualform.layers.embedding import Embedding, EmbeddingBag, Indexing
from dualform.layers.experts import GroupedProduct
from dualform.layers.linear import Linear, MatrixProduct, matrix_use
from dualform.layers.norms import ChannelNorm, LayerNorm
from dualform.layers.product import BatchedProduct, Bilinear, Einsum
from dualform.layers.recurrent import Recurrent
from dualform.layers.rows import expand, inner_products, positions, sample_major
from dualform.layers.use import (
    Finder,
    Found,
    Function,
    LayerKind,
    Rows,
    Seen,
    Site,
    Use,
    is_single,
    named,
)
from dualform.layers.watching import (
    Hook,
    RowCollector,
    SampleRows,
    Watching,
    first_tensor,
    is_scripted,
    packing_order,
    shared_labels,
    stream_name,
    tensors_in,
    usual_axis,
    when_errors_come,
)

KINDS: tuple[LayerKind, ...] = (
    Linear(),
    MatrixProduct(),
    BatchedProduct(),
    Einsum(),
    GroupedProduct(),
    Bilinear(),
    Conv(),
    ConvTranspose(),
    Embedding(),
    EmbeddingBag(),
    Indexing(),
    LayerNorm(),
    ChannelNorm(),
    Offset(),
    Scale(),
    Expansion(),
    Repetition(),
    Recurrent(),
    WeightNorm(),
    SpectralNorm(),
    AttentionForward(),
)


def kinds() -> dict[Function, LayerKind]:
    """The kind that each torch function belongs to.

    >>> import torch
    >>> type(kinds()[torch.conv2d]).__name__
    'Conv'
    """
    return {function: kind for kind in KINDS for function in kind.functions}


__all__ = [
    "KINDS",
    "Finder",
    "Found",
    "Hook",
    "LayerKind",
    "RowCollector",
    "Rows",
    "SampleRows",
    "Seen",
    "Site",
    "Use",
    "Watching",
    "expand",
    "first_tensor",
    "inner_products",
    "is_scripted",
    "is_single",
    "kinds",
    "matrix_use",
    "named",
    "packing_order",
    "positions",
    "sample_major",
    "shared_labels",
    "stream_name",
    "tensors_in",
    "usual_axis",
    "when_errors_come",
]
