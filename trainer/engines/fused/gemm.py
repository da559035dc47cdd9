"""Matrix products with the operation that follows them in the same kernel, by cuBLASLt; else in plain torch.

Two thirds to three quarters of a GPT-2 step are matrix products; most of the rest moves activations through memory.
At M=65536, C=768 the MLP's first product is 2·M·C·4C = 309 GFLOP, 0.5 ms at 650 TFLOP/s, and its output 403 MB.
A GELU kernel reads and writes 806 MB, its derivative 1208 MB (0.17 and 0.25 ms at 4.8 TB/s). In the product's epilogue,
while the tile is in registers, they move 403 MB less and 806 MB less. A weight gradient that is added in fp32 needs no
bf16 copy. torch has no epilogue that keeps GELU's input, and none with its derivative. So this module calls cuBLASLt
itself, through ctypes, in the library that torch has loaded.

Epilogues that were slower on an H200 than a separate kernel, and are not used (ms, 124M at M=65536 | 1558M at 16384):
the bias gradient with the weight gradient (BGRADB), 0.566 | 0.551 for the MLP against 0.528 | 0.520 for product and
column sums; with GELU's derivative (DGELU_BGRAD), three times the product. In fp8, GELU with its input stored costs
0.16 | 0.08 more than the bias alone, even if it writes fp8; GELU's derivative quadruples the product. A residual sum
cost 1% of a step at 1558M and gained 0.2% at 124M.

In fp8 the tensor cores are twice as fast and the operands half as wide. A tensor has one scale: its numbers are the
stored ones times its `inverse`. `fast` lets the tensor cores keep the sum, in fewer bits than fp32: up to 15% less time
forward, where it is on, and 3 to 9% backward, where it is off: a weight gradient over 16,384 tokens is then 3e-3 away
from the exact sum instead of 1e-4.

Only a hot card shows the fastest of cuBLASLt's candidates: chosen by short bursts at full clock they lost 0.1% of the
speed of whole steps; chosen at the power limit (H200, 693 W, ~1600 MHz) they won 0.8 to 1.7%, and on an H100 3.5% of
modern-d24 in fp8_head. PREFERRED has those (`python -m benchmarks.algorithms` finds them); for other products it is
the heuristic's first. Nothing is timed at the start, so two runs on one machine are alike.

cuBLASLt's matrices are column-major, so every row-major tensor is transposed for it: out = left @ right becomes
outᵀ = rightᵀ @ leftᵀ, which needs no copy. The numbers below are those of cublasLt.h, the same in CUDA 12.8 and 13.0.
"""

import ctypes
import functools
from typing import NamedTuple

import torch
from torch import Tensor

# cudaDataType_t of library_types.h
TYPES = {torch.float32: 0, torch.bfloat16: 14, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
COMPUTE_32F = 68
NOT_SUPPORTED = 15
# cublasLtEpilogue_t
DEFAULT, BIAS, GELU_AUX_BIAS, DGELU = 1, 4, 32 + 128 + 4, 64 + 128
# cublasLtMatmulDescAttributes_t
TRANSPOSE_A, TRANSPOSE_B, EPILOGUE, BIAS_POINTER, AUX_POINTER, AUX_STRIDE = 3, 4, 7, 8, 11, 12
A_SCALE_POINTER, B_SCALE_POINTER, FAST_ACCUMULATION = 17, 18, 25
# cublasLtMatmulAlgoConfigAttributes_t
TILE, CLUSTER = 1, 8
# cublasLtMatmulPreferenceAttributes_t
MAX_WORKSPACE_BYTES, REDUCTION_SCHEMES, MIN_ALIGNMENTS = 1, 3, (5, 6, 7, 8)

ALIGNMENT_BYTES = 16  # of every pointer and row: TMA and vector loads need it, and flat buffers of weights have it
WORKSPACE_BYTES = 64 << 20  # partial sums of a split product: 1558M's largest weight gradient is 41 MB in fp32
# CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE: a product split along K adds its parts in fp32, without rounding them to bf16.
REDUCE_IN_FP32 = 2

# Tile and cluster (cublasLtMatmulTile_t, cublasLtClusterShape_t: 24 is 256 x 128, 29 is 128 x 160; 3 is 2 x 1, 5 is
# 1 x 2) of the fastest candidate on a hot card, where the first was slower by 1% or more: for GPT-2 an H200, in fp8 an
# H100, too; for the other families an H100. The key: bytes of an element of an operand, epilogue, inner dimension and
# columns of a bf16 output, for any number of rows. Used on sm_90 only.
VOCAB = 50_304
PREFERRED = {
    (2, DEFAULT, 768, 768): (29, 3),
    (2, DEFAULT, 768, 2304): (29, 3),
    (2, DEFAULT, 768, 4096): (29, 3),
    (2, DEFAULT, 768, 2048): (29, 3),
    (2, DEFAULT, 2048, 768): (29, 3),
    (2, DEFAULT, 4096, 768): (29, 3),
    (2, DEFAULT, 2304, 768): (29, 3),
    (2, DEFAULT, 3072, 768): (29, 3),
    (2, GELU_AUX_BIAS, 768, 3072): (28, 3),
    (2, DGELU, 768, 3072): (20, 5),
    (2, DEFAULT, 768, VOCAB): (201, 5),
    (2, BIAS, 1024, 3072): (24, 5),
    (2, DEFAULT, 1024, 1024): (29, 3),
    (2, DEFAULT, 3072, 1024): (29, 3),
    (2, DGELU, 1024, 4096): (20, 5),
    (2, DEFAULT, 1024, VOCAB): (201, 5),
    (2, DEFAULT, 1280, 1280): (29, 3),
    (2, DEFAULT, 5120, 1280): (24, 5),
    (2, GELU_AUX_BIAS, 1280, 5120): (28, 3),
    (2, DGELU, 1280, 5120): (20, 5),
    (2, DEFAULT, 1280, VOCAB): (201, 5),
    (2, DEFAULT, 1536, 1536): (29, 3),
    (2, DEFAULT, 1536, 4608): (29, 3),
    (2, DEFAULT, 4608, 1536): (29, 3),
    (2, DEFAULT, 6144, 1536): (29, 3),
    (2, DEFAULT, 1536, VOCAB): (201, 5),
    (2, BIAS, 1600, 4800): (24, 5),
    (2, DEFAULT, 1600, VOCAB): (201, 5),
    (1, BIAS, 768, 2304): (29, 3),
    (1, BIAS, 768, 3072): (29, 3),
    (1, DEFAULT, 768, 768): (29, 3),
    (1, DEFAULT, 768, 2304): (29, 3),
    (1, DEFAULT, 768, 3072): (29, 3),
    (1, DEFAULT, 768, 4096): (29, 3),
    (1, DEFAULT, 2048, 768): (29, 3),
    (1, DEFAULT, 3072, 768): (29, 3),
    (1, DEFAULT, 768, VOCAB): (201, 5),
    (1, DEFAULT, 1536, 1536): (29, 3),
    (1, DEFAULT, 1536, 4608): (29, 3),
    (1, DEFAULT, 1536, 6144): (29, 3),
    (1, DEFAULT, 6144, 1536): (29, 3),
    (1, DEFAULT, 1536, VOCAB): (201, 5),
    (1, BIAS, 1600, 4800): (24, 5),
    (1, BIAS, 1600, 6400): (24, 5),
    (1, DEFAULT, 1600, 1600): (20, 5),
    (1, DEFAULT, 4800, 1600): (247, 5),
    (1, DEFAULT, 6400, 1600): (247, 5),
    (1, DEFAULT, VOCAB, 1600): (247, 5),
    (1, DEFAULT, 1600, VOCAB): (201, 5),
}
CANDIDATES = 8  # cuBLASLt returns no more

POINTER, INT, SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
SIGNATURES = {
    "cublasLtCreate": (POINTER,),
    "cublasLtMatmulDescCreate": (POINTER, INT, INT),
    "cublasLtMatmulDescSetAttribute": (POINTER, INT, POINTER, SIZE),
    "cublasLtMatrixLayoutCreate": (POINTER, INT, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64),
    "cublasLtMatmulPreferenceCreate": (POINTER,),
    "cublasLtMatmulPreferenceSetAttribute": (POINTER, INT, POINTER, SIZE),
    # handle, operation, layouts of A B C D, preference, results wanted, results, results found
    "cublasLtMatmulAlgoGetHeuristic": (POINTER,) * 7 + (INT, POINTER, POINTER),
    # algorithm, attribute, buffer, its bytes, bytes written
    "cublasLtMatmulAlgoConfigGetAttribute": (POINTER, INT, POINTER, SIZE, POINTER),
    # handle, operation, alpha, A, its layout, B, its layout, beta, C, its layout, D, its layout, algorithm, workspace,
    # its bytes, stream
    "cublasLtMatmul": (POINTER,) * 14 + (SIZE, POINTER),
}
Matrix = tuple[torch.dtype, torch.Size, tuple[int, ...]]  # dtype, shape, strides of a row-major tensor
Inverses = tuple[Tensor, Tensor]  # (1,) fp32: the inverse scales of left and right, both in fp8


class Algorithm(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t; it begins with the algorithm."""

    _fields_ = [
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace_bytes", SIZE),
        ("status", INT),
        ("waves", ctypes.c_float),
        ("reserved", INT * 4),
    ]


class Request(NamedTuple):
    """Everything that the choice of an algorithm depends on: out = epilogue(left @ right [+ out])."""

    left: Matrix
    right: Matrix
    out: Matrix
    transposes: tuple[bool, bool]  # of left and right, as they are stored
    epilogue: int
    accumulate: bool
    aux: Matrix | None
    fast: bool

    @property
    def key(self) -> tuple[int, int, int, int] | None:
        """Its key in PREFERRED; None for weight gradients, which are fp32 and not in it."""
        if self.out[0] != torch.bfloat16:
            return None
        inner = self.left[1][0 if self.transposes[0] else 1]
        return self.left[0].itemsize, self.epilogue, inner, self.out[1][1]

    def __str__(self) -> str:
        named = (f"{str(dtype)[6:]} {'x'.join(map(str, shape))}" for dtype, shape, _ in self[:3])
        left, right, out = (name + "ᵀ" * turned for name, turned in zip(named, (*self.transposes, False), strict=True))
        return f"{left} @ {right} -> {out} (epilogue {self.epilogue})"


class ProductPlan(NamedTuple):
    """The descriptors and the algorithm of a request. Only the pointers differ from call to call."""

    operation: int
    layout_a: int
    layout_b: int
    layout_d: int
    beta: int
    algorithm: Algorithm


class Lt:
    """cuBLASLt on one device: its handle, a workspace a stream, and the plans so far (None: it has no algorithm)."""

    def __init__(self, library: ctypes.CDLL, device: int) -> None:
        self.library, self.device = library, device
        self.plans: dict[Request, ProductPlan | None] = {}
        self.workspaces: dict[int, tuple[int, Tensor]] = {}
        self.one, self.zero, self.pointer = ctypes.c_float(1), ctypes.c_float(0), ctypes.c_uint64(0)
        self.one_address, self.zero_address = ctypes.addressof(self.one), ctypes.addressof(self.zero)
        self.pointer_address = ctypes.addressof(self.pointer)
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # a handle needs the CUDA context, which this creates
            self.handle = self.create("cublasLtCreate")

    def check(self, status: int, action: str) -> None:
        """RuntimeError with cuBLASLt's name of `status` if it is not success."""
        if status:
            name = self.library.cublasLtGetStatusName(status).decode()
            raise RuntimeError(f"cuBLASLt {self.library.cublasLtGetVersion()}: {action}: {name}")

    def create(self, function: str, *arguments: int) -> int:
        """The address of the object that a cublasLt…Create makes. It is never freed: the run has a few dozen plans."""
        address = ctypes.c_void_p()
        self.check(getattr(self.library, function)(ctypes.byref(address), *arguments), function)
        assert address.value
        return address.value

    def set(self, operation: int, attribute: int, value: ctypes._SimpleCData) -> None:
        """Set an attribute of an operation."""
        status = self.library.cublasLtMatmulDescSetAttribute(
            operation, attribute, ctypes.byref(value), ctypes.sizeof(value)
        )
        self.check(status, f"attribute {attribute}")

    def point(self, operation: int, attribute: int, address: int) -> None:
        """Set a pointer attribute without allocating: every call of a product does it."""
        self.pointer.value = address
        status = self.library.cublasLtMatmulDescSetAttribute(operation, attribute, self.pointer_address, 8)
        if status:
            self.check(status, f"attribute {attribute}")

    def point_inverses(self, operation: int, inverses: Inverses) -> None:
        self.point(operation, A_SCALE_POINTER, inverses[1].data_ptr())
        self.point(operation, B_SCALE_POINTER, inverses[0].data_ptr())

    def workspace(self, stream: int) -> int:
        """The address of the stream's workspace."""
        if stream not in self.workspaces:
            memory = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=torch.device("cuda", self.device))
            self.workspaces[stream] = memory.data_ptr(), memory
        return self.workspaces[stream][0]

    def layout(self, matrix: Matrix) -> int:
        """The layout of a row-major matrix: for cuBLASLt its transpose, column-major."""
        dtype, (rows, columns), (stride, _) = matrix
        return self.create("cublasLtMatrixLayoutCreate", TYPES[dtype], columns, rows, stride)

    def operation(self, request: Request, inverses: Inverses | None) -> int:
        """The descriptor of a request's operation. Each call of a product sets its pointers."""
        operation = self.create("cublasLtMatmulDescCreate", COMPUTE_32F, TYPES[torch.float32])
        left_transposed, right_transposed = request.transposes
        self.set(operation, TRANSPOSE_A, ctypes.c_int32(right_transposed))
        self.set(operation, TRANSPOSE_B, ctypes.c_int32(left_transposed))
        self.set(operation, EPILOGUE, ctypes.c_uint32(request.epilogue))
        self.set(operation, FAST_ACCUMULATION, ctypes.c_int8(request.fast))
        # The heuristic reads the alignment of these pointers, not their memory. So one plan serves every layer.
        if request.epilogue in (BIAS, GELU_AUX_BIAS):
            self.point(operation, BIAS_POINTER, ALIGNMENT_BYTES)
        if request.epilogue in (GELU_AUX_BIAS, DGELU):
            self.set(operation, AUX_STRIDE, ctypes.c_int64(request.out[2][0]))
            self.point(operation, AUX_POINTER, ALIGNMENT_BYTES)
        if inverses is not None:
            self.point_inverses(operation, inverses)
        return operation

    @functools.cached_property
    def preference(self) -> int:
        preference = self.create("cublasLtMatmulPreferenceCreate")
        settings: dict[int, ctypes._SimpleCData] = {
            MAX_WORKSPACE_BYTES: ctypes.c_uint64(WORKSPACE_BYTES),
            REDUCTION_SCHEMES: ctypes.c_uint32(REDUCE_IN_FP32),
        } | {matrix: ctypes.c_uint32(ALIGNMENT_BYTES) for matrix in MIN_ALIGNMENTS}
        for attribute, value in settings.items():
            status = self.library.cublasLtMatmulPreferenceSetAttribute(
                preference, attribute, ctypes.byref(value), ctypes.sizeof(value)
            )
            self.check(status, f"preference {attribute}")
        return preference

    def plan(self, request: Request, inverses: Inverses | None) -> ProductPlan | None:
        """The plan with the preferred algorithm, else with the heuristic's first; None if cuBLASLt has none."""
        plans = self.candidates(request, inverses)
        wanted = PREFERRED.get(request.key) if request.key and self.is_measured else None
        preferred = (each for each in plans if wanted and self.tile_and_cluster(each.algorithm) == wanted)
        return next(preferred, plans[0] if plans else None)

    def candidates(self, request: Request, inverses: Inverses | None) -> list[ProductPlan]:
        """The plans with each algorithm that the heuristic names, in its order."""
        if not all(is_supported(matrix) for matrix in (request.left, request.right, request.out)):
            return []
        if request.aux not in (None, request.out):
            return []  # the plan takes its stride from the output
        operation = self.operation(request, inverses)
        a, b, d = (self.layout(matrix) for matrix in (request.right, request.left, request.out))
        count, candidates = ctypes.c_int(), (Algorithm * CANDIDATES)()
        status = self.library.cublasLtMatmulAlgoGetHeuristic(
            self.handle, operation, a, b, d, d, self.preference, CANDIDATES, candidates, ctypes.byref(count)
        )
        if status != NOT_SUPPORTED:
            self.check(status, f"no algorithm for {request}")
        usable = [] if status else [candidate for candidate in candidates[: count.value] if not candidate.status]
        beta = self.one_address if request.accumulate else self.zero_address
        return [ProductPlan(operation, a, b, d, beta, algorithm) for algorithm in usable]

    def tile_and_cluster(self, algorithm: Algorithm) -> tuple[int, int] | None:
        """Tile and cluster of an algorithm; None if cuBLASLt does not report them."""
        tile, cluster, written = ctypes.c_uint32(), ctypes.c_uint16(), SIZE()
        for attribute, value in ((TILE, tile), (CLUSTER, cluster)):
            if self.library.cublasLtMatmulAlgoConfigGetAttribute(
                ctypes.byref(algorithm), attribute, ctypes.byref(value), ctypes.sizeof(value), ctypes.byref(written)
            ):
                return None
        return tile.value, cluster.value

    @functools.cached_property
    def is_measured(self) -> bool:
        """True on a GPU of the kind that PREFERRED was measured on: H100 and H200."""
        return torch.cuda.get_device_capability(self.device) == (9, 0)

    def launch(self, plan: ProductPlan, left: int, right: int, out: int) -> int:
        """Launch the product on torch's stream; returns cuBLASLt's status."""
        stream = torch.cuda.current_stream(self.device).cuda_stream
        # fmt: off
        return self.library.cublasLtMatmul(
            self.handle, plan.operation, self.one_address, right, plan.layout_a, left, plan.layout_b, plan.beta,
            out, plan.layout_d, out, plan.layout_d, ctypes.byref(plan.algorithm), self.workspace(stream),
            WORKSPACE_BYTES, stream,
        )
        # fmt: on


def is_supported(matrix: Matrix) -> bool:
    """True if rows are packed and start where vector loads can; cuBLASLt gets no other matrices."""
    dtype, shape, stride = matrix
    return (
        dtype in TYPES
        and len(shape) == 2
        and stride[1] == 1
        and stride[0] >= shape[1] > 0
        and stride[0] * dtype.itemsize % ALIGNMENT_BYTES == 0
    )


def why_not() -> str:
    """Why cuBLASLt cannot run on the current device; empty if it can."""
    if not torch.cuda.is_available():
        return "no CUDA device was found"
    if torch.version.cuda is None:
        return "this torch is not built for CUDA"
    if torch.cuda.get_device_capability() < (8, 0):
        return f"{torch.cuda.get_device_name()} has no bf16 tensor cores: these need compute capability 8.0 or newer"
    return "" if _library() else f"libcublasLt.so.{torch.version.cuda.split('.')[0]} cannot be loaded"


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The cuBLASLt that torch has loaded: dlopen finds a library of the process by its name, wherever it lies."""
    try:
        library = ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or '').split('.')[0]}")
    except OSError:
        return None
    for name, arguments in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, ctypes.c_int
    library.cublasLtGetStatusName.restype = ctypes.c_char_p
    library.cublasLtGetVersion.restype = SIZE
    return library


@functools.cache
def _lt(device: int) -> Lt | None:
    """cuBLASLt for the device of this number (-1: the CPU); None if it cannot run there."""
    if device < 0:
        return None
    with torch.cuda.device(device):
        library = None if why_not() else _library()
    return Lt(library, device) if library else None


def refused() -> list[Request]:
    """The products so far that torch computes, as cuBLASLt has no algorithm for them on the current device."""
    lt = _lt(torch.cuda.current_device()) if torch.cuda.is_available() else None
    return [request for request, plan in lt.plans.items() if plan is None] if lt else []


def _product(
    left: Tensor,
    right: Tensor,
    out: Tensor,
    transposes: tuple[bool, bool],
    epilogue: int = DEFAULT,
    accumulate: bool = False,
    bias: Tensor | None = None,
    aux: Tensor | None = None,
    inverses: Inverses | None = None,
    fast: bool = False,
) -> bool:
    """Write out = epilogue(left @ right [+ out]) by cuBLASLt. False if it cannot; then nothing is written."""
    lt = _lt(out.get_device())
    if lt is None:
        return False
    request = Request(
        (left.dtype, left.shape, left.stride()),
        (right.dtype, right.shape, right.stride()),
        (out.dtype, out.shape, out.stride()),
        transposes,
        epilogue,
        accumulate,
        None if aux is None else (aux.dtype, aux.shape, aux.stride()),
        fast,
    )
    a, b, d = left.data_ptr(), right.data_ptr(), out.data_ptr()
    bias_address = 0 if bias is None else bias.data_ptr()
    aux_address = 0 if aux is None else aux.data_ptr()
    if (a | b | d | bias_address | aux_address) % ALIGNMENT_BYTES:
        return False
    plan = lt.plans.get(request)
    if plan is None and request not in lt.plans:
        plan = lt.plans[request] = lt.plan(request, inverses)
    if plan is None:
        return False
    if bias is not None:
        lt.point(plan.operation, BIAS_POINTER, bias_address)
    if aux is not None:
        lt.point(plan.operation, AUX_POINTER, aux_address)
    if inverses is not None:
        lt.point_inverses(plan.operation, inverses)
    status = lt.launch(plan, a, b, d)
    if status:
        lt.check(status, f"{request}")
    return True


def _plain(left: Tensor, right: Tensor, inverses: Inverses | None = None) -> Tensor:
    """left @ right summed in fp32 and not rounded: the input of an epilogue. bf16 holds every fp8 number exactly."""
    if left.is_cuda:
        product = torch.mm(left.bfloat16(), right.bfloat16(), out_dtype=torch.float32)
    else:
        product = left.float() @ right.float()
    return product if inverses is None else product.mul_(inverses[0] * inverses[1])


def _linear(
    x: Tensor,
    w: Tensor,
    out: Tensor | None = None,
    bias: Tensor | None = None,
    inverses: Inverses | None = None,
    fast: bool = False,
) -> Tensor:
    """x @ wᵀ + bias, rounded once to bf16."""
    if out is None:
        out = torch.empty(x.shape[0], w.shape[0], dtype=torch.bfloat16, device=x.device)
    epilogue = DEFAULT if bias is None else BIAS
    if not _product(x, w, out, (False, True), epilogue, bias=bias, inverses=inverses, fast=fast):
        exact = _plain(x, w.t(), inverses)
        out.copy_(exact if bias is None else exact.add_(bias.float()))
    return out


def linear(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (M, K) @ w (N, K)ᵀ + bias (N,) -> (M, N), rounded once."""
    return _linear(x, w, None, bias)


def linear_gelu(x: Tensor, w: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """x (M, K) @ w (N, K)ᵀ + bias (N,) and its GELU in tanh form: pre, act (M, N), each rounded once."""
    pre, act = (x.new_empty(x.shape[0], w.shape[0]) for _ in range(2))
    if not _product(x, w, act, (False, True), GELU_AUX_BIAS, bias=bias, aux=pre):
        exact = _plain(x, w.t()) + bias.float()
        pre.copy_(exact)
        act.copy_(torch.nn.functional.gelu(exact, approximate="tanh"))
    return pre, act


def input_grad(dy: Tensor, w: Tensor, out: Tensor | None = None) -> Tensor:
    """dy (M, N) @ w (N, K) -> (M, K), into `out` if given."""
    out = dy.new_empty(dy.shape[0], w.shape[1]) if out is None else out
    if not _product(dy, w, out, (False, False)):
        out.copy_(_plain(dy, w))
    return out


def input_grad_gelu(dy: Tensor, w: Tensor, pre: Tensor) -> Tensor:
    """(dy (M, N) @ w (N, K)) · GELU'(pre (M, K)) in tanh form -> (M, K), rounded once."""
    dpre = dy.new_empty(dy.shape[0], w.shape[1])
    if not _product(dy, w, dpre, (False, False), DGELU, aux=pre):
        dpre.copy_(torch.ops.aten.gelu_backward(_plain(dy, w), pre.float(), approximate="tanh"))
    return dpre


def weight_grad(dy: Tensor, x: Tensor, into: Tensor, accumulate: bool) -> None:
    """into (N, K) fp32 = or += dy (M, N)ᵀ @ x (M, K), in fp32 throughout."""
    if not _product(dy, x, into, (True, False), accumulate=accumulate):
        _store(_plain(dy.t(), x), into, accumulate)


def linear8(
    x: Tensor,
    w: Tensor,
    x_inverse: Tensor,
    w_inverse: Tensor,
    bias: Tensor | None = None,
    fast: bool = True,
) -> Tensor:
    """x (M, K) e4m3 · x_inverse (1,) fp32 @ (w (N, K) e4m3 · w_inverse)ᵀ + bias (N,) -> (M, N) bf16.

    `fast`: the tensor cores keep the sum; else they move it to fp32 registers as it grows.
    """
    return _linear(x, w, None, bias, (x_inverse, w_inverse), fast)


def input_grad8(
    dy: Tensor, w_t: Tensor, dy_inverse: Tensor, w_inverse: Tensor, out: Tensor | None = None, fast: bool = False
) -> Tensor:
    """dy (M, N) e5m2 · dy_inverse (1,) fp32 @ (w_t (K, N) e4m3 · w_inverse)ᵀ -> (M, K) bf16, into `out` if given.

    w_t is the transposed weight: the tensor cores take fp8 operands only with the inner dimension packed.
    """
    return _linear(dy, w_t, out, inverses=(dy_inverse, w_inverse), fast=fast)


def weight_grad8(
    dy_t: Tensor,
    x_t: Tensor,
    dy_inverse: Tensor,
    x_inverse: Tensor,
    into: Tensor,
    accumulate: bool,
    fast: bool = False,
) -> None:
    """into (N, K) fp32 = or += dy_t (N, M) e5m2 · dy_inverse (1,) fp32 @ (x_t (K, M) e4m3 · x_inverse)ᵀ.

    Both are transposed, for the same reason as in input_grad8. M has to be a multiple of 16 for cuBLASLt.
    """
    inverses = dy_inverse, x_inverse
    if not _product(dy_t, x_t, into, (False, True), accumulate=accumulate, inverses=inverses, fast=fast):
        _store(_plain(dy_t, x_t.t(), inverses), into, accumulate)


def _store(value: Tensor, into: Tensor, accumulate: bool) -> None:
    if accumulate:
        into.add_(value)
    else:
        into.copy_(value)
