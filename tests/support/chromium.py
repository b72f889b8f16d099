"""Headless Chromium, driven over its debugging pipe (JSON messages between zero bytes); standard library only."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Self

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
    "--metrics-recording-only", "--remote-debugging-pipe",
)  # fmt: skip
PATIENCE = 60.0  # seconds for an answer: a machine of two cores may be busy


def find_chromium() -> str | None:
    """Return the path of a Chromium; None if there is none."""
    return next((path for name in PROGRAMS if (path := shutil.which(name))), None)


class Browser:
    """One headless Chromium; `open` shows a page of it. A context manager, which ends the process."""

    def __init__(self, program: str) -> None:
        self.profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        to_read, self.commands = os.pipe()
        self.answers, to_write = os.pipe()
        command = [program, *FLAGS, f"--user-data-dir={self.profile.name}", "about:blank"]
        # It reads from file descriptor 3 and writes to 4; dash knows no descriptors of two digits.
        to_read, to_write = (_move_away(descriptor) for descriptor in (to_read, to_write))
        shell = ["bash", "-c", f'exec "$@" 3<&{to_read} 4>&{to_write}', "bash", *command]
        self.process = subprocess.Popen(
            shell, pass_fds=(to_read, to_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_read)
        os.close(to_write)
        self.received = b""
        self.number = 0
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.commands)
        os.close(self.answers)
        self.profile.cleanup()

    def send(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result; events that come meanwhile are collected."""
        self.number += 1
        message: dict[str, Any] = {"id": self.number, "method": method, "params": parameters}
        message |= {} if session is None else {"sessionId": session}
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            answer = self._read(end - time.monotonic())
            if answer is None:
                continue
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)
        raise TimeoutError(f"Chromium did not answer {method} in {PATIENCE:.0f} s")

    def wait_for(self, event: str, session: str) -> None:
        """Wait for an event of a session."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if any(one["method"] == event and one.get("sessionId") == session for one in self.events):
                return
            if (answer := self._read(end - time.monotonic())) is not None:
                self.events.append(answer)
        raise TimeoutError(f"Chromium did not send {event} in {PATIENCE:.0f} s")

    def _read(self, seconds: float) -> dict[str, Any] | None:
        """Read the next message; None if none is complete yet."""
        if b"\0" not in self.received:
            if not select.select([self.answers], [], [], max(seconds, 0))[0]:
                return None
            received = os.read(self.answers, 1 << 20)
            if not received:
                raise RuntimeError(f"Chromium ended with {self.process.wait(20)}")
            self.received += received
            if b"\0" not in self.received:
                return None
        message, _, self.received = self.received.partition(b"\0")
        return json.loads(message)

    def open(self, path: Path, width: int = 1400, height: int = 900, dark: bool = False) -> "Tab":
        """Open a file in a window of that size, and wait until it is loaded."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = Tab(self, target, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab.send(f"{domain}.enable")
        tab.resize(width, height)
        tab.send("Emulation.setEmulatedMedia", features=[_colour_scheme(dark)])
        tab.send("Page.navigate", url=path.resolve().as_uri())
        self.wait_for("Page.loadEventFired", session)
        return tab


class Tab:
    """Page that is open in a browser."""

    def __init__(self, browser: Browser, target: str, session: str) -> None:
        self.browser, self.target, self.session = browser, target, session

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command to the page."""
        return self.browser.send(method, self.session, **parameters)

    def evaluate(self, script: str) -> Any:
        """Return the value of a JavaScript expression, as JSON."""
        result = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"].get("exception", {}).get("description", script))
        return result["result"].get("value")

    def resize(self, width: int, height: int = 900) -> None:
        """Resize the window."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def prefer_dark(self, dark: bool) -> None:
        """Switch between a user who prefers dark and one who prefers light."""
        self.send("Emulation.setEmulatedMedia", features=[_colour_scheme(dark)])

    def print_preview(self) -> None:
        """Show the page as it is printed, for a user who prefers dark screens."""
        self.send("Emulation.setEmulatedMedia", media="print", features=[_colour_scheme(True)])

    def move_to(self, x: float, y: float) -> None:
        """Move the mouse to a point of the window."""
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, key: str) -> None:
        """Press and release a key, by its name, such as ArrowRight."""
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def screenshot(self, whole: bool = False) -> bytes:
        """Return a PNG of the window, or of the whole page."""
        return base64.b64decode(self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"])

    def problems(self) -> list[str]:
        """List errors and warnings of scripts, and of the browser, such as a refused request."""
        listed = []
        for event in self._events():
            parameters = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                listed.append(str(parameters["exceptionDetails"]))
            elif event["method"] == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
                listed.append(parameters["entry"]["text"])
            elif event["method"] == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
                listed.append(str(parameters["args"]))
        return listed

    def requests(self) -> list[str]:
        """List the addresses that the page has asked for, without the data in it."""
        events = [event["params"] for event in self._events() if event["method"] == "Network.requestWillBeSent"]
        return [url for event in events if not (url := event["request"]["url"]).startswith("data:")]

    def close(self) -> None:
        """Close the page."""
        self.browser.send("Target.closeTarget", targetId=self.target)

    def _events(self) -> list[dict[str, Any]]:
        self.evaluate("1")  # what has happened so far has been sent before its answer
        return [event for event in self.browser.events if event.get("sessionId") == self.session]


def _move_away(descriptor: int) -> int:
    """Move a file descriptor away from 3 and 4."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD, 10)
    os.close(descriptor)
    return moved


def _colour_scheme(dark: bool) -> dict[str, str]:
    return {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
