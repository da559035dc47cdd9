"""The generated parts of the documentation: tables of fields, recipes, costs and measurements, and a plan.

`make docs` (`python -m benchmarks.documents`) writes them again, each between two comments of a Markdown file:
`<!-- generated: NAME -->` and `<!-- end -->`. `tests/repository/test_docs.py` fails when a part is stale.
"""

import io
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from pipelines.extras.bench.measurements import OURS, Measurements, Speed, measurements
from pipelines.recipe.loader import load_recipe, shipped
from pipelines.recipe.recipe import Recipe
from pipelines.run.plan import plan_of
from pipelines.run.stage import STAGES, plans_of
from pipelines.store.unread_store import UnreadStore
from pipelines.user.cloud.catalog import cheapest_of, shipped_machines, shipped_prices
from pipelines.user.cloud.planner import NO_LIMITS, Candidate, CloudPlan, Offered, plan_run, workload
from pipelines.user.cloud.request import LaunchRequest
from pipelines.user.cloud.tasks import managed_job
from pipelines.user.show.cloud_plan import print_cloud_plan
from pipelines.user.show.plan import print_plan
from trainer.config.extensions import FAMILIES, extension, names
from trainer.config.model_config import ModelConfig

ROOT = Path(__file__).resolve().parents[1]
FILES = ("README.md", "docs/recipes.md", "docs/measurements.md")
PART = re.compile(r"(<!-- generated: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
NUMBERS = ("integer", "number")
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
LLMC = "llm.c, its best flags (-r 0 -ge 2)"
SIZES = ("124M", "1558M")


def renewed(text: str) -> str:
    """A document with its generated parts made again."""
    return PART.sub(lambda part: part[1] + "".join(f"{line}\n" for line in PARTS[part["name"]]()) + part[3], text)


def table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    yield from (f"| {' | '.join(row)} |" for row in rows)


# --- recipes


def fields() -> Iterator[str]:
    """Every field of a recipe, a table a section."""
    single = (row(name, Recipe.model_fields[name]) for name in ("name", "custom"))
    yield from table(("field", "type", "unit", "default", "meaning"), single)
    head = ("field", "type", "unit", "default", "meaning")
    for section, info in Recipe.model_fields.items():
        families = section == "model"
        (each,) = get_args(info.annotation) if get_origin(info.annotation) is list else (info.annotation,)
        model = ModelConfig if families else each
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            continue
        yield from ("", f"### {section}", "", (model.__doc__ or "").split("\n\n")[0].replace("\n", " "), "")
        rows = [row(f"{section}.{name}", field) for name, field in model.model_fields.items()]
        yield from table(head, iter([*family_row(), *rows[1:], *family_fields()] if families else rows))


def sections() -> dict[str, type[ModelConfig]]:
    """The section `model` of each family."""
    return {name: extension(FAMILIES, name) for name in names(FAMILIES)}


def family_row() -> Iterator[tuple[str, ...]]:
    meanings = (f"{name}: {each.model_fields['family'].description}" for name, each in sections().items())
    yield "`model.family`", ", ".join(f"`{name}`" for name in sections()), "", "`gpt2`", "; ".join(meanings)


def family_fields() -> Iterator[tuple[str, ...]]:
    """The fields of `model` that only some families have."""
    having: dict[str, list[str]] = {}
    for name, section in sections().items():
        for field in section.model_fields:
            if field not in ModelConfig.model_fields:
                having.setdefault(field, []).append(name)
    for field in having:
        each = [row(f"model.{field}", sections()[name].model_fields[field]) for name in having[field]]
        defaults = dict.fromkeys(one[3] for one in each)
        default = ", ".join(defaults if len(defaults) == 1 else (one[3] for one in each))
        yield *each[0][:3], default, f"{', '.join(having[field])}: {each[0][4]}"


def row(name: str, field: FieldInfo) -> tuple[str, ...]:
    meaning, _, unit = (field.description or "").partition(" [")
    default = "required" if field.default is PydanticUndefined else f"`{as_yaml(field.default)}`"
    return f"`{name}`", type_of(field), unit.rstrip("]"), default, meaning


def type_of(field: FieldInfo) -> str:
    """The annotation of a field in YAML's terms, with its bounds."""
    return ", ".join(bounded(field.annotation, field.metadata))


def bounded(annotation: Any, constraints: Iterable[Any]) -> list[str]:
    bounds = ""
    for constraint in constraints:
        for name, sign in BOUNDS.items():
            if (bound := getattr(constraint, name, None)) is not None:
                bounds += f" {sign} {as_yaml(bound)}"
    return [name + (bounds if name in NUMBERS else "") for name in names_of(annotation)]


def names_of(annotation: Any) -> list[str]:
    if get_origin(annotation) is Annotated:
        return bounded(annotation.__origin__, annotation.__metadata__)
    if get_origin(annotation) in (UnionType, Union):
        return [name for member in get_args(annotation) for name in names_of(member)]
    if get_origin(annotation) is Literal:
        return [f"`{value}`" for value in get_args(annotation)]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [f"{{{', '.join(f'{name}: …' for name in annotation.model_fields)}}}"]
    if get_origin(annotation) is dict:
        return ["{NAME: VALUE, …}"]
    if get_origin(annotation) is list:
        return [f"list of {', '.join(names_of(get_args(annotation)[0]))}"]
    return [{int: "integer", float: "number", str: "text", bool: "boolean", NoneType: "null"}[annotation]]


def as_yaml(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, int):
        grouped = f"{value:,}".replace(",", "_") if value >= 10_000 else str(value)
        return grouped if value < 2**62 else "2^63"
    return f"{value:g}" if isinstance(value, float) else str(value)


def recipes() -> Iterator[str]:
    """The shipped recipes by size."""

    def rows() -> Iterator[tuple[str, ...]]:
        for name in shipped():
            recipe = load_recipe(name)
            model, train = recipe.model, recipe.train
            family = "" if model.family == "gpt2" else f"{model.family}, "
            shape = f"{family}{model.n_layer} x {model.n_embd}, {model.n_head} heads, T = {model.block_size}"
            batch, flops = f"{train.batch_tokens:,}", f"{recipe.train_flops:.1e}"
            parameters, steps = f"{model.parameters / 1e6:,.1f}M", f"{train.max_steps:,}"
            seen = recipe.train_tokens
            tokens = f"{seen / 1e9:,.1f}B" if seen > 1e8 else f"{seen:,}"
            yield f"`{name}`", parameters, shape, batch, steps, tokens, flops

    yield from table(("recipe", "parameters", "shape", "batch, tokens", "steps", "tokens", "FLOPs"), rows())


# --- costs

NOWHERE = UnreadStore("s3://bucket/prefix", "an example")
MACHINES = "H100:8"


def shipped_plan(recipe: Recipe, gpus: str = MACHINES) -> CloudPlan:
    """The plan of a whole run with the shipped prices, so that it is the same with every network."""
    offered, plans = Offered(), plans_of(recipe)
    for spot in (False, True):
        job = managed_job(LaunchRequest("a-run", NOWHERE.uri, spot=spot, gpus=gpus), STAGES)
        for task in job.tasks:
            sold = offered.setdefault(task.name, {})
            for wanted in task.machines:
                sold |= cheapest_of(wanted, shipped_machines(wanted))
    stages = [stage for stage in STAGES if stage != "tokenize" or recipe.tokens.subset]  # a small text is made here
    work = workload(recipe, NOWHERE, plans, stages, installs=True)
    return plan_run(work, offered, {}, NO_LIMITS, [f"prices of {shipped_prices()['date']}, which ship with skytrain"])


def costs() -> Iterator[str]:
    """Hours and dollars of the shipped recipes that one machine with 8 x H100 trains."""

    def cheapest(plan: CloudPlan, spot: bool) -> Candidate:
        return next(one for one in plan.candidates if one.machine and one.machine.spot == spot)

    def cell(one: Candidate) -> str:
        return f"{one.hours:,.1f} h, ${one.usd:,.{2 if one.usd < 100 else 0}f}"

    def rows() -> Iterator[tuple[str, ...]]:
        for name in shipped():
            recipe = load_recipe(name)
            if recipe.train_tokens < 1e9:  # for a CPU or a small GPU
                continue
            plan = shipped_plan(recipe)
            lasting, spot = cheapest(plan, spot=False), cheapest(plan, spot=True)
            if lasting.stages["train"].nodes == 1:
                yield f"`{name}`", f"{recipe.train_tokens / 1e9:,.1f}B", cell(lasting), cell(spot)

    yield from table(("recipe", "tokens", "on demand", "on spot"), rows())


def sample_plan() -> Iterator[str]:
    """What `skytrain plan gpt2-124m --cloud` prints without a network."""
    recipe = load_recipe("gpt2-124m")
    with redirect_stdout(io.StringIO()) as output:
        print_plan(plan_of(recipe, NOWHERE))
        print_cloud_plan(shipped_plan(recipe))
    yield from ("```", "$ skytrain plan gpt2-124m --cloud", *output.getvalue().splitlines(), "```")


# --- measurements


def results() -> Iterator[str]:
    """The table of README.md: speed, checkpoints, and times to resume."""
    known = measurements()
    names = list(dict.fromkeys(speed.name for speed in known.speeds if speed.main))

    def rows() -> Iterator[tuple[str, ...]]:
        for name in sorted(names, key=lambda n: 0 if (s := known.speed("124M", n)) and s.trainer == OURS else 1):
            yield label_of(name), *(speed_cell(known, size, name) for size in SIZES)
        saves = (f"{known.value(f'save_share_{size}'):.2%} of the time" for size in ("124m", "1558m"))
        yield "checkpoints at the interval of `auto` cost", *saves
        yield (
            "killed and started again, it trains after (1558M: from the new command)",
            *(f"{known.value(f'resume_{size}'):.0f} s" for size in ("124m", "1558m")),
        )

    yield from table(("tokens/s (MFU), against llm.c's best", *SIZES), rows())


def label_of(name: str) -> str:
    engine, _, precision = name.partition(", ")
    return f"**skytrain**, {engine} {precision}" if engine in ("fused", "compiled", "eager") else name


def speed_cell(known: Measurements, size: str, name: str) -> str:
    speed, base = known.speed(size, name), known.speed(size, LLMC)
    if speed is None or base is None:
        return ""
    mfu = f" ({speed.mfu:.1%})" if speed.mfu else ""
    return f"{speed.tokens_per_second:,}{mfu}, x {speed.tokens_per_second / base.tokens_per_second:.2f}"


def speeds() -> Iterator[str]:
    """Every measured speed."""

    def rows() -> Iterator[tuple[str, ...]]:
        for speed in measurements().speeds:
            yield (
                f"{speed.size}, {speed.gpus}",
                label_of(speed.name),
                f"{speed.tokens_per_second:,}",
                f"{speed.mfu:.1%}" if speed.mfu else "",
                f"{speed.memory_gib:.1f} GiB" if speed.memory_gib else "",
                speed.spread or "",
                conditions(speed),
            )

    yield from table(("model, GPUs", "trainer", "tokens/s", "MFU", "peak memory", "spread", "conditions"), rows())


def conditions(speed: Speed) -> str:
    torch = f"; torch {speed.torch}" if speed.torch else ""
    return f"{speed.machine}{torch}; {speed.date}"


def ratios() -> Iterator[str]:
    """Our fused engine against other trainers, with the same batch."""
    known = measurements()

    def ratio(size: str, ours: str, peer: str) -> str:
        own, other = known.speed(size, ours), known.speed(size, peer)
        return f"{own.tokens_per_second / other.tokens_per_second:.3f}" if own and other else ""

    ours = ("fused, bf16", "fused, fp8", "fused, fp8_head")

    def rows() -> Iterator[tuple[str, ...]]:
        for peer in dict.fromkeys(s.trainer for s in known.speeds if s.trainer != OURS and s.gpus == "H200:1"):
            yield peer, *(" / ".join(ratio(size, each, peer) for each in ours) for size in SIZES)

    yield from table(("bf16 / fp8 / fp8_head against", *SIZES), rows())


def figures() -> Iterator[str]:
    """Every single figure, with its circumstances."""

    def rows() -> Iterator[tuple[str, ...]]:
        for name, figure in measurements().figures.items():
            value = f"{figure.value:,g} {figure.unit}"
            where = f"{figure.machine}; {figure.date}; `{figure.command}`"
            yield f"`{name}`", figure.what, value, figure.spread or "", where, figure.source

    yield from table(("name", "figure", "value", "spread", "conditions", "source"), rows())


PARTS: dict[str, Callable[[], Iterator[str]]] = {
    "fields": fields,
    "recipes": recipes,
    "costs": costs,
    "plan": sample_plan,
    "results": results,
    "speeds": speeds,
    "ratios": ratios,
    "figures": figures,
}


def main() -> None:
    for name in FILES:
        path = ROOT / name
        text = path.read_text(encoding="utf8")
        if (fresh := renewed(text)) != text:
            path.write_text(fresh, encoding="utf8")
            print(f"wrote {name}", file=sys.stderr)


if __name__ == "__main__":
    main()
