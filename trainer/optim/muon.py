"""Muon (Jordan et al. 2024): a matrix moves along its momentum made orthogonal, all singular values equal.

The momentum M = U S V' is replaced by about U V'. Polar Express (Amsel et al. 2025) comes near to it with products of
matrices alone: five polynomials of degree five, each the best one for what its predecessors leave, in bf16. Singular
values from a thousandth of the norm on end between 0.86 and 1.14, which is near enough for training.

A step of the hidden matrix W with the gradient G, in this order:
    M <- m·M + (1 - m)·G                     momentum, fp32
    U <- m·M + (1 - m)·G                     Nesterov's look ahead, rounded to bf16
    O <- orthogonal(U)                       of rows made equally long (MuonEq, arXiv 2603.28254), to the norm that an
                                             exact U V' has (Muon+, arXiv 2602.21545)
    D <- f·even(O)                           f = √max(1, rows/cols): tall and wide matrices change an input's size alike
    W <- W - rate·(D + f·decay·W where D·W >= 0)    cautious weight decay (Chen et al. 2025)
even(O): rows, or of a wide matrix columns, divided by the roots of their mean squares over time, which decay by 0.9;
the result has the norm that it had (NorMuon, Li et al. 2025).

All of it is as in nanochat's optim.py (July 2026). torch.optim.Muon has the first two and f, other polynomials
(Jordan's, whose singular values end between 0.7 and 1.2), and a weight decay that is not cautious. nanochat's norms
have a margin of 1e-6 before the polynomials, and ours do not, so that the scale of a gradient changes nothing.
"""

from collections.abc import Callable, Mapping
from math import sqrt

import torch
from torch import Tensor

# (a, b, c) of p(x) = a·x + b·x³ + c·x⁵, as Amsel et al. publish them for five steps, with a margin of 2% for the errors
# of bf16.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
SAFETY = 1.01  # the norm of the first matrix is 1 / SAFETY
SMALLEST = 1e-20  # a norm: far below those of any gradient, so only zeros stay zeros
BETA2, SMALLEST_SQUARE = 0.9, 1e-10  # of the mean squares over time

BATCH_ELEMENTS = 1 << 26  # of matrices that are made orthogonal at once: 128 MiB of bf16, and three copies of it

Polynomial = tuple[float, float, float]
Squared = Callable[[Tensor, Polynomial | None], Tensor]


def squared(x: Tensor, polynomial: Polynomial | None) -> Tensor:
    """The xx' of matrices x: (N, n, m) -> (N, n, n). With (a, b, c) and symmetric x: a·I + b·x + c·xx'."""
    if polynomial is None:
        return x @ x.mT
    a, b, c = polynomial
    result = torch.baddbmm(x, x, x, beta=b, alpha=c)
    result.diagonal(dim1=-2, dim2=-1).add_(a)
    return result


def orthogonal(
    matrices: Tensor,
    polynomials: tuple[Polynomial, ...] = POLAR_EXPRESS,
    squared: Squared = squared,
) -> Tensor:
    """About U V' of each matrix, its rows made equally long, U S V': (N, rows, columns) -> the same shape in bf16."""
    norms = (_row_norms(matrices) * (SAFETY * sqrt(matrices.size(-2)))).clamp_min(SMALLEST)
    x = (matrices * norms.reciprocal().to(matrices.dtype)).bfloat16()
    tall = x.size(-2) > x.size(-1)
    if tall:
        x = x.mT
    for polynomial in polynomials:
        x = squared(squared(x, None), polynomial) @ x
    return x.mT if tall else x


def parts_of(name: str, rows: int, columns: int) -> list[int]:
    """The rows of each matrix that a hidden weight packs.

    attn.c_attn holds queries, keys and values below each other. They are three matrices to the model, whose gradients
    differ in size: as one, the largest of them would decide over the others' directions. Queries have as many rows as
    the model is wide; keys and values share the rest.
    """
    if not name.endswith("attn.c_attn.weight"):
        return [rows]
    others = (rows - columns) // 2
    return [columns, others, others]


def factor_of(name: str, rows: int, columns: int) -> float:
    """The f of a hidden weight, which is the f of each matrix that it packs."""
    return sqrt(max(1.0, parts_of(name, rows, columns)[0] / columns))


def to_directions_(
    matrices: Mapping[str, Tensor],
    squares: Mapping[str, Tensor],
    new: Tensor | float = 1 - BETA2,
    squared: Squared = squared,
) -> None:
    """Replace matrices (rows, columns) in bf16, by parameter name, by the directions D of their parameters.

    squares: the mean squares over time of rows, or of a wide matrix columns, (max(rows, columns),) fp32, which this
    changes. new: the weight of this step in them. squared: a faster function of the same meaning.
    """
    shapes: dict[torch.Size, list[tuple[Tensor, Tensor]]] = {}
    for name, matrix in matrices.items():
        cuts = parts_of(name, *matrix.shape)
        own = squares[name].split(cuts) if len(cuts) > 1 else (squares[name],)
        for pair in zip(matrix.split(cuts), own, strict=True):
            shapes.setdefault(pair[0].shape, []).append(pair)
    for shape, pairs in shapes.items():
        at_once = max(1, BATCH_ELEMENTS // shape.numel())
        for first in range(0, len(pairs), at_once):
            parts, of_parts = zip(*pairs[first : first + at_once], strict=True)
            over_time = torch.stack(of_parts)
            directions = _even(orthogonal(torch.stack(parts), squared=squared), over_time, new)
            torch._foreach_copy_(of_parts, over_time.unbind())
            torch._foreach_copy_(parts, directions.unbind())


def _even(orthogonal: Tensor, squares: Tensor, new: Tensor | float) -> Tensor:
    """Muon+, NorMuon and f: (N, rows, columns), by `squares` (N, max(rows, columns)), which get this step's."""
    rows, columns = orthogonal.shape[-2:]
    over, norm = (-1 if rows >= columns else -2), sqrt(min(rows, columns))
    exact = orthogonal.float()
    exact *= norm / _norms(exact).clamp_min(SMALLEST)
    squares.lerp_(exact.square().mean(over), torch.as_tensor(new, dtype=torch.float32, device=exact.device))
    exact *= squares.clamp_min(SMALLEST_SQUARE).rsqrt().unsqueeze(over)
    return (exact * (norm * sqrt(max(1.0, rows / columns)) / _norms(exact).clamp_min(SMALLEST))).bfloat16()


def _row_norms(matrices: Tensor) -> Tensor:
    return torch.linalg.vector_norm(matrices, dim=-1, keepdim=True, dtype=torch.float32)


def _norms(matrices: Tensor) -> Tensor:
    return torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True, dtype=torch.float32)


def look_ahead(momentum: Tensor, gradient: Tensor, m: float) -> Tensor:
    """Add a gradient to the momentum, fp32 of one shape, in place. Returns U in bf16."""
    momentum.lerp_(gradient, 1 - m)
    return gradient.lerp(momentum, m).bfloat16()


def move_(weights: Tensor, directions: Tensor, rate: Tensor | float, decay: float) -> None:
    """Move fp32 weights along directions (bf16) of their shape, in place."""
    along = directions.float()
    if decay:
        along = torch.where(along * weights >= 0, along + decay * weights, along)
    weights.sub_(along * rate)
