"""Corrupt, truncated and malicious bundles: a clear error, and no code is executed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.laws import examples
from tests.processes import traced_memory
from watchstep import Hook
from watchstep.errors import FormatError, NotFoundError, WatchstepError
from watchstep.format.bundle import BundleDocument, bundle_keys, open_bundle, open_bundle_file
from watchstep.format.snapshot import Described, header
from watchstep.store.store import Store


def loss(model: Any, batch: Any) -> Any:
    return model(batch[0]).pow(2).mean()


def step() -> Any:
    import torch

    from watchstep import ReplayStep

    return ReplayStep(torch.nn.Linear(2, 1), loss)


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a sound bundle."""
    import torch

    with Hook(tmp_path_factory.mktemp("runs")) as hook:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        hook.watch(model, optimizer)
        for number in range(2):
            hook.batch([torch.ones(1, 2)])
            if number:
                hook.bundle()
            optimizer.zero_grad()
            loss(model, [torch.ones(1, 2)]).backward()
            optimizer.step()
    store = Store.open(hook.run_url)
    (key,) = bundle_keys(store)
    return store.get(key.path)


def replayed(path: Path) -> Any:
    import torch

    from watchstep.replay import replay

    threads = torch.get_num_threads()
    try:
        return replay(open_bundle_file(path), step(), traces=False)
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)


@pytest.mark.ci
def test_a_sound_bundle_replays(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "b.safetensors").write_bytes(content)
    assert replayed(tmp_path / "b.safetensors").is_exact


def test_stock_readers_can_read_it(content: bytes) -> None:
    from safetensors.numpy import load

    tensors = load(content)
    assert tensors["parameters/weight"].shape == (1, 2)
    assert json.loads(tensors["document"].tobytes())["version"] == 1


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_damage_is_reported_or_harmless(
    content: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    damaged = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    damaged = damaged[: data.draw(st.sampled_from([len(content), *range(0, len(content), 97)]))]
    path = tmp_path_factory.mktemp("damaged") / "b.safetensors"
    path.write_bytes(bytes(damaged))
    with contextlib.suppress(WatchstepError):
        replayed(path)


def written(document: dict[str, Any], tensors: dict[str, bytes] | None = None) -> bytes:
    encoded = json.dumps(document).encode()
    extra = tensors or {}
    described = [Described(name, "U8", (len(data),)) for name, data in extra.items()]
    described.append(Described("document", "U8", (len(encoded),)))
    return header(described, {"format": "watchstep.bundle"}) + b"".join(extra.values()) + encoded


def sound(content: bytes) -> dict[str, Any]:
    from safetensors.numpy import load

    document: dict[str, Any] = json.loads(load(content)["document"].tobytes())
    return document


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"step": -1},
        {"step": "7"},
        {"micro_batches": {}},
        {"micro_batches": [3]},
        {"lost": [["a"]]},
        {"gradients": [1]},
        {"run": []},
    ],
)
def test_documents_of_another_form_are_refused(
    content: bytes, tmp_path: Path, change: dict[str, Any]
) -> None:
    path = tmp_path / "b.safetensors"
    path.write_bytes(written({**sound(content), **change}))
    with pytest.raises(FormatError, match="bundle"):
        open_bundle_file(path)


@pytest.mark.parametrize(
    "batch",
    [
        {"torch": "torch.load"},
        {"tensor": "../../etc/passwd"},
        {"tensor": "document"},
        {"lost": "it was lost", "type": "Batch"},
        {"dict": [[["a"], 1]]},
        {"list": [{"list": [{"list": []}]}]},
        None,
    ],
)
def test_values_of_another_form_raise_a_clear_error(content: bytes, tmp_path: Path, batch: Any) -> None:
    document = sound(content)
    document["micro_batches"][0]["batch"] = batch
    path = tmp_path / "b.safetensors"
    path.write_bytes(written(document))
    with pytest.raises((WatchstepError, TypeError, AttributeError, IndexError, RuntimeError)):
        replayed(path)


def test_a_tensor_in_the_place_of_a_random_state_raises_a_clear_error() -> None:
    import torch

    from watchstep.pytorch.bundles import random_states

    damaged = {
        "torch": torch.get_rng_state(),
        "devices": {},
        "python": None,
        "numpy": {"state": torch.zeros(2)},
    }
    with pytest.raises(ValueError, match="random states: IndexError"):
        random_states.restore(damaged)


MEBIBYTE = 2**20


@pytest.mark.ci
@pytest.mark.parametrize(
    ("reference", "is_in_each"),
    [
        ({"array": "values/big"}, False),
        ({"numbers": "values/big", "of": "list"}, False),
        ({"numbers": "values/big", "of": "tuple"}, False),
        ({"tensor": "values/big"}, False),
        ({"tensor": "values/big"}, True),
    ],
)
def test_many_references_to_a_tensor_take_its_memory_once(
    content: bytes, tmp_path: Path, reference: dict[str, Any], *, is_in_each: bool
) -> None:
    from safetensors.numpy import load

    document = sound(content)
    first = {"tensor": document["micro_batches"][0]["batch"]["list"][0]["tensor"], "device": "cpu"}
    (micro_batch,) = document["micro_batches"]
    many = [reference] * (1 if is_in_each else 2000)
    micro_batch["batch"] = {"list": [first, {"list": many}]}
    micro_batch["losses"] = {"list": []}
    document["micro_batches"] = [micro_batch] * (200 if is_in_each else 1)
    tensors = {
        name: array for name, array in load(content).items() if name not in {"document", "gradient_digests"}
    }
    tensors["values/big"] = np.zeros(MEBIBYTE // 8, np.int64)
    path = tmp_path / "b.safetensors"
    names = {"float32": "F32", "float64": "F64", "int64": "I64", "uint32": "U32", "uint8": "U8"}
    described = [
        *(Described(name, names[array.dtype.name], array.shape) for name, array in tensors.items()),
        Described("document", "U8", (len(encoded := json.dumps({**document, "gradients": []}).encode()),)),
    ]
    described.sort(key=lambda each: -each.itemsize)
    data = {**{name: array.tobytes() for name, array in tensors.items()}, "document": encoded}
    path.write_bytes(
        header(described, {"format": "watchstep.bundle"}) + b"".join(data[each.name] for each in described)
    )
    bundle = open_bundle_file(path)
    replayed(path)  # loads what is imported at the first replay
    with traced_memory() as memory:
        replayed(path)
    assert memory.peak < 12 * bundle.size


def test_values_beyond_the_limit_of_memory_are_refused(content: bytes) -> None:
    import torch

    from watchstep.pytorch.bundles.values import ValueSource, decode

    source = ValueSource(
        lambda _name: (np.zeros(100, np.int64), "I64"), torch.device("cpu"), limit_bytes=2000
    )
    decode({"list": [{"array": "a"}, {"tensor": "a"}, {"array": "a"}]}, source)
    with pytest.raises(ValueError, match="take more than 2000 bytes"):
        decode({"array": "b"}, source)
    source.clear()
    with pytest.raises(ValueError, match="take more than 2000 bytes"):
        decode({"numbers": "a", "of": "list"}, source)


def test_flags_of_another_type_are_refused(content: bytes, tmp_path: Path) -> None:
    document = sound(content)
    document["precision"] = {**document["precision"], "float32_matmul_precision": {}}
    path = tmp_path / "b.safetensors"
    path.write_bytes(written(document))
    with pytest.raises(FormatError, match="float32_matmul_precision"):
        replayed(path)


def test_a_damaged_state_of_an_optimizer_is_refused(tmp_path: Path) -> None:
    import torch

    from watchstep import ReplayStep
    from watchstep.replay import replay

    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    with Hook(tmp_path) as hook:
        hook.watch(model, optimizer)
        for number in range(2):
            if number:
                hook.bundle()
            hook.batch([torch.ones(1, 2)])
            loss(model, [torch.ones(1, 2)]).backward()
            optimizer.step()
            optimizer.zero_grad()
    store = Store.open(hook.run_url)
    (key,) = bundle_keys(store)
    bundle = open_bundle(store, key.path)
    text = json.dumps(bundle.document.optimizers)
    assert '"exp_avg"' in text
    damaged = json.loads(text.replace('"exp_avg"', '"exp_average"'))
    threads = torch.get_num_threads()
    try:
        with pytest.raises(FormatError, match=r"Adam.step\(\) with the recorded state raised KeyError"):
            replay(
                dataclasses.replace(
                    bundle, document=dataclasses.replace(bundle.document, optimizers=tuple(damaged))
                ),
                ReplayStep(torch.nn.Linear(2, 1), loss, optimizer=lambda m: torch.optim.Adam(m.parameters())),
            )
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)


def test_the_recorded_program_is_never_run(content: bytes, tmp_path: Path) -> None:
    evil = tmp_path / "evil.py"
    evil.write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    document = sound(content)
    document["program"] = {**document["program"], "argv": [str(evil)], "folder": str(tmp_path)}
    path = tmp_path / "b.safetensors"
    path.write_bytes(written(document))
    with pytest.raises(WatchstepError):
        replayed(path)
    assert not (tmp_path / "executed").exists()


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "b.safetensors"
    with pytest.raises(NotFoundError, match="does not exist"):
        open_bundle_file(path)
    path.write_bytes(b"")
    with pytest.raises(FormatError):
        open_bundle_file(path)
    path.write_bytes(struct.pack("<Q", 2**60) + b"{}")
    with pytest.raises(FormatError, match="claims a header"):
        open_bundle_file(path)
    path.write_bytes(header([Described("x", "F32", (1,))], {}) + bytes(4))
    with pytest.raises(FormatError, match="is not a bundle"):
        open_bundle_file(path)


@given(st.text(), st.integers(0, 2**62), st.lists(st.text(), max_size=3))
def test_documents_come_back_equal(reason: str, number: int, names: list[str]) -> None:
    try:
        "".join([reason, *names]).encode()
    except UnicodeEncodeError:
        return
    document = BundleDocument({"run": reason}, number, number, reason, tuple(names), gradients=tuple(names))
    assert BundleDocument.decode(document.encode(), "b") == document


def test_a_fused_optimizer_takes_no_state_of_another_shape() -> None:
    """Its kernel would write beyond the tensor."""
    import torch

    from watchstep.replay import recorded_step

    weight = torch.nn.Parameter(torch.ones(100))
    plain, fused = torch.optim.AdamW([weight]), torch.optim.AdamW([weight], fused=True)
    weight.sum().backward()
    plain.step()
    state = plain.state_dict()
    state["param_groups"][0]["fused"] = True
    recorded_step._load(plain, state)
    assert not plain.param_groups[0]["fused"]
    recorded_step._load(fused, state)
    state["state"][0]["exp_avg"] = torch.zeros(1)
    with pytest.raises(ValueError, match="exp_avg of shape"):
        recorded_step._load(fused, state)
    assert not fused.state
