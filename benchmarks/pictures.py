"""The two pictures of README.md, from a real run: the run card and the head of the report page.

`python -m benchmarks.pictures [--out FOLDER] [--home FOLDER]` runs the recipe `smoke` in a scratch folder, kills it
with SIGKILL in the middle of the training, and runs the same command again. The card is the output of the command, as
SVG by rich; the page is `skytrain report --html` in headless chromium. Five minutes on 2 cores. `--home` keeps the run
and draws the pictures again from it.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = 104
INDENT = 12  # of the card's facts
PAGE = 1120, 925  # pixels of the window, of which a README shows some 830 across
SKYTRAIN = (sys.executable, "-m", "pipelines.cli")
PRICE = ("--price-per-hour", "0.10")  # of a CPU machine of this size
KILL_AT = "40%"
CHROMIUM = ("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars")


def environment(home: Path) -> dict[str, str]:
    """The environment of a user with the scratch folder as home: pictures show `~` and no path of this machine."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SKY", "MLFLOW"))}
    return inherited | {"HOME": str(home), "PYTHONPATH": str(ROOT), "COLUMNS": str(COLUMNS), "SKYTRAIN_NOTICE": "off"}


def run_and_kill(folder: Path, environ: dict[str, str]) -> None:
    """`skytrain run smoke`, killed with all its processes once its log shows KILL_AT of the training."""
    log = folder / "first.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*SKYTRAIN, "run", "smoke", *PRICE], cwd=folder, env=environ, stderr=output, start_new_session=True
        )
    while process.poll() is None:
        lines = re.findall(r"train +(\d+)%", log.read_text(errors="replace"))
        if lines and int(lines[-1]) >= int(KILL_AT.rstrip("%")):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return
        time.sleep(0.2)
    raise SystemExit(f"the run ended before {KILL_AT} of its training:\n{log.read_text()}")


def run_to_the_end(folder: Path, environ: dict[str, str]) -> str:
    """The output of `skytrain run smoke` on a terminal: text with ANSI escapes."""
    command = [*SKYTRAIN, "run", "smoke", *PRICE]
    colours = environ | {"FORCE_COLOR": "1"}
    with (folder / "second.log").open("wb") as log:  # with colours on, bars are redrawn ten times a second
        done = subprocess.run(command, cwd=folder, env=colours, stdout=subprocess.PIPE, stderr=log, check=True)
    return done.stdout.decode()


def card_svg(ansi: str) -> str:
    """The card as SVG that loads nothing: rich's own template names web fonts."""
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere)
        for line in Text.from_ansi(ansi.rsplit("Next", 1)[0].strip("\n")).split(allow_blank=True):
            line.rstrip()
            rest = line[INDENT:].wrap(console, COLUMNS - INDENT) if len(line) > COLUMNS else [line[INDENT:]]
            for number, piece in enumerate(rest):
                console.print(Text.assemble(line[:INDENT] if number == 0 else " " * INDENT, piece))
    svg = console.export_svg(title="skytrain run smoke")
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)


def page_png(page: Path, to: Path, profile: Path) -> None:
    """The top of a page as PNG."""
    width, height = PAGE
    subprocess.run(
        [
            *CHROMIUM,
            f"--user-data-dir={profile}",
            f"--window-size={width},{height}",
            f"--screenshot={to}",
            page.as_uri(),
        ],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures")
    parser.add_argument("--home", type=Path, help="keep the run here, and take it from here if it is done")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="skytrain-pictures-") as scratch:
        home = (options.home or Path(scratch)).resolve()
        folder = home / "skytrain"
        folder.mkdir(parents=True, exist_ok=True)
        environ, card = environment(home), home / "card.ansi"
        if not card.exists():
            run_and_kill(folder, environ)
            card.write_text(run_to_the_end(folder, environ))
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "card.svg").write_text(card_svg(card.read_text().replace(str(home), "~")))
        report = home / "report.html"
        subprocess.run([*SKYTRAIN, "report", "--html", str(report)], cwd=folder, env=environ, check=True)
        page_png(report, (options.out / "report.png").resolve(), Path(scratch) / "chromium")
        for name in ("card.svg", "report.png"):
            print(f"{options.out / name}: {(options.out / name).stat().st_size / 1024:.0f} kB")


if __name__ == "__main__":
    main()
