"""The result of `skytrain bench` for a person."""

from collections.abc import Iterator

from pipelines.extras.bench.gauges import Spread
from pipelines.extras.bench.steps import Measurement
from pipelines.user.show.console import say

MOST_KERNELS = 10


def print_bench(result: Measurement) -> None:
    say("\n".join(lines(result)))


def lines(row: Measurement) -> Iterator[str]:
    yield f"{row.recipe}: {row.parameters:,} parameters, {row.world_size} x {row.device}"
    yield f"torch {row.torch}; text: {row.text}"
    yield ""
    speed, step = row.tokens_per_second, row.step_seconds
    micro_batches = row.accumulated * row.world_size
    yield f"{row.engine}; {row.precision}"
    yield f"  batch    {row.batch_tokens:,} tokens: {micro_batches} {row.micro_batch_why}"
    yield f"  speed    {speed.median:,.0f} tokens/s, the median step; half of the steps {spread(speed)}"
    yield f"           {row.sustained_tokens_per_second:,.0f} tokens/s over all steps"
    yield f"  step     {1e3 * step.median:,.1f} ms ({1e3 * step.least:,.1f} to {1e3 * step.most:,.1f})"
    if row.mfu is not None:
        yield f"  MFU      {row.mfu:.1%} at {row.flops_per_token / 1e9:.3f} GFLOP a token"
    if row.allocated_bytes is not None and row.reserved_bytes is not None:
        allocated, reserved = row.allocated_bytes / 2**30, row.reserved_bytes / 2**30
        yield f"  memory   {allocated:.1f} GiB allocated at most, {reserved:.1f} reserved"
    if row.sm_mhz:
        yield f"  clock    {row.sm_mhz.median:,.0f} MHz ({spread(row.sm_mhz)})"
    if row.watts:
        yield f"  power    {row.watts.median:,.0f} W ({spread(row.watts)})"
    if row.kernel_seconds:
        yield f"  kernels  {1e3 * sum(row.kernel_seconds.values()):,.1f} ms a step; the longest:"
        longest = list(row.kernel_seconds.items())[:MOST_KERNELS]
        yield from (f"           {1e3 * seconds:,.2f} ms  {name[:80]}" for name, seconds in longest)
    yield f"  loss     {row.first_loss:.3f}, then {row.last_loss:.3f}; all finite"
    yield from (f"  slow     {remark}" for remark in row.remarks)
    yield from ("", row.formula, *(f"left out: {text}" for text in row.left_out))


def spread(values: Spread) -> str:
    return f"{values.low_quartile:,.0f} to {values.high_quartile:,.0f}, all {values.least:,.0f} to {values.most:,.0f}"
