"""The recorded state of a bundle, set in a model that the program has built."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from watchstep.errors import ConfigError, FormatError
from watchstep.format.bundle import BUFFERS, GRADIENTS, PARAMETERS, Bundle
from watchstep.pytorch.bundles import random_states
from watchstep.pytorch.bundles.random_states import GeneratorStates
from watchstep.pytorch.bundles.values import LostValueError, ValueSource, decode, torch_tensor
from watchstep.pytorch.names import unwrap

_HINT = "use another bundle"
_BATCH_HINT = (
    "a replay needs the whole batch as it was yielded or given: let the program change a copy of it, or name it by hook.batch(…) after the change, "
    "with values of other types as tensors, numbers or text; then record again"
)
_HOST_GENERATORS = frozenset({"python", "numpy"})
_DRAWN_EARLY = "random numbers drawn before the forward pass"
_MEMORY_FACTOR = 16
"""Largest memory of the values of a pass, as a multiple of the bundle's size. Lists of 8-byte numbers take five times their size."""


class RecordedStep:
    """The values of a bundle.

    Attributes:
        bundle: the bundle.
        device: device for tensors that were not in host memory.
        problems: what could not be set as recorded, as sentences. Then the replay may differ.
        unrestored: parameters, buffers, random states and modes whose recorded values were not set, as noun phrases: the replay may be another computation.
        has_drawn: whether random numbers were drawn.
    """

    def __init__(self, bundle: Bundle, device: torch.device) -> None:
        self.bundle = bundle
        self.device = device
        self.problems: dict[str, None] = {}
        self.unrestored: dict[str, None] = {}
        self._unset_generators: list[str] = []
        self.has_drawn = False
        self._generators = GeneratorStates.capture()
        self._source = ValueSource(bundle.read, device, limit_bytes=_MEMORY_FACTOR * bundle.size)

    def set_model(self, model: nn.Module, *, checks_dtypes: bool = True) -> None:
        """Set parameters, buffers, modes and which parameters are trained, in the model inside its wrappers.

        Args:
            model: The model.
            checks_dtypes: Whether values that are converted to another dtype count as not restored.

        Raises:
            ConfigError: the model has other parameters or shapes than the recorded one.
            FormatError: the bundle is damaged.
        """
        inner = unwrap(model)
        parameters, buffers = dict(inner.named_parameters()), dict(inner.named_buffers())
        frozen = set(map(str, self._list(self.bundle.document.model.get("frozen"))))
        with torch.no_grad():
            self._set(parameters, PARAMETERS, "parameter", checks_dtypes=checks_dtypes)
            self._set(buffers, BUFFERS, "buffer", checks_dtypes=checks_dtypes)
        for name, parameter in parameters.items():
            parameter.requires_grad_(name not in frozen)
            parameter.grad = None
        is_training = self.bundle.document.model.get("training") is not False
        model.train(is_training)
        inner.train(is_training)
        modules = dict(inner.named_modules())
        for path in self._list(self.bundle.document.model.get("other_mode")):
            if (module := modules.get(str(path))) is not None:
                module.training = not is_training
            else:
                self.unrestored[f"mode of module {str(path)!r}"] = None
        for lost in self.bundle.document.lost:
            for prefix, noun in ((PARAMETERS, "parameter"), (BUFFERS, "buffer")):
                if lost.path.startswith(prefix):
                    self.unrestored[f"{noun} {lost.path.removeprefix(prefix)!r}"] = None

    def check_model(self, model: nn.Module) -> None:
        """Check that the recorded parameters and buffers fit a model.

        Raises:
            ConfigError: the model has other parameters or shapes than the recorded one.
        """
        inner = unwrap(model)
        for prefix, noun, own in (
            (PARAMETERS, "parameter", dict(inner.named_parameters())),
            (BUFFERS, "buffer", dict(inner.named_buffers())),
        ):
            for name in self.bundle.names(prefix):
                shape = self.bundle.tensors[f"{prefix}{name}"].shape
                if name not in own or tuple(own[name].shape) != tuple(shape):
                    found = (
                        f"has shape {tuple(own[name].shape)}"
                        if name in own
                        else "is not in the program's model"
                    )
                    raise ConfigError(
                        f"bundle {self.bundle.name}: {noun} {name!r} of shape {tuple(shape)} {found}",
                        "start the recorded program with its arguments",
                    )

    def unrecorded(self, model: nn.Module) -> list[Tensor]:
        """Return the parameters and buffers that the bundle does not have."""
        inner = unwrap(model)
        parameters, buffers = set(self.bundle.names(PARAMETERS)), set(self.bundle.names(BUFFERS))
        return [
            *(each for name, each in inner.named_parameters() if name not in parameters),
            *(each for name, each in inner.named_buffers() if name not in buffers),
        ]

    def _set(self, tensors: Mapping[str, Tensor], prefix: str, noun: str, *, checks_dtypes: bool) -> None:
        names = set(self.bundle.names(prefix))
        if unknown := sorted(names - set(tensors)):
            raise ConfigError(
                f"bundle {self.bundle.name}: the program's model has no {noun} {unknown[0]!r}",
                "build the model as the recorded program did",
            )
        for name, tensor in tensors.items():
            if name not in names:
                if tensor.numel():
                    self.problems[
                        f"{noun} {name!r} is not in the bundle: the program's own value is used"
                    ] = None
                    self.unrestored[f"{noun} {name!r}"] = None
                continue
            value = self.tensor(f"{prefix}{name}")
            if value.shape != tensor.shape:
                raise ConfigError(
                    f"bundle {self.bundle.name}: {noun} {name!r} has shape {tuple(value.shape)}, the program's has {tuple(tensor.shape)}",
                    "build the model as the recorded program did",
                )
            if checks_dtypes and value.dtype != tensor.dtype:
                self.problems[
                    f"{noun} {name!r} was {value.dtype}, the program's is {tensor.dtype}: it was converted"
                ] = None
                self.unrestored[f"dtype of {noun} {name!r}"] = None
            tensor.copy_(value)

    def tensor(self, name: str) -> Tensor:
        """Return a tensor of the bundle, on the host.

        Raises:
            FormatError: the bundle is damaged.
        """
        try:
            return torch_tensor(*self.bundle.read(name))
        except ValueError as error:
            raise FormatError(f"bundle {self.bundle.name}: {name!r}: {error}", _HINT) from error

    def has_batch(self, number: int) -> bool:
        """Return whether a data loader yielded the batch of a micro-batch, or the program named it."""
        return "batch" in self.bundle.document.micro_batches[number]

    def batch(self, number: int) -> Any:
        """Return the batch of a micro-batch, as `ReplayStep.loss` gets it.

        Raises:
            ConfigError: the bundle has no batch, or a part of it was lost or redacted.
            FormatError: the bundle is damaged.
        """
        self._source.clear()  # each pass gets its own: the program may change them
        recorded = self.bundle.document.micro_batches[number]
        if self.has_batch(number):
            return self._value(recorded["batch"], f"the batch of micro-batch {number}", _BATCH_HINT)
        if "arguments" not in recorded:
            raise ConfigError(
                f"bundle {self.bundle.name}: micro-batch {number} has neither a batch nor arguments of the model",
                "use a torch DataLoader, or call hook.batch(…) before each forward pass",
            )
        arguments = self._value(recorded["arguments"], f"the arguments of micro-batch {number}", _BATCH_HINT)
        keywords = self._value(recorded["keywords"], f"the keywords of micro-batch {number}", _BATCH_HINT)
        if keywords and not arguments:
            return keywords
        return arguments[0] if len(arguments) == 1 and not keywords else (*arguments, *keywords.values())

    @property
    def memory(self) -> int:
        """Bytes that the values took that were read since the last call of `batch` began."""
        return self._source.bytes

    def arguments(self, number: int) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the arguments and keywords of the model in a micro-batch; None if they were not recorded, or a part of them was lost."""
        recorded = self.bundle.document.micro_batches[number]
        if "arguments" not in recorded:
            return None
        try:
            arguments = self._value(recorded["arguments"], "arguments")
            return tuple(arguments), dict(self._value(recorded["keywords"], "keywords"))
        except ConfigError:
            return None

    def losses(self, number: int) -> list[float]:
        """Return the losses of a micro-batch at ``backward()``."""
        return [float(loss) for loss in self.loss_tensors(number)]

    def loss_tensors(self, number: int) -> list[Tensor]:
        """Return the losses of a micro-batch at ``backward()``, one element each."""
        values = self._value(self.bundle.document.micro_batches[number].get("losses", {"list": []}), "losses")
        if not isinstance(values, list) or not all(
            isinstance(loss, Tensor) and loss.numel() == 1 for loss in values
        ):
            raise FormatError(
                f"bundle {self.bundle.name}: losses of micro-batch {number} are not tensors", _HINT
            )
        return values

    def begin_micro_batch(self, number: int) -> None:
        """Set PyTorch's generators to their states at the batch of a micro-batch, if there is one, and others to those before its forward pass.

        The loss function may draw before it calls the model.
        """
        recorded = self.bundle.document.micro_batches[number]
        at_batch = None
        if recorded.get("random_at_batch") is not None:
            try:
                at_batch = self._value(recorded["random_at_batch"], "random states at the batch")
            except ConfigError:  # lost or redacted
                at_batch = None
        self._set_random_states(number, at_batch)

    def begin_pass(self, number: int) -> None:
        """Set the generators to their states before the forward pass of a micro-batch.

        If random numbers were drawn since `begin_micro_batch`, and have led to another state, they were not those of the recorded step.
        """
        now = GeneratorStates.capture()
        drawn = now.differing(self._generators)
        self.note_draws(now)
        self._set_random_states(number)
        if wrong := sorted(drawn & now.differing(self._generators)):
            self.unrestored[_DRAWN_EARLY] = None
            self.problems[
                f"random numbers of {', '.join(wrong)} were drawn before the forward pass, and are not those of the recorded step: call hook.batch(…) "
                "just before the loss is computed, or draw such numbers before, and give them with the batch; in another precision they may be others"
            ] = None

    def set_pass(self, number: int) -> None:
        """Set the generators to their states before the forward pass of a micro-batch."""
        self._set_random_states(number)

    def _set_random_states(self, number: int, at_batch: Any = None) -> None:
        value = self._value(self.bundle.document.micro_batches[number].get("random"), "random states")
        try:
            if at_batch is not None:
                value = {**value, "torch": at_batch["torch"], "devices": at_batch["devices"]}
            unset = random_states.restore(value)
            # Of another device, the replay draws from the generator of its own.
            unset += [
                name for name in map(str, value["devices"]) if name.partition(":")[0] != self.device.type
            ]
        except (ValueError, TypeError, KeyError) as error:
            raise FormatError(f"bundle {self.bundle.name}: {error}", _HINT) from error
        self._unset_generators = list(dict.fromkeys(unset))
        self._generators = GeneratorStates.capture()

    def note_draws(self, now: GeneratorStates | None = None) -> None:
        """Note whether random numbers were drawn since the states were set, and the generators whose recorded state was not set among those.

        Those of other devices count as drawn from if PyTorch's generator on the host is, from which a replay on the host draws instead.

        Args:
            now: The states now, if they are captured already.
        """
        drawn = (now or GeneratorStates.capture()).differing(self._generators)
        self.has_drawn |= bool(drawn)
        torch_drawn = self.device.type != "cpu" or bool(drawn - _HOST_GENERATORS)
        for generator in self._unset_generators:
            if generator in drawn if generator in _HOST_GENERATORS else torch_drawn:
                self.problems[f"the state of the random numbers of {generator} is not known"] = None
                self.unrestored[f"random numbers of {generator}"] = None

    def autocast(self, number: int, device: str) -> tuple[bool, str]:
        """Return whether autocast was enabled at the forward pass, and its dtype."""
        recorded = self.bundle.document.micro_batches[number].get("autocast")
        entry = recorded.get(device) if isinstance(recorded, dict) else None
        return (
            (entry[0] is True, str(entry[1])) if isinstance(entry, list) and len(entry) == 2 else (False, "")
        )

    def syncs(self, number: int) -> bool:
        """Return whether the ranks averaged the gradients of a micro-batch."""
        return self.bundle.document.micro_batches[number].get("syncs") is not False

    def scaled_parameters(self) -> frozenset[str]:
        """Return the names of the parameters whose gradients are recorded multiplied by the scale of the gradient scaler.

        They are those of fused optimizers, and those that no recorded optimizer updates, if any is recorded.
        """
        unscaled: set[str] = set()
        optimizers = [each for each in self.bundle.document.optimizers if isinstance(each, dict)]
        for recorded in optimizers:
            names = recorded.get("parameters")
            if recorded.get("scaled") is not True and isinstance(names, list):
                unscaled.update(name for name in names if isinstance(name, str))
        return frozenset(self.gradient_names()) - unscaled if optimizers else frozenset()

    def has_finite(self) -> bool:
        """Return whether a loss or a gradient is recorded in full, and has a finite value other than zero."""
        for number in range(len(self.bundle.document.micro_batches)):
            if any(math.isfinite(loss) and loss != 0.0 for loss in self.losses(number)):
                return True
        gradients = (self.gradient(name) for name in self.gradient_names())
        return any(
            gradient is not None and bool((gradient.isfinite() & (gradient != 0)).any())
            for gradient in gradients
        )

    def scale(self) -> float:
        """Return the scale of the gradient scaler; 1 without one."""
        for name, recorded in self.bundle.document.objects.items():
            if name.startswith("scaler") and isinstance(recorded, dict):
                state = self._value(recorded.get("state"), name)
                if isinstance(state, dict) and isinstance(state.get("scale"), float):
                    return float(state["scale"])
        return 1.0

    def set_optimizer(self, optimizer: Optimizer) -> bool:
        """Load the recorded state of the first optimizer of the same class. Returns False if there is none."""
        for number, recorded in enumerate(self.bundle.document.optimizers):
            if isinstance(recorded, dict) and recorded.get("class") == type(optimizer).__name__:
                try:
                    _load(optimizer, self._value(recorded.get("state"), f"optimizer {number}"))
                except (ValueError, KeyError, TypeError, RuntimeError, AttributeError) as error:
                    self.problems[f"the state of the optimizer could not be loaded: {error}"] = None
                    return False
                return True
        return False

    def gradient_names(self) -> Sequence[str]:
        """Return the names of the parameters with a recorded gradient."""
        return self.bundle.document.gradients

    def gradient(self, name: str) -> Tensor | None:
        """Return a recorded gradient; None if only its digest is recorded."""
        key = f"{GRADIENTS}{name}"
        return self.tensor(key) if key in self.bundle.tensors else None

    def _value(self, data: Any, what: str, hint: str = _HINT) -> Any:
        try:
            return decode(data, self._source)
        except LostValueError as error:
            raise ConfigError(f"bundle {self.bundle.name}: {what}: {error}", hint) from error
        except (KeyError, TypeError, ValueError, RuntimeError, RecursionError, AttributeError) as error:
            raise FormatError(
                f"bundle {self.bundle.name}: {what}: {type(error).__name__}: {str(error)[:200]}", _HINT
            ) from error

    def _list(self, data: Any) -> list[Any]:
        if not isinstance(data, list):
            raise FormatError(f"bundle {self.bundle.name}: its model is not described", _HINT)
        return data


_KERNELS = ("fused", "foreach", "capturable", "differentiable")
"""Settings of a group by which PyTorch chooses its kernel."""


def _load(optimizer: Optimizer, state: Any) -> None:
    """Load a recorded state. The program's own optimizer decides by which kernel it is used.

    Raises:
        ValueError: a tensor of the state has another shape than its parameter. Fused kernels do not check it, and would write beyond the tensor.
    """
    own = [{key: group[key] for key in _KERNELS if key in group} for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, settings in zip(optimizer.param_groups, own, strict=True):
        group.update(settings)
        for parameter in group["params"] if settings.get("fused") else ():
            for name, value in optimizer.state[parameter].items():
                if name != "step" and isinstance(value, Tensor) and value.shape != parameter.shape:
                    optimizer.state.clear()
                    raise ValueError(
                        f"{name} of shape {tuple(value.shape)} for a parameter of shape {tuple(parameter.shape)}"
                    )
