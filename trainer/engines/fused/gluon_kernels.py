"""Products with an epilogue that Triton makes the tensor cores wait for, in Gluon: the backward one of an MLP with
ReLU² in bf16, which multiplies by the slope, and that of queries, keys and values, which gives them their positions.

Gluon gives the warps of a program roles of their own: one warpgroup starts the copies of operands into a ring in shared
memory, and two multiply half a tile each, so that one can finish its half while the tensor cores have the other's
products. It compiles for sm_90 alone, and Triton's interpreter does not run it. `trainer/engines/fused/epilogues.py`
launches the kernels and has their times.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Half a tile is ROWS x BN, whose sums take 128 registers a thread; it is finished in four parts of COLS columns. K goes
# in steps of 128 bytes, the width of TMA's swizzle: BK numbers in bf16.
ROWS, BN, BK, COLS = gl.constexpr(64), gl.constexpr(256), gl.constexpr(64), gl.constexpr(64)
STAGES = gl.constexpr(4)  # of 48 KiB
SWIZZLED = {bits: gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=2) for bits in (8, 16)}
GROUP = gl.constexpr(8)  # tiles below each other that share operands in the L2 cache
# Registers, lanes and warps of ROWS x COLS numbers. WIDE has 8 in a row for a thread and 32 for four lanes, so that the
# memory moves whole sectors. From the layout of the sums to HALFWAY, registers and lanes exchange columns 2 and 8, from
# there to WIDE 4 and 16: Triton exchanges one pair by shuffles, but two through shared memory.
SAME = {"warp_bases": [[16, 0], [32, 0]], "block_bases": [], "shape": [64, 64]}
HALFWAY = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0], [0, 16], [0, 32]],
        lane_bases=[[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]],
        **SAME,
    )
)
WIDE = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], [0, 32]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        **SAME,
    )
)


@gluon.jit
def relu2_input_grad_kernel(dy, w, act, act_ptr, out_ptr, M, N, K):
    """Tiles of (dy (M, K) @ w (K, N)) · 2·√act, act and the result (M, N), all bf16.

    A copy brings the left half of a tile's act, for which shared memory has room; the threads load the right half.
    """
    tiles, full, empty = _ring(dy, w)
    acts = gl.allocate_shared_memory(act.dtype, [4, ROWS, COLS], act.layout)
    act_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    act_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for half in gl.static_range(2):
        mbarrier.init(act_full.index(half), count=1)
        mbarrier.init(act_empty.index(half), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (gl.constexpr(0), tiles, full, empty, acts, act_full, act_empty, act_ptr, out_ptr, M, N, K)),
            (_multiply, (gl.constexpr(1), tiles, full, empty, acts, act_full, act_empty, act_ptr, out_ptr, M, N, K)),
            (_copy, (dy, w, act, tiles, full, empty, acts, act_full, act_empty, M, N, K)),
        ],
        worker_num_warps=[4, 4],
        worker_num_regs=[240, 24],
    )


@gluon.jit
def rotary_linear_kernel(
    x, w, out, cos_ptr, sin_ptr, rstd_ptr, x_inverse_ptr, w_inverse_ptr, M, N, K, T, turning, epsilon,
    HALF: gl.constexpr, NORM: gl.constexpr,
):  # fmt: skip
    """Tiles of x (M, K) @ w (N, K)ᵀ, bf16, or e4m3 and times both inverses -> (M, N) bf16. The first `turning` heads,
    of 2·HALF columns, turn by the angles of the row's position; NORM: then each is normed."""
    tiles, full, empty = _ring(x, w)
    parts = gl.allocate_shared_memory(out.dtype, [4, ROWS, COLS], out.layout)
    fence_async_shared()
    finish = out, parts, cos_ptr, sin_ptr, rstd_ptr, x_inverse_ptr, w_inverse_ptr, T, turning, epsilon
    gl.warp_specialize(
        [
            (_multiply_and_turn, (gl.constexpr(0), tiles, full, empty, finish, M, N, K, HALF, NORM)),
            (_multiply_and_turn, (gl.constexpr(1), tiles, full, empty, finish, M, N, K, HALF, NORM)),
            (_copy_operands, (x, w, tiles, full, empty, M, N, K)),
        ],
        worker_num_warps=[4, 4],
        worker_num_regs=[240, 24],
    )


@gluon.jit
def _ring(a, b):
    """Shared memory for the operands of STAGES steps, and the barriers at which a stage is full, and empty."""
    a_tiles = gl.allocate_shared_memory(a.dtype, [2 * STAGES, a.block_type.shape[0], a.block_type.shape[1]], a.layout)
    b_tiles = gl.allocate_shared_memory(b.dtype, [STAGES, b.block_type.shape[0], b.block_type.shape[1]], b.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    return (a_tiles, b_tiles), full, empty


@gluon.jit
def _turns(M, N):
    """How many tiles a program does."""
    return gl.cdiv(gl.cdiv(M, 2 * ROWS) * gl.cdiv(N, BN) - gl.program_id(0), gl.num_programs(0))


@gluon.jit
def _place(turn, M, N):
    """The first row and column of a program's tile."""
    tile = gl.program_id(0) + turn * gl.num_programs(0)
    rows, cols = gl.cdiv(M, 2 * ROWS), gl.cdiv(N, BN)
    first = tile // (GROUP * cols) * GROUP
    size = gl.minimum(rows - first, GROUP)
    return (first + tile % size) * 2 * ROWS, tile % (GROUP * cols) // size * BN


@gluon.jit
def _copy(dy, w, act, tiles, full, empty, acts, act_full, act_empty, M, N, K):
    step = 0
    # The step of a tile at which its act is asked for: by then the tile before it is finished, and no copy waits.
    late = gl.minimum(STAGES, gl.cdiv(K, BK) - 1) * BK
    for turn in range(_turns(M, N)):
        m, n = _place(turn, M, N)
        for k in range(0, K, BK):
            _copy_step(dy, w, m, k, k, n, step, tiles, full, empty)
            step += 1
            if k == late:
                for half in gl.static_range(2):
                    row, ready = m + half * ROWS, act_full.index(half)
                    mbarrier.wait(act_empty.index(half), (turn & 1) ^ 1)
                    mbarrier.expect(ready, 2 * act.block_type.nbytes)
                    tma.async_copy_global_to_shared(act, [row, n], ready, acts.index(2 * half))
                    tma.async_copy_global_to_shared(act, [row, n + COLS], ready, acts.index(2 * half + 1))


@gluon.jit
def _copy_operands(x, w, tiles, full, empty, M, N, K):
    step = 0
    for turn in range(_turns(M, N)):
        m, n = _place(turn, M, N)
        for k in range(0, K, x.block_type.shape[1]):
            _copy_step(x, w, m, k, n, k, step, tiles, full, empty)
            step += 1


@gluon.jit
def _copy_step(a, b, m, k, row, col, step, tiles, full, empty):
    """Start the copies of a step when its stage is empty: of `a` from (m, k) on, of `b` from (row, col) on."""
    a_tiles, b_tiles = tiles
    stage = step % STAGES
    mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
    ready = full.index(stage)
    mbarrier.expect(ready, 2 * a.block_type.nbytes + b.block_type.nbytes)
    tma.async_copy_global_to_shared(a, [m, k], ready, a_tiles.index(2 * stage))
    tma.async_copy_global_to_shared(b, [row, col], ready, b_tiles.index(stage))
    tma.async_copy_global_to_shared(a, [m + ROWS, k], ready, a_tiles.index(2 * stage + 1))


@gluon.jit
def _multiply(HALF: gl.constexpr, tiles, full, empty, acts, act_full, act_empty, act_ptr, out_ptr, M, N, K):
    """The upper half of each tile, or with HALF = 1 the lower one."""
    step = 0
    for turn in range(_turns(M, N)):
        m, n = _place(turn, M, N)
        m += HALF * ROWS
        total, step = _begin_tile(step, K, HALF, tiles, full, empty)
        # Asked for before the last step, they arrive during it. Before the loop, ptxas makes the loop wait for them.
        act2, act3 = _load(act_ptr, m, n + 2 * COLS, M, N), _load(act_ptr, m, n + 3 * COLS, M, N)
        total, step = _end_tile(total, step, K, HALF, tiles, full, empty)
        left, right = _halves(total)
        x0, x1 = _halves(left)
        x2, x3 = _halves(right)
        mbarrier.wait(act_full.index(HALF), turn & 1)
        x0 *= _slope(acts.index(2 * HALF).load(x0.type.layout))
        x1 *= _slope(acts.index(2 * HALF + 1).load(x1.type.layout))
        mbarrier.arrive(act_empty.index(HALF))
        _store(out_ptr, x0, m, n, M, N)
        _store(out_ptr, x1, m, n + COLS, M, N)
        x2 *= _slope(gl.convert_layout(gl.convert_layout(act2, HALFWAY), x2.type.layout))
        _store(out_ptr, x2, m, n + 2 * COLS, M, N)
        x3 *= _slope(gl.convert_layout(gl.convert_layout(act3, HALFWAY), x3.type.layout))
        _store(out_ptr, x3, m, n + 3 * COLS, M, N)


@gluon.jit
def _multiply_and_turn(
    PART: gl.constexpr, tiles, full, empty, finish, M, N, K, HALF: gl.constexpr, NORM: gl.constexpr
):  # fmt: skip
    """The upper part of each tile, or with PART = 1 the lower one."""
    out, parts, cos_ptr, sin_ptr, rstd_ptr, x_inverse_ptr, w_inverse_ptr, T, turning, epsilon = finish
    angles: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, HALF, 16])
    step = 0
    for turn in range(_turns(M, N)):
        m, n = _place(turn, M, N)
        m += PART * ROWS
        total, step = _begin_tile(step, K, PART, tiles, full, empty)
        rows = m + gl.arange(0, ROWS, gl.SliceLayout(1, angles))
        at = (rows % T)[:, None] * HALF + gl.arange(0, HALF, gl.SliceLayout(0, angles))[None, :]
        cos, sin = gl.load(cos_ptr + at), gl.load(sin_ptr + at)
        total, step = _end_tile(total, step, K, PART, tiles, full, empty)
        if x_inverse_ptr is not None:
            total *= gl.load(x_inverse_ptr) * gl.load(w_inverse_ptr)
        left, right = _halves(total)
        for side in gl.static_range(2):
            heads, col = (left, n) if side == 0 else (right, n + 2 * COLS)
            if HALF == COLS:
                _finish_head(heads, cos, sin, m, col, 2 * PART, finish, M, NORM)
            else:
                first, second = _halves(heads)
                _finish_head(first, cos, sin, m, col, 2 * PART, finish, M, NORM)
                _finish_head(second, cos, sin, m, col + COLS, 2 * PART + 1, finish, M, NORM)
    tma.store_wait(0)


@gluon.jit
def _finish_head(x, cos, sin, m, n, SLOT: gl.constexpr, finish, M, NORM: gl.constexpr):
    """Turn and norm a head, if it is one of those that turn, and store it through shared memory, from SLOT on."""
    out, parts, cos_ptr, sin_ptr, rstd_ptr, x_inverse_ptr, w_inverse_ptr, T, turning, epsilon = finish
    head = n // x.shape[1]
    a, b = _halves(x)
    cos = gl.convert_layout(cos, a.type.layout, assert_trivial=True)
    sin = gl.convert_layout(sin, a.type.layout, assert_trivial=True)
    if head < turning:
        first, second = a * cos - b * sin, b * cos + a * sin
        if NORM:
            rstd = gl.rsqrt(gl.sum(first * first + second * second, 1) / x.shape[1] + epsilon)
            rows = (m + gl.arange(0, ROWS, gl.SliceLayout(1, a.type.layout))).to(gl.int64)
            gl.store(rstd_ptr + rows * turning + head, rstd, mask=rows < M)
            first *= rstd[:, None]
            second *= rstd[:, None]
        a, b = first, second
    if x.shape[1] == 2 * COLS:
        _copy_out(out, parts.index(SLOT), a, m, n)
        _copy_out(out, parts.index(SLOT + 1), b, m, n + COLS)
    else:
        whole = gl.reshape(gl.permute(gl.join(a, b), (0, 2, 1)), x.shape)
        whole = gl.convert_layout(whole, x.type.layout, assert_trivial=True)
        _copy_out(out, parts.index(SLOT), whole, m, n)


@gluon.jit
def _copy_out(out, part, x, m, n):
    """Start the copy of ROWS x COLS numbers to row m and column n, through the part of shared memory that the copy
    before the last one has left."""
    tma.store_wait(1)
    part.store(x.to(out.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out, [m, n], part)


@gluon.jit
def _begin_tile(step, K, HALF: gl.constexpr, tiles, full, empty):
    """The sums of half a tile without the last step, which is the second result."""
    WIDTH: gl.constexpr = tiles[0].shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 256 // tiles[0].dtype.primitive_bitwidth]
    )
    total = gl.zeros((ROWS, BN), gl.float32, layout)
    for k in range(0, K - WIDTH, WIDTH):
        total = _add_product(total, step, k > 0, HALF, tiles, full, empty)
        step += 1
    return total, step


@gluon.jit
def _end_tile(total, step, K, HALF: gl.constexpr, tiles, full, empty):
    """The sums with the last step, and the step after it."""
    WIDTH: gl.constexpr = tiles[0].shape[2]
    total = _add_product(total, step, K > WIDTH, HALF, tiles, full, empty)
    total = warpgroup_mma_wait(0, deps=[total])
    mbarrier.arrive(empty.index(step % STAGES))
    return total, step + 1


@gluon.jit
def _add_product(total, step, more, HALF: gl.constexpr, tiles, full, empty):
    """Start the products of a step, and release the stage of the step before it; without `more` the tile has none."""
    a_tiles, b_tiles = tiles
    stage = step % STAGES
    mbarrier.wait(full.index(stage), step // STAGES & 1)
    a, b = a_tiles.index(2 * stage + HALF), b_tiles.index(stage)
    if b.shape[0] == BN:  # (N, K)
        b = b.permute((1, 0))
    total = warpgroup_mma(a, b, total, use_acc=more, is_async=True)
    total = warpgroup_mma_wait(1, deps=[total])
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=more)
    return total


@gluon.jit
def _halves(x):
    """The left and the right half of the columns."""
    return gl.split(gl.permute(gl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@gluon.jit
def _slope(act):
    return 2.0 * gl.sqrt(act.to(gl.float32))


@gluon.jit
def _located(m, n, M, N):
    """The places of ROWS x COLS numbers from row m and column n on, and which of them exist."""
    rows = m + gl.arange(0, ROWS, gl.SliceLayout(1, WIDE))
    cols = n + gl.arange(0, COLS, gl.SliceLayout(0, WIDE))
    return rows.to(gl.int64)[:, None] * N + cols[None, :], (rows < M)[:, None] & (cols < N)[None, :]


@gluon.jit
def _load(act_ptr, m, n, M, N):
    at, inside = _located(m, n, M, N)
    return gl.load(act_ptr + at, mask=inside, other=0.0)


@gluon.jit
def _store(out_ptr, x, m, n, M, N):
    at, inside = _located(m, n, M, N)
    x = gl.convert_layout(gl.convert_layout(x.to(gl.bfloat16), HALFWAY), WIDE)
    gl.store(out_ptr + at, x, mask=inside)
