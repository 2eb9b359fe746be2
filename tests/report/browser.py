"""Headless Chromium for the tests of the page, driven by the DevTools protocol over two pipes."""

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

# With --remote-debugging-pipe, Chromium reads commands from file descriptor 3 and writes replies to 4.
START = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 20) for end in sys.argv[1:3]]
for fd, end in zip((3, 4), ends):
    os.dup2(end, fd)
os.execvp(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """One tab; `errors` collects console and network errors, `requests` the requested URLs."""

    def __init__(self, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        self.folder = tempfile.mkdtemp()
        to_browser, self._write_fd = os.pipe()
        self._read_fd, from_browser = os.pipe()
        command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        command += ["--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
        command += [f"--user-data-dir={self.folder}", f"--window-size={width},{height}", "about:blank"]

        fds = to_browser, from_browser
        launcher = [sys.executable, "-c", START, *map(str, fds), *command]
        self.process = subprocess.Popen(launcher, pass_fds=fds, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_browser)
        os.close(from_browser)
        self.errors, self.requests = [], []
        self._buffer, self._last_id, self._session_id = b"", 0, None
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self.downloads = Path(self.folder) / "downloads"
        self("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(self.downloads))
        self._session_id = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self(f"{domain}.enable")
        self.look(width, height, dark)

    def look(self, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Set the window size and the preferred colour scheme."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self("Emulation.setDeviceMetricsOverride", **size)
        colours = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self("Emulation.setEmulatedMedia", features=[colours])

    def __call__(self, method, **values):
        """Send a command and wait for its reply."""
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": values}
        if self._session_id:
            message["sessionId"] = self._session_id
        os.write(self._write_fd, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._last_id:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def _next(self):
        while b"\0" not in self._buffer:
            chunk = os.read(self._read_fd, 1 << 20)
            assert chunk, "the browser ended"
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\0")
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
        """Evaluate an expression and return its value, awaiting promises."""
        result = self("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def download(self, selector: str, name: str) -> bytes:
        """Click an element and return the downloaded file."""
        path = self.downloads / name
        path.unlink(missing_ok=True)
        self.value(f"document.querySelector('{selector}').click()")
        deadline = time.monotonic() + 20
        while not path.exists() or path.stat().st_size == 0:
            assert time.monotonic() < deadline, f"{name} did not come: {list(self.downloads.glob('*'))}"
            time.sleep(0.05)
        return path.read_bytes()

    def screenshot(self, path: Path, full_page: bool = True) -> None:
        capture = self("Page.captureScreenshot", format="png", captureBeyondViewport=full_page)
        if full_page:
            size = self("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
            capture = self("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(capture["data"]))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._write_fd)
        self.process.terminate()
        self.process.wait(10)
        os.close(self._read_fd)
        shutil.rmtree(self.folder, ignore_errors=True)
