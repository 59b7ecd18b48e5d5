"""How the engine's process starts, leaves and dies."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import time
from pathlib import Path

import aiohttp
import pytest

from miles.engines.embedded.process import bind, main
from tests.miles.engines.embedded.engine_process import LOADER, EngineCalls, EngineProcess

_PROMPT = [65, 66, 67]


def test_a_taken_port_is_named(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["--model-path", str(model_folder), "--port", str(port)]) == 2
    message = capsys.readouterr().err
    assert message == f"error: port {port} on 127.0.0.1 is taken by another process\n"


def test_a_port_is_taken_before_the_model_is_read() -> None:
    """Fails without the early `listen`: with SO_REUSEADDR two sockets may be bound to one port."""
    with bind("127.0.0.1", 0) as first, pytest.raises(Exception, match="taken"):
        bind("127.0.0.1", first.getsockname()[1])


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, [], "is of architecture 'MambaForCausalLM'; supported: Qwen3"),
        ({}, [], "holds no weights"),
        ({}, ["--context-length", "9999"], "--context-length 9999 exceeds"),
        ({"dtype": "float8"}, [], "dtype='float8'"),
        ({}, ["--load-format", "dummy", "--custom-weight-loader", "nowhere.load"], "'nowhere.load': No module"),
        (None, [], "cannot read config.json"),
    ],
)
def test_a_start_that_cannot_be_says_why(
    change: dict[str, object] | None,
    arguments: list[str],
    message: str,
    model_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line, exit code 2, no traceback."""
    if change is not None:
        values = json.loads((model_folder / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**values, **change}))
    assert main(["--model-path", str(tmp_path), "--port", "0", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.real
async def test_sigterm_ends_requests_and_the_process(model_folder: Path) -> None:
    """Dummy weights, so no safetensors are needed. The tokens so far are delivered.

    It leaves within two seconds; a busy machine is given as much again.
    """
    with EngineProcess(model_folder, "--load-format", "dummy", "--weight-version", "i:none") as engine:
        async with EngineCalls(engine) as calls:
            stream = calls.stream(input_ids=_PROMPT, max_new_tokens=500)
            first = await anext(stream)
            assert first["meta_info"]["weight_version"] == "i:none"
            began = time.monotonic()
            engine.process.send_signal(signal.SIGTERM)
            chunks = [chunk async for chunk in stream]
            assert chunks[-1]["meta_info"]["finish_reason"]["type"] == "abort"
        assert await asyncio.to_thread(engine.process.wait, 10) == 0
        assert time.monotonic() - began < 4
        assert "Traceback" not in engine.errors()


@pytest.mark.real
async def test_a_loader_that_raises_ends_the_process(model_folder: Path) -> None:
    with EngineProcess(model_folder, "--custom-weight-loader", LOADER) as engine:
        async with EngineCalls(engine) as calls:
            with pytest.raises(aiohttp.ClientError):
                await calls.load("raise")
        assert await asyncio.to_thread(engine.process.wait, 10) == 1
        errors = engine.errors()
    assert "Traceback" in errors
    assert "RuntimeError: the loader gives up" in errors
