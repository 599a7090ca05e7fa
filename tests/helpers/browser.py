"""A headless Chromium for tests, driven through its DevTools protocol: pages are loaded, clicked and photographed."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_PATIENCE = 60.0


class Browser:
    """One tab. `errors` collects console errors, uncaught exceptions and failed loads of the current page."""

    def __init__(self) -> None:
        program = next((found for name in _NAMES if (found := shutil.which(name))), None)
        if program is None:
            pytest.skip(f"no browser: none of {', '.join(_NAMES)} is installed (Debian: apt install chromium)")
        self.errors: list[str] = []
        self._folder = tempfile.mkdtemp(prefix="lacuna-browser-")
        self._process = subprocess.Popen(
            [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
             "--disable-extensions", "--disable-background-networking", "--window-size=1280,1600",
             "--remote-debugging-port=0", "--remote-allow-origins=*", f"--user-data-dir={self._folder}", "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._loop = asyncio.new_event_loop()
        self._replies: dict[int, asyncio.Future] = {}
        self._number = 0
        self._run(self._connect())

    def close(self) -> None:
        self._run(self._disconnect())
        self._loop.close()
        self._process.terminate()
        self._process.wait(120)
        shutil.rmtree(self._folder, ignore_errors=True)

    def open(self, url: str, ready: str = "document.readyState === 'complete'") -> None:
        """Load a page and wait until the expression is true; its errors so far are in `errors`."""
        self.errors.clear()
        self.call("Page.navigate", url=url)
        self.wait_for(ready)

    def evaluate(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> None:
        end = time.monotonic() + _PATIENCE
        # Between two pages there is no body to ask about.
        while not self.evaluate(f"(() => {{ try {{ return Boolean({expression}); }} catch {{ return false; }} }})()"):
            assert time.monotonic() < end, f"{expression} did not become true; errors: {self.errors}"
            time.sleep(0.05)

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, **({"text": key} if len(key) == 1 else {}))

    def prefer(self, scheme: str) -> None:
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def resize(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                  mobile=width < 600)

    def screenshot(self, path: Path) -> None:
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def call(self, method: str, **params: Any) -> dict:
        return self._run(self._send(method, params))

    def _run(self, coroutine: Any) -> Any:
        return self._loop.run_until_complete(asyncio.wait_for(coroutine, _PATIENCE))

    async def _connect(self) -> None:
        port_file = Path(self._folder, "DevToolsActivePort")
        while not port_file.exists() or not port_file.read_text().strip():
            assert self._process.poll() is None, "the browser ended at once"
            await asyncio.sleep(0.05)
        port = port_file.read_text().split()[0]
        self._session = aiohttp.ClientSession()
        async with self._session.get(f"http://127.0.0.1:{port}/json/list") as answer:
            pages = await answer.json(content_type=None)
        target = next(page for page in pages if page["type"] == "page")["webSocketDebuggerUrl"]
        self._socket = await self._session.ws_connect(target, max_msg_size=0)
        self._reader = asyncio.ensure_future(self._read())
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self._send(f"{domain}.enable", {})

    async def _disconnect(self) -> None:
        self._reader.cancel()
        await self._socket.close()
        await self._session.close()

    async def _send(self, method: str, params: dict) -> dict:
        self._number += 1
        waiting = self._replies[self._number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        reply = await waiting
        assert "error" not in reply, f"{method}: {reply['error']}"
        return reply["result"]

    async def _read(self) -> None:
        async for message in self._socket:
            body = json.loads(message.data)
            if "id" in body:
                self._replies.pop(body["id"]).set_result(body)
            elif body["method"] == "Runtime.exceptionThrown":
                self.errors.append(str(body["params"]["exceptionDetails"]))
            elif body["method"] == "Runtime.consoleAPICalled" and body["params"]["type"] in ("error", "assert"):
                self.errors.append(str(body["params"]["args"]))
            elif body["method"] == "Log.entryAdded" and body["params"]["entry"]["level"] == "error":
                self.errors.append(str(body["params"]["entry"]))
