"""A real browser without a window, driven over a pipe by Chromium's DevTools protocol."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["Browser", "Tab", "find_chromium"]

_TIMEOUT_S = 300.0
# The browser reads from descriptor 3 and writes to 4.
_START = """
import os, sys
for given, wanted in zip(sys.argv[1:3], (3, 4)):
    os.dup2(int(given), wanted)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find_chromium() -> str | None:
    """The program, if there is one."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next(filter(None, map(shutil.which, names)), None)


class Browser:
    """Chromium with an empty profile in ``folder``; ``with`` ends it."""

    def __init__(self, program: str, folder: Path) -> None:
        (from_us, ours), (theirs, from_them) = os.pipe(), os.pipe()
        far = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (from_us, from_them)]
        os.close(from_us)
        os.close(from_them)
        options = [
            "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu",
            "--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking",
            "--disable-component-update", "--disable-sync", f"--user-data-dir={folder}",
            "about:blank",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, *map(str, far), program, *options],
            pass_fds=far,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in far:
            os.close(end)
        self._write, self._read = ours, theirs
        self._rest, self._number = b"", 0
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError, TimeoutError):
            self.call("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def call(self, method: str, session: str = "", **parameters: Any) -> dict[str, Any]:
        """One command and its answer; what comes in between is kept in ``events``."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])
            self.events.append(answer)

    def wait_for(self, method: str, session: str) -> None:
        """Until an event comes that has not come yet."""
        while not any(e.get("method") == method and e.get("sessionId") == session
                      for e in self.events):  # fmt: skip
            self.events.append(self._next())

    def _next(self) -> dict[str, Any]:
        until = time.monotonic() + _TIMEOUT_S
        while b"\0" not in self._rest:
            if not select.select([self._read], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError("The browser does not answer.")
            got = os.read(self._read, 1 << 16)
            if not got:
                raise OSError("The browser went away.")
            self._rest += got
        one, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(one))

    def open(self, page: Path | str, *, width: int, height: int = 900, dark: bool = False,
             scripts: bool = True) -> Tab:  # fmt: skip
        """A file or an address in a new tab, once it is loaded."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = Tab(self, session)
        for domain in ("Page", "Network", "Runtime", "Log"):
            tab.call(f"{domain}.enable")
        tab.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        if dark:
            features = [{"name": "prefers-color-scheme", "value": "dark"}]
            tab.call("Emulation.setEmulatedMedia", features=features)
        if not scripts:
            tab.call("Emulation.setScriptExecutionDisabled", value=True)
        address = page if isinstance(page, str) else page.resolve().as_uri()
        tab.call("Page.navigate", url=address)
        self.wait_for("Page.loadEventFired", session)
        return tab


class Tab:
    """One page in the browser."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command for this page."""
        return self._browser.call(method, self._session, **parameters)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(str(result["exceptionDetails"]))
        return result["result"].get("value")

    def press(self, key: str) -> None:
        """A key, down and up."""
        codes = {
            "Tab": 9, "Enter": 13, "Escape": 27, "End": 35, "Home": 36, "ArrowLeft": 37,
            "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40,
        }  # fmt: skip
        about = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
        text = {"text": "\r"} if key == "Enter" else {}  # without it no form is sent
        for kind in ("keyDown" if text else "rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, **about, **text)

    def wait_until(self, expression: str) -> None:
        """Until a JavaScript expression is true in the page."""
        until = time.monotonic() + _TIMEOUT_S
        while not self.evaluate(expression):
            if time.monotonic() > until:
                raise TimeoutError(f"Never true in the page: {expression}")
            time.sleep(0.02)

    def screenshot(self, place: Path, *, whole: bool = True) -> None:
        """The page as a PNG."""
        told = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        place.write_bytes(base64.b64decode(told["data"]))

    @property
    def complaints(self) -> list[str]:
        """What the console and the log of the browser say."""
        kinds = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
        return [json.dumps(e["params"]) for e in self._events() if e["method"] in kinds]

    @property
    def requests(self) -> list[str]:
        """Addresses that were asked for, but the page itself."""
        found = [
            str(e["params"]["request"]["url"])
            for e in self._events()
            if e["method"] == "Network.requestWillBeSent"
        ]
        return [url for url in found if not url.startswith("data:")][1:]

    def _events(self) -> list[dict[str, Any]]:
        return [e for e in self._browser.events if e.get("sessionId") == self._session]
