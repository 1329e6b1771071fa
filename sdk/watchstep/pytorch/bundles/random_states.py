"""States of random number generators just before each forward pass, and setting them again.

PyTorch's states are copied at each pass: 1 µs on the host. They are also copied when the batch is yielded or given: a loss function may draw before
it calls the model. Those of Python (7 µs) and NumPy (24 µs) are copied at most once per `_HOST_SHARE` of the time; if the program does not draw from
them, so that several copies are equal, once per `_IDLE_SHARE`. Few models draw from them during a pass: if the current state at the time of a bundle
equals the last copy, nothing was drawn since, and the copy is the state before the pass. Otherwise it is reported as lost.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

_HOST_SHARE = 0.002
"""Share of the time that copying the states of Python and NumPy may take."""

_IDLE_SHARE = 0.0005
"""The same for a program whose last `_IDLE_COPIES` copies were equal: it draws from neither, or only at the start of an epoch."""

_IDLE_COPIES = 3


@dataclass(frozen=True)
class HostStates:
    """States of the generators of Python and NumPy; None for NumPy if it is not loaded."""

    python: tuple[Any, ...]
    numpy: dict[str, Any] | None

    @classmethod
    def capture(cls) -> HostStates:
        """Return the current states."""
        numpy = sys.modules.get("numpy")
        state = None if numpy is None else numpy.random.get_state(legacy=False)
        return cls(random.getstate(), state)

    def put_back(self) -> None:
        """Set the generators to these states."""
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)

    def equals(self, other: HostStates) -> bool:
        """Return whether nothing was drawn between two states."""
        return self.python == other.python and _numpy_word(self.numpy) == _numpy_word(other.numpy)


@dataclass(frozen=True)
class GeneratorStates:
    """The states of all generators at one time.

    Attributes:
        host: of Python and NumPy.
        cpu: of PyTorch on the host, uint8.
        devices: of PyTorch on the current device, by its name.
    """

    host: HostStates
    cpu: Tensor
    devices: dict[str, Tensor]

    @classmethod
    def capture(cls) -> GeneratorStates:
        """Return the current states."""
        return cls(HostStates.capture(), torch.get_rng_state(), _device_states())

    def put_back(self) -> None:
        """Set all generators to these states."""
        self.host.put_back()
        _set_torch(self.cpu, self.devices)

    def differing(self, other: GeneratorStates) -> set[str]:
        """Return the names of the generators whose states differ: ``python``, ``numpy``, ``torch``, or of a device."""
        names = set()
        if self.host.python != other.host.python:
            names.add("python")
        if _numpy_word(self.host.numpy) != _numpy_word(other.host.numpy):
            names.add("numpy")
        if not torch.equal(self.cpu, other.cpu):
            names.add("torch")
        for device in self.devices.keys() | other.devices.keys():
            first, second = self.devices.get(device), other.devices.get(device)
            if first is None or second is None or not torch.equal(first, second):
                names.add(device)
        return names


def _numpy_word(state: dict[str, Any] | None) -> Any:
    if state is None:
        return None
    key = state["state"]
    return (state["bit_generator"], bytes(key["key"]), key["pos"], state["has_gauss"], state["gauss"])


class RandomStates(NamedTuple):
    """States before one forward pass.

    Attributes:
        cpu: of PyTorch on the host, uint8.
        devices: of PyTorch on devices, uint8 on the host, by the name of the device.
        host: the last copy of the states of Python and NumPy.
        is_fresh: whether ``host`` was copied for this pass.
    """

    cpu: Tensor
    devices: dict[str, Tensor]
    host: HostStates
    is_fresh: bool

    def put_back(self) -> None:
        """Set the generators to these states; those of Python and NumPy if they were copied for this pass."""
        if self.is_fresh:
            self.host.put_back()
        _set_torch(self.cpu, self.devices)


class RandomStateCopies:
    """Copies the states before passes."""

    def __init__(self) -> None:
        self._host: HostStates | None = None
        self._next_copy = 0.0
        self._equal_copies = 0

    def capture(self) -> RandomStates:
        """Return the states now."""
        now = time.perf_counter()
        fresh = self._host is None or now >= self._next_copy
        host = self._host
        if host is None or fresh:
            copied = HostStates.capture()
            self._equal_copies = self._equal_copies + 1 if host is not None and copied.equals(host) else 0
            host = self._host = copied
            share = _IDLE_SHARE if self._equal_copies >= _IDLE_COPIES else _HOST_SHARE
            self._next_copy = now + (time.perf_counter() - now) / share
        return RandomStates(torch.default_generator.get_state(), _device_states(), host, fresh)


@dataclass(frozen=True)
class TorchStates:
    """States of PyTorch's generators when a batch was yielded or given: see `RandomStates`."""

    cpu: Tensor
    devices: dict[str, Tensor]

    @classmethod
    def capture(cls) -> TorchStates:
        """Return the current states."""
        return cls(torch.get_rng_state(), _device_states())

    def as_value(self, later: RandomStates) -> dict[str, Any] | None:
        """Return the states as a value for a bundle; None if nothing was drawn until later ones."""
        is_same = torch.equal(self.cpu, later.cpu) and self.devices.keys() == later.devices.keys()
        if is_same and all(torch.equal(state, later.devices[name]) for name, state in self.devices.items()):
            return None
        return {"torch": self.cpu, "devices": dict(self.devices)}


def _set_torch(cpu: Tensor, devices: dict[str, Tensor]) -> None:
    torch.set_rng_state(cpu)
    for device, state in devices.items():
        torch.cuda.set_rng_state(state, device)


def _device_states() -> dict[str, Tensor]:
    if not torch.cuda.is_initialized():
        return {}
    current = torch.cuda.current_device()
    return {f"cuda:{current}": torch.cuda.get_rng_state(current)}


@contextmanager
def unchanged() -> Iterator[None]:
    """Set all generators to their present states afterwards, if something in the block has drawn from them."""
    host, cpu, devices = HostStates.capture(), torch.get_rng_state(), _device_states()
    try:
        yield
    finally:
        if not host.equals(HostStates.capture()):
            host.put_back()
        if not torch.equal(cpu, torch.get_rng_state()):
            torch.set_rng_state(cpu)
        for device, state in devices.items():
            torch.cuda.set_rng_state(state, device)


def as_value(states: RandomStates) -> dict[str, Any]:
    """Return states as a value for a bundle. Those of Python and NumPy are None if they are lost."""
    value: dict[str, Any] = {
        "torch": states.cpu,
        "devices": dict(states.devices),
        "python": None,
        "numpy": None,
    }
    if states.is_fresh or states.host.equals(HostStates.capture()):
        version, words, gauss = states.host.python
        # As text: the numbers of the generator are no tensor, and JSON numbers of 625 words are slow to check.
        value["python"] = {"version": version, "words": " ".join(map(str, words)), "gauss": gauss}
        value["numpy"] = states.host.numpy
    return value


def _check_numpy(state: dict[str, Any]) -> None:
    """Check a state of NumPy, which itself does not: a position behind the end reads memory that is not the state's.

    Raises:
        ValueError: it is not a state of a Mersenne Twister.
    """
    key, position = state["state"]["key"], state["state"]["pos"]
    is_sound = (
        state["bit_generator"] == "MT19937"
        and key.dtype.name == "uint32"
        and key.shape == (624,)
        and type(position) is int
        and 0 <= position <= 624
        and state["has_gauss"] in {0, 1}
        and isinstance(state["gauss"], float | int)
    )
    if not is_sound:
        raise ValueError("NumPy: not a state of a Mersenne Twister")


def restore(value: dict[str, Any]) -> list[str]:
    """Set the generators to states of a bundle. Returns the names of generators whose state was lost.

    Args:
        value: The decoded result of `as_value`.

    Raises:
        ValueError: The value is damaged.
    """
    lost = []
    try:
        torch.set_rng_state(value["torch"])
        for device, state in value["devices"].items():
            if str(device).startswith("cuda") and torch.cuda.is_available():
                torch.cuda.set_rng_state(state, torch.device(str(device)))
            else:
                lost.append(str(device))
        python = value["python"]
        if python is None:
            lost.append("python")
        else:
            words = tuple(int(word) for word in str(python["words"])[:20_000].split())
            random.setstate((int(python["version"]), words, python["gauss"]))
        if value["numpy"] is not None:
            import numpy as np

            _check_numpy(value["numpy"])
            np.random.set_state(value["numpy"])  # noqa: NPY002 - the generator that programs use
        elif python is None:
            lost.append("numpy")
    except (LookupError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"random states: {type(error).__name__}: {str(error)[:200]}") from error
    return lost
