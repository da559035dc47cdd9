"""cuBLASLt's algorithms for the products of a recipe's fused step, on a hot card: the source of gemm.PREFERRED.

    python -m benchmarks.algorithms modern-d24 --set train.precision=fp8_head

The algorithm that is fastest in a short burst is not the fastest on a card at its power limit
(trainer/engines/fused/gemm.py). So a product heats the card for ten seconds. Then, for each product of a micro-batch,
all candidates of cuBLASLt's heuristic take turns, each for some milliseconds, on random operands. A line has the
product, how often a micro-batch has it, and the time of each candidate by tile and cluster, the heuristic's first at
the front. `now` marks the one that the trainer takes. The last lines are entries for PREFERRED: the fastest candidate
where it gains at least 1%.
"""

import argparse
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks import median_ms, run_as_command
from pipelines.extras.bench.steps import bench_recipe
from pipelines.recipe.recipe import Recipe
from trainer.base.parallel import World
from trainer.config.errors import UserError
from trainer.engines.choice import make_engine
from trainer.engines.fused import gemm
from trainer.engines.fused.gemm import ALIGNMENT_BYTES, Lt, Matrix, ProductPlan, Request

HEAT_SECONDS, ROUNDS, BURST_SECONDS = 10.0, 9, 0.01
GAIN = 0.01  # of a product's time: less is noise
Key = tuple[int, int, int, int]  # in PREFERRED
Name = tuple[int, int] | None  # tile and cluster
Counted = tuple[int, dict[Name, float]]  # how often a micro-batch has a product, and the times of its candidates


def products_of(recipe: Recipe, world: World, sequences: int) -> Counter[Request]:
    """The products of a later micro-batch of a step, and how often it has each."""
    engine: Any = make_engine(recipe.model, recipe.train, recipe.runtime, world)
    engine.initialize(1)
    T = recipe.model.block_size
    tokens = torch.randint(0, recipe.model.vocab_size, (sequences, T + 1), device=world.device)
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    engine.accumulate(iter([batch] * 2), 2, 2 * sequences, 1)  # makes all plans, and calibrates fp8
    lt, launch, count = lt_of(world), Lt.launch, Counter[Request]()
    requests = {id(plan): request for request, plan in lt.plans.items()}

    def counted(self: Lt, plan: ProductPlan, left: int, right: int, out: int) -> int:
        count[requests[id(plan)]] += 1
        return launch(self, plan, left, right, out)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        yield batch
        count.clear()  # the first micro-batch overwrites gradients, all others add to them
        yield batch

    with mock.patch.object(Lt, "launch", counted):
        engine.accumulate(batches(), 2, 2 * sequences, 2)
    torch.cuda.synchronize()
    return count


def lt_of(world: World) -> Lt:
    lt = gemm._lt(world.device.index or 0)
    assert lt is not None, gemm.why_not()
    return lt


class Product:
    """A product on random operands, with a plan for each candidate."""

    def __init__(self, lt: Lt, request: Request) -> None:
        self.lt, self.request = lt, request
        self.left, self.right, self.out = (operand(matrix) for matrix in request[:3])
        self.extra = operand(request.out)  # a bias, or the second output
        one = torch.ones(4, device=self.out.device)
        inverses = (one[:1], one[:1]) if self.left.itemsize == 1 else None
        self.plans = lt.candidates(request, inverses)
        self.names = [lt.tile_and_cluster(plan.algorithm) for plan in self.plans]
        chosen = lt.plan(request, inverses)
        assert chosen is not None
        self.taken = lt.tile_and_cluster(chosen.algorithm)
        operation = self.plans[0].operation  # of all candidates
        if request.epilogue in (gemm.BIAS, gemm.GELU_AUX_BIAS):
            lt.point(operation, gemm.BIAS_POINTER, self.extra.data_ptr())
        if request.epilogue in (gemm.GELU_AUX_BIAS, gemm.DGELU):
            lt.point(operation, gemm.AUX_POINTER, self.extra.data_ptr())
        if inverses:
            lt.point_inverses(operation, inverses)

    def run(self, plan: ProductPlan, times: int = 1) -> None:
        for _ in range(times):
            status = self.lt.launch(plan, self.left.data_ptr(), self.right.data_ptr(), self.out.data_ptr())
            self.lt.check(status, str(self.request))

    def milliseconds(self) -> dict[Name, float]:
        """The median time of each candidate; they take turns. The trainer takes the first of a name."""
        (once,) = median_ms([partial(self.run, self.plans[0])], rounds=4)
        times = max(2, round(1e3 * BURST_SECONDS / once))
        best: dict[Name, float] = {}
        for name, burst in zip(
            self.names, median_ms([partial(self.run, plan, times) for plan in self.plans], ROUNDS), strict=True
        ):
            best.setdefault(name, burst / times)
        return best


def operand(matrix: Matrix) -> Tensor:
    """Random numbers of a matrix's type, shape and strides."""
    dtype, (rows, columns), (stride, _) = matrix
    whole = torch.randn(rows, stride, device="cuda", dtype=torch.bfloat16).to(dtype)
    assert whole.data_ptr() % ALIGNMENT_BYTES == 0
    return whole[:, :columns]


def measure(lt: Lt, counts: Counter[Request]) -> dict[Key, list[Counted]]:
    """Print each product's times; those of bf16 outputs by their key in PREFERRED."""
    by_key: dict[Key, list[Counted]] = defaultdict(list)
    total = gained = 0.0
    for request, count in counts.items():
        product = Product(lt, request)
        best = product.milliseconds()
        shown = "  ".join(f"{name}{' now' if name == product.taken else ''} {ms:.4f}" for name, ms in best.items())
        print(f"{count:4} x {request}: {shown}", flush=True)
        total += count * best[product.taken]
        gained += count * (best[product.taken] - min(best.values()))
        if request.key:
            by_key[request.key].append((count, best))
    print(f"products of a micro-batch: {total:.1f} ms; {gained:.2f} ms less with the fastest of each")
    return by_key


def print_entries(by_key: dict[Key, list[Counted]]) -> None:
    """The fastest candidate of each key. Forward and backward may share one; a product that lacks a candidate takes its
    own first."""
    print("entries:")
    for key, products in by_key.items():
        names = dict.fromkeys(name for _, best in products for name in best)
        times = {n: sum(c * best.get(n, next(iter(best.values()))) for c, best in products) for n in names}
        first = sum(count * next(iter(best.values())) for count, best in products)
        fastest = min(times, key=lambda name: times[name])
        if times[fastest] < (1 - GAIN) * first:
            print(f"    {key}: {fastest},  # {times[fastest] / first - 1:+.1%} of {first:.2f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("--set", action="append", default=[], dest="changes", help="section.field=value")
    options = parser.parse_args()
    recipe = bench_recipe(options.recipe, ["runtime.engine=fused", *options.changes])
    if recipe.runtime.micro_batch_size == "auto":
        raise UserError("runtime.micro_batch_size: auto; name the sequences of a micro-batch, by --set")
    world = World.start(recipe.runtime)
    counts = products_of(recipe, world, recipe.runtime.micro_batch_size)
    torch.cuda.empty_cache()
    lt = lt_of(world)
    product = Product(lt, max(counts, key=lambda request: counts[request]))
    ended = time.perf_counter() + HEAT_SECONDS
    while time.perf_counter() < ended:
        median_ms([partial(product.run, product.plans[0], 100)], rounds=1)
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    print_entries(measure(lt, counts))


if __name__ == "__main__":
    run_as_command(main)
