"""Muon (Jordan et al. 2024): a matrix moves along its momentum made orthogonal, all singular values equal.

The momentum M = U S V' is replaced by about U V'. Polar Express (Amsel et al. 2025) comes near to it with products of
matrices alone: five polynomials of degree five, each the best one for what its predecessors leave, in bf16. Singular
values from a thousandth of the norm on end between 0.86 and 1.14, which is near enough for training.

A step of the hidden matrix W with the gradient G, in this order:
    M <- m·M + (1 - m)·G                     momentum, fp32
    U <- m·M + (1 - m)·G                     Nesterov's look ahead, rounded to bf16
    D <- orthogonal(U)·√max(1, rows/cols)    so that tall and wide matrices change an input's size alike
    W <- W - rate·(D + decay·W where D·W >= 0)    cautious weight decay (Chen et al. 2025)
With `beta2` the rows of D are also divided by the root of their mean squares over time, and the result is scaled back
to its norm (NorMuon, Li et al. 2025).

torch.optim.Muon has the first two and the factor, other polynomials (Jordan's, whose singular values end between 0.7
and 1.2), and a weight decay that is not cautious; tests compare it.
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
SAFETY = 1.02  # the norm of the first matrix is 1 / SAFETY
SMALLEST = 1e-20  # a norm, and a mean square: far below those of any gradient, so only zeros stay zeros

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
    scale: float = 1.0,
    polynomials: tuple[Polynomial, ...] = POLAR_EXPRESS,
    squared: Squared = squared,
) -> Tensor:
    """About scale·U V' of each matrix U S V': (N, rows, columns), however large S -> the same shape in bf16."""
    norms = (_norms(matrices) * SAFETY).clamp_min(SMALLEST)
    x = (matrices * norms.reciprocal().to(matrices.dtype)).bfloat16()
    tall = x.size(-2) > x.size(-1)
    if tall:
        x = x.mT
    *first, last = polynomials
    for polynomial in (*first, (scale * last[0], scale * last[1], scale * last[2])):
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


def to_directions_(
    matrices: Mapping[str, Tensor],
    squares: Mapping[str, Tensor] | None = None,
    new: Tensor | float = 0.0,
    squared: Squared = squared,
) -> None:
    """Replace matrices (rows, columns) in bf16, by parameter name, by the directions D of their parameters.

    squares: the rows' mean squares over time (rows,) fp32, which this changes, for NorMuon; None: without.
    new: the weight of this step in them, 1 - beta2. squared: a faster function of the same meaning.
    """
    shapes: dict[torch.Size, list[tuple[Tensor, Tensor]]] = {}
    for name, matrix in matrices.items():
        cuts = parts_of(name, *matrix.shape)
        rows = squares[name] if squares is not None else matrix[:, 0]  # unused
        for pair in zip(matrix.split(cuts), rows.split(cuts), strict=True):
            shapes.setdefault(pair[0].shape, []).append(pair)
    for shape, pairs in shapes.items():
        at_once = max(1, BATCH_ELEMENTS // shape.numel())
        scale = sqrt(max(1.0, shape[0] / shape[1]))
        for first in range(0, len(pairs), at_once):
            parts, rows_of_parts = zip(*pairs[first : first + at_once], strict=True)
            directions = orthogonal(torch.stack(parts), scale, squared=squared)
            if squares is not None:
                over_time = torch.stack(rows_of_parts)
                directions = _even_rows(directions, over_time, new)
                torch._foreach_copy_(rows_of_parts, over_time.unbind())
            torch._foreach_copy_(parts, directions.unbind())


def _even_rows(directions: Tensor, squares: Tensor, new: Tensor | float) -> Tensor:
    """NorMuon: (N, rows, columns) with rows divided by the roots of `squares` (N, rows), which get this step's."""
    now = directions.float().square().mean(-1)
    squares.lerp_(now, torch.as_tensor(new, dtype=torch.float32, device=now.device))
    even = directions / squares.clamp_min(SMALLEST).sqrt()[..., None]
    before, after = (_norms(each) for each in (directions, even))
    return (even * (before / after.clamp_min(SMALLEST))).bfloat16()


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
