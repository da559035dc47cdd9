"""Causal attention with its backward pass called by hand, from packed queries, keys and values to packed gradients.

FLOPs a layer, counted in full: forward 4·T·C a token (QKᵀ and PV), backward 2.5 times that (both again, and three
gradients); the causal half is really done. Nothing of size T² reaches memory. The kernels are cuDNN's, which on an
H200 take 0.7 of the time of FlashAttention-2's; those run where cuDNN does not serve. A CPU does it in plain PyTorch.

torch returns the three gradients apart, and the next product wants them side by side: 12·M·C bytes of copying a layer,
604 MB at 124M and M=65536, 0.16 ms. cuDNN's own frontend can be told where each head lies, so its graphs, two for every
shape, write the packed tensor themselves. They also have a backward pass that adds up in a fixed order, which torch
does not offer: it costs 1% of a step and, at 124M, 1.5 GiB of scratch memory; FlashAttention-2 costs 5% and more.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ATEN = torch.ops.aten


@dataclass
class SavedAttention:
    """What the backward pass needs besides the packed input."""

    output: Tensor  # (B, H, T, D)
    rest: tuple[Any, ...]  # of the kernel that ran: log-sum-exp, random state


class Attention:
    """Attention of `n_head` heads over (B·T, 3C) packed projections -> (B·T, C)."""

    def __init__(self, n_head: int, width: int, device: torch.device, deterministic: bool) -> None:
        self.n_head, self.width, self.head, self.deterministic = n_head, width, width // n_head, deterministic
        self.cudnn = _frontend() if device.type == "cuda" else None
        self.graphs: dict[tuple[int, int], Graphs | None] = {}
        self.kernel = "math" if device.type != "cuda" else "flash" if deterministic else self._quickest(device)

    def _quickest(self, device: torch.device) -> str:
        """What torch's own kernels are asked for where the frontend doesn't serve."""
        q = torch.empty(1, self.n_head, 128, self.head, dtype=torch.bfloat16, device=device)
        asked = torch.backends.cuda.SDPAParams(q, q, q, None, 0.0, True, False)
        return "cudnn" if torch.backends.cuda.can_use_cudnn_attention(asked) else "flash"

    def forward(self, qkv: Tensor, B: int) -> tuple[Tensor, SavedAttention]:
        q, k, v = self._heads(qkv, B)
        rest: list[Any]
        if graphs := self._graphs(qkv, B):
            output, *rest = graphs.forward(q, k, v)
        elif self.kernel == "cudnn":
            output, *rest = ATEN._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, False)
        elif self.kernel == "flash":
            output, *rest = ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False)
        else:
            q, k, v = inputs = [t.detach().float().requires_grad_() for t in (q, k, v)]
            with torch.enable_grad():
                exact = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            output, rest = exact.detach().to(qkv.dtype), [exact, inputs]
        return self._rows(output), SavedAttention(output, tuple(rest))

    def backward(self, gradient: Tensor, qkv: Tensor, B: int, saved: SavedAttention) -> Tensor:
        """From the gradient of the output, (B·T, C), that of the packed projections, (B·T, 3C)."""
        q, k, v = self._heads(qkv, B)
        g = gradient.view(B, -1, self.n_head, self.head).transpose(1, 2)
        if graphs := self._graphs(qkv, B):
            packed = torch.empty_like(qkv)
            graphs.backward(q, k, v, saved.output, g, saved.rest[0], *self._heads(packed, B))
            return packed
        if self.kernel == "cudnn":
            lse, cum_q, cum_k, max_q, max_k, seed, offset = saved.rest[:7]
            gradients = ATEN._scaled_dot_product_cudnn_attention_backward(
                g, q, k, v, saved.output, lse, seed, offset, None, cum_q, cum_k, max_q, max_k, 0.0, True
            )
        elif self.kernel == "flash":
            lse, cum_q, cum_k, max_q, max_k, seed, offset = saved.rest[:7]
            gradients = ATEN._scaled_dot_product_flash_attention_backward(
                g, q, k, v, saved.output, lse, cum_q, cum_k, max_q, max_k, 0.0, True, seed, offset
            )
        else:
            exact, inputs = saved.rest
            gradients = torch.autograd.grad(exact, inputs, g.float())
        return torch.cat([self._rows(t.to(gradient.dtype)) for t in gradients], 1)

    def _heads(self, qkv: Tensor, B: int) -> list[Tensor]:
        """Views (B, H, T, D) of the packed queries, keys and values."""
        return [t.transpose(1, 2) for t in qkv.view(B, -1, 3, self.n_head, self.head).unbind(2)]

    def _rows(self, heads: Tensor) -> Tensor:
        """(B, H, T, D) -> (B·T, C): a view, as the kernels keep their inputs' order in memory."""
        return heads.transpose(1, 2).reshape(-1, self.width)

    def refused(self) -> list[str]:
        """The shapes so far that cuDNN's graphs don't serve, in a line each."""
        shapes = [shape for shape, graphs in self.graphs.items() if graphs is None]
        return [f"cuDNN has no packed attention for {B} x {T} tokens; torch's {self.kernel} does it" for B, T in shapes]

    def _graphs(self, qkv: Tensor, B: int) -> "Graphs | None":
        """cuDNN's graphs for this shape, if it has any."""
        if self.cudnn is None:
            return None
        shape = (B, len(qkv) // B)
        if shape not in self.graphs:
            try:
                heads = self._heads(torch.empty_like(qkv, device="meta"), B)
                self.graphs[shape] = Graphs(self.cudnn, heads, qkv.device, self.deterministic)
            except (self.cudnn.cudnnGraphNotSupportedError, RuntimeError) as error:
                # Or which kernel a shape has would depend on what else was in memory.
                if isinstance(error, torch.cuda.OutOfMemoryError) or "ALLOC_FAILED" in str(error):
                    raise torch.cuda.OutOfMemoryError(str(error)) from error
                # A shape it has no kernel for, such as one token; or a frontend that this cuDNN is too old for.
                self.graphs[shape] = None
        return self.graphs[shape]


class Graphs:
    """Forward and backward of one shape in cuDNN, over heads (B, H, T, D) whose strides are those of `packed`."""

    def __init__(self, cudnn: Any, packed: list[Tensor], device: torch.device, deterministic: bool) -> None:
        self.cudnn, self.device = cudnn, device
        B, H, T, D = packed[0].shape
        options = {"attn_scale": D**-0.5, "use_causal_mask": True}
        output, lse = self._outputs(packed[0])
        with torch.cuda.device(self.device):
            self.handle = cudnn.create_handle()
            graph, places = self._begin([*packed])
            results = graph.sdpa(*places, generate_stats=True, **options)
            self.forward_graph = self._build(graph, places, results, [output, lse])
            graph, places = self._begin([*packed, output, output, lse])
            results = graph.sdpa_backward(*places, use_deterministic_algorithm=deterministic, **options)
            self.backward_graph = self._build(graph, places, results, packed)

    def forward(self, *heads: Tensor) -> tuple[Tensor, Tensor]:
        """Queries, keys, values -> output, log-sum-exp (B, H, T, 1)."""
        output, lse = self._outputs(heads[0])
        self._run(*self.forward_graph, (*heads, output, lse))
        return output, lse

    def backward(self, *tensors: Tensor) -> None:
        """From queries, keys, values, output, its gradient and log-sum-exp into the last three: their gradients."""
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

    def _build(self, graph: Any, places: list[Any], results: Any, outputs: list[Tensor]) -> tuple[Any, list[Any]]:
        """The graph and the places of all its tensors. The first plan of the heuristic was the quickest there is."""
        for result, t in zip(results, outputs, strict=True):
            result.set_output(True).set_dim(list(t.shape)).set_stride(list(t.stride())).set_data_type(self._kind(t))
        graph.build([self.cudnn.heur_mode.A, self.cudnn.heur_mode.FALLBACK])
        return graph, [*places, *results]

    def _kind(self, t: Tensor) -> Any:
        return self.cudnn.data_type.FLOAT if t.dtype == torch.float32 else self.cudnn.data_type.BFLOAT16

    def _run(self, graph: Any, places: list[Any], tensors: tuple[Tensor, ...]) -> None:
        workspace = torch.empty(max(graph.get_workspace_size(), 1), dtype=torch.uint8, device=self.device)
        stream = torch.cuda.current_stream(self.device).cuda_stream
        self.cudnn.set_stream(handle=self.handle, stream=stream)
        pointers = {place: t.data_ptr() for place, t in zip(places, tensors, strict=True)}
        graph.execute(pointers, workspace.data_ptr(), handle=self.handle)


def _frontend() -> Any:
    """cuDNN's frontend, if it is installed and speaks to the cuDNN that torch has loaded; else None."""
    try:
        import cudnn

        return cudnn if cudnn.backend_version() == torch.backends.cudnn.version() else None
    except (ImportError, RuntimeError):
        return None
