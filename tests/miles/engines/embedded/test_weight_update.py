"""Changing weights over HTTP: sessions, loaders, labels, salts, disk; and what is refused before a byte is written."""

from __future__ import annotations

import asyncio
import base64
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from miles.models.presets import write_preset
from tests.miles.engines.embedded.engine_process import EngineCalls, EngineProcess, joined, update_body
from tests.miles.engines.embedded.reference import Reference

pytestmark = pytest.mark.real

_PROMPT = [65, 66, 67, 68, 69]


@pytest.fixture(autouse=True)
def _engine_survives(engine: EngineProcess) -> Iterator[None]:
    yield
    assert engine.process.poll() is None, engine.errors()


async def _restore(calls: EngineCalls, folder: Path) -> None:
    await calls.post("/update_weights_from_disk", {"model_path": str(folder), "weight_version": "default"})


async def test_spans_are_exact_in_place(engine: EngineProcess, model_folder: Path) -> None:
    """Weights change under a running request. The new ones always give token 0, so each token tells who sampled it."""
    old = Reference(model_folder).greedy(_PROMPT, 200)
    assert 0 not in old
    async with EngineCalls(engine) as calls:
        stream = calls.stream(input_ids=_PROMPT, max_new_tokens=200, cache_salt="i:1")
        chunks = [await anext(stream)]
        await calls.post("/pause_generation", {"mode": "in_place"})
        await calls.load("zero")
        label = {"new_version": "i:2", "abort_all_requests": False}
        assert (await calls.post("/update_weight_version", label))["new_version"] == "i:2"
        await calls.post("/continue_generation")
        chunks += [chunk async for chunk in stream]
        await _restore(calls, model_folder)
    tokens = joined(chunks)
    (before, _, cut), (after, start, end) = (
        (span["version"], span["start"], span["end"]) for span in chunks[-1]["meta_info"]["weight_versions"]
    )
    assert (before, after, end) == ("default", "i:2", 200)
    assert cut == start == tokens.index(0)
    assert tokens == old[:cut] + [0] * (200 - cut)


async def test_salts_and_changed_weights(engine: EngineProcess, model_folder: Path) -> None:
    """KV is reused under the same salt only; the negative control shows why the salt must change with the weights."""
    prompt = list(range(65, 95))
    async with EngineCalls(engine) as calls:

        async def cached(salt: str) -> int:
            answer = await calls.generate(input_ids=prompt, max_new_tokens=4, cache_salt=salt)
            return int(answer["meta_info"]["cached_tokens"])

        assert (await cached("i:1"), await cached("i:1"), await cached("j:1")) == (0, 29, 0)
        await calls.load("halve")
        assert await cached("i:1") == 29, "the same salt would reuse KV of the old weights"
        assert await cached("i:2") == 0
        await calls.post("/flush_cache")
        assert await cached("i:1") == 0
        await _restore(calls, model_folder)
        assert await cached("i:1") == 0, "the update asked for a flush"


async def test_a_loader_writes_by_name_from_its_own_thread(engine: EngineProcess, model_folder: Path) -> None:
    async with EngineCalls(engine) as calls:
        original = await calls.checksum()
        await calls.load("by_name", value=0.25)
        changed = await calls.checksum()
        await calls.load("by_name", value=0.25)
        assert original != changed == await calls.checksum()
        await _restore(calls, model_folder)
        assert await calls.checksum() == original


async def test_the_session_is_required(engine: EngineProcess) -> None:
    async with EngineCalls(engine) as calls:
        original = await calls.checksum()
        await calls.post("/update_weights_from_tensor", update_body("zero"), status=400)
        await calls.post("/end_weight_update", {}, status=400)
        await calls.post("/begin_weight_update", {"selector": "target"})
        await calls.post("/begin_weight_update", {}, status=400)
        for wrong, message in (
            (update_body("zero", load_format="os.system"), "'os.system' is not a --custom-weight-loader"),
            ({**update_body("zero"), "serialized_named_tensors": ["!"]}, "not base64"),
            ({**update_body("zero"), "serialized_named_tensors": []}, "one tensor-parallel rank"),
        ):
            answer = await calls.post("/update_weights_from_tensor", wrong, status=400)
            assert message in answer["message"]
        await calls.post("/end_weight_update", {})
        assert await calls.checksum() == original


async def test_no_pickle_is_read(engine: EngineProcess, tmp_path: Path) -> None:
    """A payload that would write a file when unpickled is refused, and writes none."""
    trace = tmp_path / "unpickled"

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.mkdir, (str(trace),))

    payload = base64.b64encode(pickle.dumps(Trap())).decode()
    async with EngineCalls(engine) as calls:
        await calls.post("/begin_weight_update", {})
        wrong = {**update_body("zero"), "serialized_named_tensors": [payload]}
        await calls.post("/update_weights_from_tensor", wrong, status=400)
        await calls.post("/end_weight_update", {})
    assert not trace.exists()


async def test_a_flush_that_cannot_be_done_is_refused_before_the_weights(engine: EngineProcess) -> None:
    """SGLang answers 400 after weights and label have changed. Fails when `check_can_flush` runs after the write."""
    async with EngineCalls(engine) as calls:
        original = await calls.checksum()
        stream = calls.stream(input_ids=_PROMPT, max_new_tokens=300, rid="held")
        await anext(stream)
        await calls.post("/pause_generation", {"mode": "in_place"})
        await calls.post("/begin_weight_update", {})
        answer = await calls.post("/update_weights_from_tensor", update_body("zero", flush_cache=True), status=400)
        assert "1 requests hold KV" in answer["message"]
        await calls.post("/end_weight_update", {})
        assert await calls.checksum() == original
        await calls.post("/abort_request", {"rid": "held"})
        assert (await calls.get("/server_info"))["weight_version"] == "default"
        await calls.post("/continue_generation")


async def test_tensors_by_name_need_no_loader(engine: EngineProcess, model_folder: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"

    def request(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        return {"serialized_named_tensors": [base64.b64encode(save(tensors)).decode()], "weight_version": "named"}

    async with EngineCalls(engine) as calls:
        original = await calls.checksum()
        await calls.post("/begin_weight_update", {})
        await calls.post("/update_weights_from_tensor", request({name: torch.zeros(3, 3)}), status=400)
        assert await calls.checksum() == original
        await calls.post("/update_weights_from_tensor", request({name: torch.zeros(256, 128)}))
        await calls.post("/end_weight_update", {})
        assert await calls.checksum() != original
        assert (await calls.get("/server_info"))["weight_version"] == "named"
        await _restore(calls, model_folder)


async def test_from_disk(engine: EngineProcess, tmp_path: Path, model_folder: Path) -> None:
    other = write_preset("tiny-qwen3", tmp_path / "other", seed=8)
    async with EngineCalls(engine) as calls:
        original = await calls.checksum()
        await calls.post("/update_weights_from_disk", {"model_path": str(other), "weight_version": "disk:1"})
        assert (await calls.generate(input_ids=_PROMPT))["output_ids"] == Reference(other).greedy(_PROMPT, 8)
        assert (await calls.get("/server_info"))["weight_version"] == "disk:1"
        await _restore(calls, model_folder)
        assert await calls.checksum() == original


@pytest.mark.parametrize("fault", ["wrong shape", "missing", "unknown", "no folder", "cut short"])
async def test_from_disk_refuses_what_does_not_fit(engine: EngineProcess, tmp_path: Path, fault: str) -> None:
    """The file's other tensors are new: fails when anything is written before all has been checked."""
    folder = write_preset("tiny-qwen3", tmp_path / "wrong", seed=8)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    match fault:
        case "wrong shape":
            tensors["model.layers.1.mlp.down_proj.weight"] = torch.zeros(128, 255)
        case "missing":
            del tensors["model.layers.1.self_attn.v_proj.weight"]
        case "unknown":
            tensors["model.layers.99.mlp.down_proj.weight"] = torch.zeros(128, 256)
    save_file(tensors, file)
    if fault == "no folder":
        folder = tmp_path / "nothing"
    if fault == "cut short":
        file.write_bytes(file.read_bytes()[:-100])
    async with EngineCalls(engine) as calls:
        original = await calls.checksum()
        request = {"model_path": str(folder), "weight_version": "wrong:1"}
        answer = await calls.post("/update_weights_from_disk", request, status=400)
        assert answer["message"]
        assert await calls.checksum() == original
        assert (await calls.get("/server_info"))["weight_version"] == "default"


async def test_a_label_aborts_only_what_it_is_told_to(engine: EngineProcess) -> None:
    async with EngineCalls(engine) as calls:
        stream = calls.stream(input_ids=_PROMPT, max_new_tokens=400)
        await anext(stream)
        await calls.post("/update_weight_version", {"new_version": "x", "abort_all_requests": False})
        assert (await anext(stream))["meta_info"]["finish_reason"] is None
        await calls.post("/update_weight_version", {"new_version": "default"})
        last = [chunk async for chunk in stream][-1]["meta_info"]
    assert last["finish_reason"]["type"] == "abort"
    assert [span["version"] for span in last["weight_versions"]] == ["default", "x"]


async def test_health_answers_while_the_scheduler_is_held(engine: EngineProcess, tmp_path: Path) -> None:
    """A loader holds the scheduler thread until the health has been read. Fails when health waits for a step."""
    pipes = {name: str(tmp_path / name) for name in ("ready", "release")}
    for pipe in pipes.values():
        os.mkfifo(pipe)
    async with EngineCalls(engine) as calls:
        held = asyncio.create_task(calls.load("wait", **pipes))
        await asyncio.to_thread(lambda: open(pipes["ready"]).close())
        assert (await calls.get("/health"))["status"] == "ok"
        assert not held.done()
        await asyncio.to_thread(lambda: open(pipes["release"], "w").close())
        await held


async def test_checksum_has_sglangs_shape(engine: EngineProcess) -> None:
    async with EngineCalls(engine) as calls:
        answer = await calls.post("/weights_checker", {"action": "checksum"})
        (rank,) = answer["ranks"]
        assert "model.layers.0.self_attn.qkv_proj.weight" in rank["checksums"]
        assert rank["parallelism_info"][0]["tp_size"] == 1
        await calls.post("/weights_checker", {"action": "reset"}, status=400)
