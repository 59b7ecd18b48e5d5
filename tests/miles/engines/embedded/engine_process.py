"""An engine in a process of its own, and calls to it, for tests."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, Self

import aiohttp
import torch
from safetensors.torch import save

LOADER = "tests.miles.engines.embedded.loaders.load"
_ROOT = Path(__file__).parents[4]


class EngineProcess:
    """Starts in `__enter__`, on a port of its own choice; ends by SIGTERM in `__exit__`."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._command = [sys.executable, "-m", "miles.engines.embedded", "--model-path", str(folder), "--port", "0"]
        self._command += arguments
        self.url = ""

    def __enter__(self) -> Self:
        self._errors = tempfile.TemporaryFile("w+")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT)}
        self.process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=self._errors, env=environment, text=True
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip().rpartition(" ")[2]
        if not self.url:
            self.process.wait()
            raise AssertionError(f"the engine did not start:\n{self.errors()}")
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.wait(10)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._errors.close()

    def errors(self) -> str:
        """What it wrote to standard error so far."""
        self._errors.seek(0)
        return self._errors.read()


class EngineCalls:
    """The HTTP calls of one test. An async context manager."""

    def __init__(self, engine: EngineProcess) -> None:
        self._url = engine.url

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60))
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._session.close()

    async def get(self, path: str) -> Any:
        async with self._session.get(self._url + path) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def post(self, path: str, body: Any = None, status: int = 200) -> Any:
        """Post and return the JSON of the answer, which must have `status`."""
        async with self._session.post(self._url + path, json=body) as response:
            text = await response.text()
            assert response.status == status, f"{path}: {response.status} {text}"
            return json.loads(text)

    async def generate(self, **request: Any) -> Any:
        """One answer, not streamed. See `body` for the arguments."""
        return await self.post("/generate", body(**request))

    async def stream(self, **request: Any) -> AsyncGenerator[dict[str, Any]]:
        """The chunks of a streamed answer. Leaving early drops the connection."""
        async with self._session.post(self._url + "/generate", json=body(stream=True, **request)) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])

    async def load(self, do: str, **manifest: Any) -> None:
        """Run the custom loader between begin and end."""
        await self.post("/begin_weight_update", {})
        await self.post("/update_weights_from_tensor", update_body(do, **manifest))
        await self.post("/end_weight_update", {})

    async def checksum(self) -> str:
        answer = await self.post("/weights_checker", {"action": "checksum"})
        return str(answer["per_engine_checksum"])

    async def until_idle(self) -> dict[str, Any]:
        """The engine's info once nothing runs: the engine notices a lost client by itself, at no given moment."""
        while True:
            info: dict[str, Any] = await self.get("/server_info")
            if not info["running"] and not info["queued"]:
                return info


def body(
    input_ids: list[int], max_new_tokens: int = 8, *, ignore_eos: bool = True, temperature: float = 0.0, **fields: Any
) -> dict[str, Any]:
    """A body of `/generate`; greedy unless told otherwise. Fields that belong to the sampling go there."""
    sampling = {"max_new_tokens": max_new_tokens, "temperature": temperature, "ignore_eos": ignore_eos}
    for name in ("top_p", "top_k", "stop_token_ids", "stop", "min_p"):
        if name in fields:
            sampling[name] = fields.pop(name)
    return {"input_ids": input_ids, "sampling_params": sampling, "return_logprob": True, **fields}


def update_body(do: str, *, load_format: str = LOADER, flush_cache: bool = False, **manifest: Any) -> dict[str, Any]:
    """A body of `/update_weights_from_tensor` whose only tensor is the manifest."""
    content = json.dumps({"do": do, **manifest}).encode()
    tensors = {"manifest": torch.frombuffer(bytearray(content), dtype=torch.uint8)}
    return {
        "serialized_named_tensors": [base64.b64encode(save(tensors)).decode()],
        "load_format": load_format,
        "flush_cache": flush_cache,
        "selector": "target",
    }


def joined(chunks: list[dict[str, Any]]) -> list[int]:
    """All token ids of a streamed answer."""
    return [token for chunk in chunks for token in chunk["output_ids"]]
