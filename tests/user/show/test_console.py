"""Values in the terminal: durations, text without control characters, and commands that this shell can run."""

import contextlib
import logging
import subprocess
import sys
from typing import Any

import pytest
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from run_records import attempted, done_run

from pipelines import cli
from pipelines.run.runs import Run
from pipelines.store.records import Machine, Progress
from pipelines.user.show.bill import print_bill
from pipelines.user.show.console import JobLog, TerminalScreen, console, printable, say
from pipelines.user.show.runs import print_runs, print_series
from pipelines.user.show.warnings import make_warnings_printable
from trainer.base.store import LocalStore
from trainer.config.errors import EXIT_MISTAKE, Ending

HOSTILE = "\x1b[31m\x1b]0;title\x07\x9b2J\r\u202e[link=https://evil]here[/link]"
CONTROLS = "\x1b\x07\x9b\r\u202e"


def test_generated_text_cannot_control_a_terminal() -> None:
    assert printable("a\tb\n\x1b[31m\x00é\u202e") == "a\tb\n·[31m·é·"


def test_no_way_to_the_terminal_lets_control_characters_pass(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("x")
    table.add_row(Text(HOSTILE))
    for shown in (Text(HOSTILE), table, Panel(Text(HOSTILE), title=HOSTILE.partition("[link")[0])):
        console().print(shown)
    say(HOSTILE)
    say(HOSTILE, on_stderr=True)
    screen = TerminalScreen()
    screen.note(HOSTILE)
    screen.warn(HOSTILE)
    make_warnings_printable()
    assert logging.lastResort
    logging.lastResort.handle(logging.makeLogRecord({"msg": HOSTILE, "levelno": logging.WARNING}))
    with contextlib.suppress(SystemExit):
        cli.exit_with(Ending(EXIT_MISTAKE, HOSTILE))
    out, err = capsys.readouterr()
    assert out.count("title") == 5 and err.count("title") == 5
    assert not set(CONTROLS) & set(out + err)


def test_names_in_the_store_cannot_control_the_terminal_of_a_report(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    made = done_run(store)
    hostile: dict[str, Any] = {
        "price_source": HOSTILE,
        "machine": Machine(cloud=HOSTILE, instance=f"one\ntwo {HOSTILE}"),
        "phases": {HOSTILE: 60.0},
        "progress": Progress(notice=HOSTILE),
    }
    attempted(store, "train", 2, state=HOSTILE, **hostile)
    store.put(f"{made.prefixes['train']}/attempts/0099\x9b2J/heartbeat.json", b"{")
    run = Run(store, made)
    print_runs([run.summary], store.uri)
    print_bill(run)
    print_series(HOSTILE, [{"step": 1, "train/loss": 1.0}])
    out = capsys.readouterr().out
    assert "one·two" in out  # a name cannot forge a row
    assert "title" in out and "[link=https://evil]" in out and not set(CONTROLS) & set(out)


# --- commands


def test_a_jobs_log_loses_colours_and_controls_the_terminal_by_progress_bars_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    hostile = "\x1b]0;title\x07 \x1b[2J \x1b[1;1H \x1b]52;c;cm0=\x1b\\ \x9b2J \x1bc \x08\x08 \x1b[?1049h \u202egnp.exe"
    print(hostile, "\x1b[31mred\x1b[0m \t 50%\r100%\n", "\x1b[" + "1;" * 99 + "m", file=JobLog())
    out = capsys.readouterr().out
    assert " red \t 50%\r100%\n" in out and "title" in out and "·[2J" in out  # what was there stays visible
    assert all(c.isprintable() or c in "\n\t\r" for c in out)


def test_a_run_goes_on_when_nobody_reads_its_messages_any_longer() -> None:
    code = """
import sys
from pipelines.cli import quiet_if_unread
from pipelines.user.show.console import TerminalScreen
screen = TerminalScreen()
with quiet_if_unread():
    sys.stdin.read()
    for _ in range(3):
        screen.note("stopping: the ranks commit")
    sys.exit(75)
"""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stderr=pipe) as process:
        assert process.stdin and process.stderr
        process.stderr.close()
        process.stdin.close()
        assert process.wait() == 75
