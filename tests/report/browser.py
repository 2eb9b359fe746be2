"""A real browser for the tests of the page: headless Chromium, spoken to through two pipes."""

import base64
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

# Chromium reads its orders from file 3 and answers into file 4.
START = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 20) for end in sys.argv[1:3]]
for place, end in zip((3, 4), ends):
    os.dup2(end, place)
os.execvp(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """One tab; `errors` collects complaints of the console and the network, `requests` the addresses asked for."""

    def __init__(self, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        self.folder = tempfile.mkdtemp()
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        command += ["--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
        command += [f"--user-data-dir={self.folder}", f"--window-size={width},{height}", "about:blank"]

        ends = to_browser, from_browser
        start = [sys.executable, "-c", START, *map(str, ends), *command]
        self.process = subprocess.Popen(start, pass_fds=ends, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_browser)
        os.close(from_browser)
        self.errors, self.requests = [], []
        self._rest, self._count, self._session = b"", 0, None
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self.downloads = Path(self.folder) / "downloads"
        self("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(self.downloads))
        self._session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self(f"{domain}.enable")
        self.look(width, height, dark)

    def look(self, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """The size of the window, and whether its reader prefers dark pages."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self("Emulation.setDeviceMetricsOverride", **size)
        colours = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self("Emulation.setEmulatedMedia", features=[colours])

    def __call__(self, method, **values):
        """Send an order and wait for its answer."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": values}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def _next(self):
        while b"\0" not in self._rest:
            piece = os.read(self._read, 1 << 20)
            assert piece, "the browser ended"
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(line)
        method, values = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])
        if method == "Runtime.exceptionThrown" or (method == "Log.entryAdded" and values["entry"]["level"] == "error"):
            self.errors.append(values)
        if method == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning"):
            self.errors.append(values)
        return message

    def open(self, path: Path) -> None:
        self("Page.navigate", url=path.resolve().as_uri())
        while self.value("document.readyState") != "complete":
            time.sleep(0.05)

    def value(self, expression):
        """What a script gives; promises are waited for."""
        result = self("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def download(self, selector: str, name: str) -> bytes:
        """What a click on an element puts into the folder for downloads, once it is whole."""
        path = self.downloads / name
        path.unlink(missing_ok=True)
        self.value(f"document.querySelector('{selector}').click()")
        until = time.monotonic() + 20
        while not path.exists() or path.stat().st_size == 0:
            assert time.monotonic() < until, f"{name} did not come: {list(self.downloads.glob('*'))}"
            time.sleep(0.05)
        return path.read_bytes()

    def screenshot(self, path: Path, whole: bool = True) -> None:
        picture = self("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        if whole:
            size = self("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
            picture = self("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(picture["data"]))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._write)
        self.process.terminate()
        self.process.wait(10)
        os.close(self._read)
        shutil.rmtree(self.folder, ignore_errors=True)
