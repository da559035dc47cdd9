"""Causal attention with an explicit backward pass, from packed queries, keys and values to packed gradients.

FLOPs a layer, counted in full: forward 4·T·C a token (QKᵀ and PV), backward 2.5 times that (both again, and three
gradients); the kernels compute only the causal half. Nothing of size T² reaches memory. The kernels are cuDNN's, which
on an H200 take 0.7 of the time of FlashAttention-2's. FlashAttention-2 runs where cuDNN's frontend has no graph or is
not installed, plain PyTorch on a CPU.

torch returns three separate gradients, and the next product needs them side by side: 12·M·C bytes of copying a layer,
604 MB at 124M and M=65536, 0.16 ms. cuDNN's own frontend takes the strides of every head, so its graphs, two for every
shape, write the packed tensor themselves. They also have a backward pass that adds up in a fixed order, which torch
does not offer: it costs 1% of a step and, at 124M, 1.5 GiB of scratch memory; FlashAttention-2 costs 5% and more.

A sliding window is a band of cuDNN's graph. Where cuDNN has none, plain PyTorch runs with a mask.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.models.language_model import band

ATEN = torch.ops.aten


@dataclass
class SavedAttention:
    """The tensors that the backward pass needs besides the packed input."""

    output: Tensor  # (B, H, T, D)
    rest: tuple[Any, ...]  # from the kernel that ran: log-sum-exp, random state


class Attention:
    """Attention of `n_head` heads over packed projections -> (B·T, C).

    The projections are (B·T, (n_head + 2·kv_heads)·D): queries, keys, values. Each of the `kv_heads` heads of keys and
    values serves n_head / kv_heads heads of queries; without `kv_heads`, one. With a `window`, a token sees that
    many tokens, itself among them (sliding windows, Beltagy et al. 2020). `scale`: of the products; None: D^-1/2.
    """

    def __init__(
        self,
        n_head: int,
        width: int,
        device: torch.device,
        deterministic: bool,
        kv_heads: int | None = None,
        window: int | None = None,
        scale: float | None = None,
    ) -> None:
        self.n_head, self.width, self.head, self.deterministic = n_head, width, width // n_head, deterministic
        self.kv_heads, self.window = kv_heads or n_head, window
        self.scale = scale or self.head**-0.5
        self.cudnn = _frontend() if device.type == "cuda" else None
        self.graphs: dict[tuple[int, int], Graphs | None] = {}
        self.kernel = "math" if device.type != "cuda" or window is not None else "flash"  # where cuDNN has no graph

    def forward(self, qkv: Tensor, B: int) -> tuple[Tensor, SavedAttention]:
        q, k, v = self._heads(qkv, B)
        rest: list[Any]
        if graphs := self._graphs(qkv, B):
            output, *rest = graphs.forward(q, k, v)
            return self._rows(output), SavedAttention(output, tuple(rest))
        k, v = self._repeated(k), self._repeated(v)
        if self.kernel == "flash":
            output, *rest = ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False, scale=self.scale)
        else:
            q, k, v = inputs = [t.detach().float().requires_grad_() for t in (q, k, v)]
            with torch.enable_grad():
                mask = None if self.window is None else band(q.size(2), self.window, q.device)
                exact = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=self.scale)
            output, rest = exact.detach().to(qkv.dtype), [exact, inputs]
        return self._rows(output), SavedAttention(output, tuple(rest))

    def backward(self, gradient: Tensor, qkv: Tensor, B: int, saved: SavedAttention) -> Tensor:
        """The gradient of the packed projections, (B·T, 3C), from that of the output, (B·T, C)."""
        q, k, v = self._heads(qkv, B)
        g = gradient.view(B, -1, self.n_head, self.head).transpose(1, 2)
        if graphs := self._graphs(qkv, B):
            packed = torch.empty_like(qkv)
            graphs.backward(q, k, v, saved.output, g, saved.rest[0], *self._heads(packed, B))
            return packed
        k, v = self._repeated(k), self._repeated(v)
        if self.kernel == "flash":
            lse, cum_q, cum_k, max_q, max_k, seed, offset = saved.rest[:7]
            gradients = ATEN._scaled_dot_product_flash_attention_backward(
                g, q, k, v, saved.output, lse, cum_q, cum_k, max_q, max_k, 0.0, True, seed, offset, scale=self.scale
            )
        else:
            exact, inputs = saved.rest
            gradients = torch.autograd.grad(exact, inputs, g.float())
        dq, dk, dv = gradients
        parts = (dq, self._summed(dk), self._summed(dv))
        return torch.cat([t.to(gradient.dtype).transpose(1, 2).reshape(len(gradient), -1) for t in parts], 1)

    def _heads(self, qkv: Tensor, B: int) -> list[Tensor]:
        """Views (B, H, T, D) of the packed queries, keys and values."""
        heads = qkv.view(B, -1, self.n_head + 2 * self.kv_heads, self.head).transpose(1, 2)
        return list(heads.split((self.n_head, self.kv_heads, self.kv_heads), 1))

    def _repeated(self, heads: Tensor) -> Tensor:
        """Keys or values for every head of queries: torch's kernels take no fewer."""
        return heads if self.kv_heads == self.n_head else heads.repeat_interleave(self.n_head // self.kv_heads, 1)

    def _summed(self, gradient: Tensor) -> Tensor:
        """The gradient of keys or values from that of the repeated ones."""
        if self.kv_heads == self.n_head:
            return gradient
        return gradient.unflatten(1, (self.kv_heads, -1)).sum(2, dtype=torch.float32)

    def _rows(self, heads: Tensor) -> Tensor:
        """(B, H, T, D) -> (B·T, C): a view, as the kernels keep the memory order of their inputs."""
        return heads.transpose(1, 2).reshape(-1, self.width)

    def refused(self) -> list[str]:
        """The shapes so far for which cuDNN has no graph, in a line each."""
        shapes = [shape for shape, graphs in self.graphs.items() if graphs is None]
        within = "" if self.window is None else f" in windows of {self.window}"
        return [
            f"cuDNN has no packed attention for {B} x {T} tokens{within}; torch's {self.kernel} kernel runs instead"
            for B, T in shapes
        ]

    def _graphs(self, qkv: Tensor, B: int) -> "Graphs | None":
        """cuDNN's graphs for this shape; None if it has none."""
        if self.cudnn is None:
            return None
        shape = (B, len(qkv) // B)
        if shape not in self.graphs:
            try:
                heads = self._heads(torch.empty_like(qkv, device="meta"), B)
                self.graphs[shape] = Graphs(self.cudnn, heads, qkv.device, self.deterministic, self.window, self.scale)
            except (self.cudnn.cudnnGraphNotSupportedError, RuntimeError) as error:
                # Re-raise out-of-memory errors; otherwise the choice of kernel would depend on free memory.
                if isinstance(error, torch.cuda.OutOfMemoryError) or "ALLOC_FAILED" in str(error):
                    raise torch.cuda.OutOfMemoryError(str(error)) from error
                # cuDNN has no kernel for this shape, such as one token, or is too old for the frontend.
                self.graphs[shape] = None
        return self.graphs[shape]


class Graphs:
    """Forward and backward graph of cuDNN for one shape: heads (B, H, T, D) with the strides of `packed`."""

    def __init__(
        self,
        cudnn: Any,
        packed: list[Tensor],
        device: torch.device,
        deterministic: bool,
        window: int | None,
        scale: float,
    ) -> None:
        self.cudnn, self.device = cudnn, device
        T = packed[0].size(2)
        options = {"attn_scale": scale, "use_causal_mask": True}
        if window is not None and window < T:
            options["diagonal_band_left_bound"] = window
        output, lse = self._outputs(packed[0])
        with torch.cuda.device(self.device):
            self.handle = cudnn.create_handle()
            graph, handles = self._begin([*packed])
            results = graph.sdpa(*handles, generate_stats=True, **options)
            self.forward_graph = self._build(graph, handles, results, [output, lse])
            graph, handles = self._begin([*packed, output, output, lse])
            results = graph.sdpa_backward(*handles, use_deterministic_algorithm=deterministic, **options)
            self.backward_graph = self._build(graph, handles, results, packed)

    def forward(self, *heads: Tensor) -> tuple[Tensor, Tensor]:
        """Queries, keys, values -> output, log-sum-exp (B, H, T, 1)."""
        output, lse = self._outputs(heads[0])
        self._run(*self.forward_graph, (*heads, output, lse))
        return output, lse

    def backward(self, *tensors: Tensor) -> None:
        """Queries, keys, values, output, its gradient, log-sum-exp; the gradients of the first three are written to the
        last three."""
        self._run(*self.backward_graph, tensors)

    def _outputs(self, q: Tensor) -> tuple[Tensor, Tensor]:
        B, H, T, D = q.shape
        return q.new_empty(B, T, H, D).transpose(1, 2), q.new_empty(B, H, T, 1, dtype=torch.float32)

    def _begin(self, inputs: list[Tensor]) -> tuple[Any, list[Any]]:
        kinds = self.cudnn.data_type
        graph = self.cudnn.pygraph(
            io_data_type=kinds.BFLOAT16,
            intermediate_data_type=kinds.FLOAT,
            compute_data_type=kinds.FLOAT,
            handle=self.handle,
        )
        return graph, [graph.tensor(dim=t.shape, stride=t.stride(), data_type=self._kind(t)) for t in inputs]

    def _build(self, graph: Any, handles: list[Any], results: Any, outputs: list[Tensor]) -> tuple[Any, list[Any]]:
        """The graph and the handles of all its tensors. The heuristic's first plan was the fastest."""
        for result, t in zip(results, outputs, strict=True):
            result.set_output(True).set_dim(list(t.shape)).set_stride(list(t.stride())).set_data_type(self._kind(t))
        graph.build([self.cudnn.heur_mode.A, self.cudnn.heur_mode.FALLBACK])
        return graph, [*handles, *results]

    def _kind(self, t: Tensor) -> Any:
        return self.cudnn.data_type.FLOAT if t.dtype == torch.float32 else self.cudnn.data_type.BFLOAT16

    def _run(self, graph: Any, handles: list[Any], tensors: tuple[Tensor, ...]) -> None:
        workspace = torch.empty(max(graph.get_workspace_size(), 1), dtype=torch.uint8, device=self.device)
        stream = torch.cuda.current_stream(self.device).cuda_stream
        self.cudnn.set_stream(handle=self.handle, stream=stream)
        pointers = {handle: t.data_ptr() for handle, t in zip(handles, tensors, strict=True)}
        graph.execute(pointers, workspace.data_ptr(), handle=self.handle)


def _frontend() -> Any:
    """cuDNN's frontend; None unless it is installed and uses the cuDNN that torch has loaded."""
    try:
        import cudnn

        return cudnn if cudnn.backend_version() == torch.backends.cudnn.version() else None
    except (ImportError, RuntimeError):
        return None
