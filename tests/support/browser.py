"""A real browser for pages: Debian's chromium, driven over its DevTools protocol."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import LONG_SECONDS

KEYS = {"Tab": 9, "Enter": 13, "ArrowLeft": 37}
COMPLAINTS = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")


class Browser:
    """Debian's chromium without a window, driven over a pair of pipes with its DevTools protocol."""

    FLAGS: tuple[str, ...] = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-sync",
    )
    FLAGS += ("--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe")

    def __init__(self, profile: Path) -> None:
        theirs_to_read, self.to = os.pipe()
        self.back, theirs_to_write = os.pipe()
        pipes = f'exec "$@" 3<&{theirs_to_read} 4>&{theirs_to_write}'  # the numbers that chromium expects
        self.process = subprocess.Popen(
            ["bash", "-c", pipes, "-", "chromium", *self.FLAGS, f"--user-data-dir={profile}"],
            pass_fds=(theirs_to_read, theirs_to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_to_read)
        os.close(theirs_to_write)
        self.rest, self.number, self.session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while (answer := self.read()).get("id") != self.number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def read(self) -> dict[str, Any]:
        while b"\0" not in self.rest:
            arrived = os.read(self.back, 1 << 16)
            assert arrived, "chromium has gone"
            self.rest += arrived
        message, _, self.rest = self.rest.partition(b"\0")
        return json.loads(message)

    def open(self, path: Path) -> None:
        self.visit(path.as_uri())

    def visit(self, address: str) -> None:
        self.events = [event for event in self.events if event.get("method") != "Page.loadEventFired"]
        self.call("Page.navigate", url=address)
        while not self.heard("Page.loadEventFired"):
            self.events.append(self.read())

    def js(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str, ctrl: bool = False) -> None:
        values = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key], "modifiers": 2 if ctrl else 0}
        self.call("Input.dispatchKeyEvent", type="rawKeyDown", **values)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=KEYS[key])

    def screen(self, width: int, scheme: str = "light") -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 500
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.js("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def heard(self, *methods: str) -> list[dict[str, Any]]:
        return [event["params"] for event in self.events if event.get("method") in methods]


@pytest.fixture
def open_browser(tmp_path: Path) -> Iterator[Browser]:
    if not shutil.which("chromium"):
        pytest.skip("needs chromium (apt)")
    started = Browser(tmp_path / "profile")
    yield started
    started.process.terminate()
    started.process.wait(LONG_SECONDS)
