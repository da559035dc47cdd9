"""The rooms form layers: an import leads to a lower layer, no circle exists, and nothing below the verbs prints."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Top to bottom. An entry is a package; the longest matching entry decides. The modules of one entry may import each
# other, without a circle.
LAYERS = (
    ("pipelines.cli",),
    ("pipelines.user.verbs",),
    ("pipelines.user.show",),
    ("pipelines.user",),
    ("pipelines.job",),
    ("pipelines.extras",),
    ("pipelines.run",),
    ("pipelines.recipe",),
    ("pipelines.store",),
    ("pipelines",),  # its __init__.py
    ("trainer.__main__",),
    ("trainer.loop",),
    ("trainer.eval",),
    ("trainer.engines",),
    ("trainer.checkpoint",),
    ("trainer.models",),
    ("trainer.data",),
    ("trainer.optim",),
    ("trainer.base",),
    ("trainer.config",),
    ("trainer",),
)
PRINTING = ("pipelines.cli", "pipelines.user.verbs", "pipelines.user.show")

# Modules below the verbs that may print, each with its reason.
PRINTERS = {
    "pipelines.run.stages.rank": "a rank is a process of its own: its stderr is the log that node 0 reads",
    "pipelines.extras.mlflow.settings": "the mirror is a process of its own: its stdout is its log file",
    "trainer.__main__": "the command `python -m trainer`: its result and its errors",
    "trainer.loop.watchdog": "a stuck rank writes its last line and all tracebacks, then exits at once",
    "trainer.base.process": "log_line: the log of the ranks",
}


@cache
def modules() -> dict[str, Path]:
    """Every module of trainer and pipelines, by name."""
    paths = [path for top in ("trainer", "pipelines") for path in (ROOT / top).rglob("*.py")]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def imports(tree: ast.Module) -> Iterator[str]:
    """Our modules that a file imports: at the top, in functions, and under TYPE_CHECKING. A type is knowledge too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules())
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if name in modules():
                    yield name
                elif node.module in modules():
                    yield str(node.module)


def prints(tree: ast.Module) -> bool:
    """True if the file calls print, typer.echo or a method of sys.stdout or sys.stderr, or makes a rich Console."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in ("print", "Console", "echo", "typer.echo", "secho", "typer.secho"):
                return True
            if called.startswith(("rich.", "sys.stdout.", "sys.stderr.")) and not called.endswith(".isatty"):
                return True
    return False


def raw_prints(tree: ast.Module) -> list[str]:
    """The calls of print with text that may hold control characters: neither JSON nor YAML, nor made printable."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "print"]
    safe = ("json.dumps", "printable", "to_yaml")
    return [
        ast.unparse(call)
        for call in calls
        if not (isinstance(call.args[0], ast.Call) and ast.unparse(call.args[0].func).endswith(safe))
    ]


@cache
def trees() -> dict[str, ast.Module]:
    return {name: ast.parse(path.read_text(), filename=str(path)) for name, path in modules().items()}


@cache
def arrows() -> frozenset[tuple[str, str]]:
    """(importer, imported), over all modules."""
    return frozenset((name, other) for name, tree in trees().items() for other in imports(tree) if other != name)


def layer_entry(module: str) -> tuple[int, str]:
    """The layer's number, 0 on top, and the entry that puts the module there."""
    entries = [
        (number, entry)
        for number, layer in enumerate(LAYERS)
        for entry in layer
        if module == entry or module.startswith(f"{entry}.")
    ]
    assert entries, f"{module} has no layer"
    return max(entries, key=lambda found: len(found[1]))


def in_circles(graph: frozenset[tuple[str, str]]) -> set[tuple[str, str]]:
    """The arrows that lie on a circle: from their end there is a way back to their beginning."""
    following: dict[str, set[str]] = {}
    for start, end in graph:
        following.setdefault(start, set()).add(end)

    @cache
    def reachable(start: str) -> frozenset[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            fresh = following.get(waiting.pop(), set()) - seen
            seen |= fresh
            waiting += fresh
        return frozenset(seen)

    return {(start, end) for start, end in graph if start in reachable(end)}


def test_an_import_leads_to_the_same_layer_or_a_lower_one() -> None:
    assert {(start, end) for start, end in arrows() if layer_entry(start)[0] > layer_entry(end)[0]} == set()


def test_no_circle_exists_between_modules() -> None:
    assert in_circles(arrows()) == set()


def test_only_verbs_and_show_print() -> None:
    below = {name for name in modules() if layer_entry(name)[1] not in PRINTING}
    printing = {name for name in below if prints(trees()[name])}
    assert printing == PRINTERS.keys()


def test_text_reaches_the_terminal_through_the_console_which_removes_control_characters() -> None:
    """Use `say` or `console()` of pipelines/user/show/console.py instead of `print`."""
    printing = {name for name in modules() if layer_entry(name)[1] in PRINTING}
    assert {name: calls for name in printing if (calls := raw_prints(trees()[name]))} == {}
    consoles = {name for name, tree in trees().items() if "Console(" in ast.unparse(tree)}
    assert consoles == {"pipelines.user.show.console"}


def test_a_key_of_the_store_is_spelled_in_the_two_files_of_its_layout() -> None:
    names = r"/?(?:attempts|checkpoints|metrics|runs|launches|summaries|control)/.*|(?:.*/)?[A-Z]{6,8}\.json"
    spelled = {
        name
        for name, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(names, node.value)
    }
    assert spelled == {"pipelines.store.layout", "trainer.checkpoint.layout"}
