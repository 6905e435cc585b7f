"""A browser for tests: Chromium or Chrome without a window, where it and its driver are installed.

The driver speaks WebDriver, https://www.w3.org/TR/webdriver2: JSON over HTTP on loopback.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

# The arrow keys, for `type`.
LEFT, RIGHT = "\ue012", "\ue014"


class BrowserError(Exception):
    """What the driver says about a command."""


class Browser:
    """One window. Scripts are bodies of functions: ``return`` gives their result."""

    def __init__(self, address: str) -> None:
        self.address = address

    def _send(self, command: str, **body: Any) -> Any:
        data = json.dumps(body).encode()
        headers, method = {"Content-Type": "application/json"}, "POST" if command else "DELETE"
        request = urllib.request.Request(self.address + command, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return json.load(response)["value"]
        except urllib.error.HTTPError as error:
            raise BrowserError(json.load(error)["value"]["message"]) from None

    def open(self, url: str, *, width: int, height: int = 900, dark: bool = False) -> None:
        """Load a page in a window of ``width`` x ``height`` pixels, for a user who prefers light or dark pages."""
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self._devtools("Emulation.setDeviceMetricsOverride", **screen)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._devtools("Emulation.setEmulatedMedia", features=[scheme])
        self._send("/url", url=url)

    def run(self, script: str, *arguments: Any) -> Any:
        """Run JavaScript in the page."""
        return self._send("/execute/sync", script=script, args=arguments)

    def wait_for(self, script: str) -> Any:
        """Run JavaScript after each change of the page until its result is true; returns that."""
        waiting = f"""const done = arguments[0], ask = () => {{ {script} }};
        const look = () => {{ const found = ask(); found ? done(found) : requestAnimationFrame(look) }}; look()"""
        return self._send("/execute/async", script=waiting, args=[])

    def type(self, keys: str) -> None:
        """Press keys, one after the other."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._send("/actions", actions=[{"type": "key", "id": "keys", "actions": actions}])

    def turn_wheel(self, x: int, y: int, by: int) -> None:
        """Turn the wheel with the pointer at a place of the window; a positive number scrolls down."""
        turn = {"type": "scroll", "x": x, "y": y, "deltaX": 0, "deltaY": by, "duration": 0, "origin": "viewport"}
        self._send("/actions", actions=[{"type": "wheel", "id": "wheel", "actions": [turn]}])

    def touch(self, *fingers: list[tuple[int, int]]) -> None:
        """Put fingers on the screen, move them along their places together, and lift them."""
        each = []
        for number, places in enumerate(fingers):
            moves = [{"type": "pointerMove", "x": x, "y": y, "duration": 50} for x, y in places]
            actions = [moves[0], {"type": "pointerDown", "button": 0}, *moves[1:], {"type": "pointerUp", "button": 0}]
            parameters = {"pointerType": "touch"}
            each.append({"type": "pointer", "id": f"{number}", "parameters": parameters, "actions": actions})
        self._send("/actions", actions=each)

    def save_screenshot(self, path: Path) -> None:
        """Write the visible part of the page as a PNG."""
        shot = self._devtools("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))

    def _devtools(self, command: str, **parameters: Any) -> Any:
        return self._send("/goog/cdp/execute", cmd=command, params=parameters)


@contextmanager
def new_browser() -> Iterator[Browser]:
    """A browser that ends with the block; skips the test where none is installed."""
    driver = shutil.which("chromedriver")
    program = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser"))), None)
    if driver is None or program is None:
        pytest.skip("needs Chromium or Chrome, and chromedriver")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", f"--user-data-dir={profile}"]
        options = {"browserName": "chrome", "goog:chromeOptions": {"binary": program, "args": flags}}
        with subprocess.Popen(
            [driver, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            try:
                assert process.stdout is not None
                port = next(found[1] for line in process.stdout if (found := re.search(r"on port (\d+)\.", line)))
                browser = Browser(f"http://127.0.0.1:{port}")
                try:
                    started = browser._send("/session", capabilities={"alwaysMatch": options})
                except BrowserError as error:  # for example without the libraries that it needs
                    pytest.skip(f"the browser does not start: {error}")
                browser.address += f"/session/{started['sessionId']}"
                try:
                    yield browser
                finally:
                    browser._send("")
            finally:
                process.terminate()
