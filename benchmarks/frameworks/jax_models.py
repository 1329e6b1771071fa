"""The three models of JAX: an MLP of 1.86 million parameters, a CNN, and a transformer whose layers are under a scan."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

BATCHES = 8
"""Number of batches, which take turns."""

Parameters = dict[str, Any]


@dataclass(frozen=True)
class JaxModel:
    """A model, as its author would write it.

    Attributes:
        parameters: makes them, the same each time.
        loss: of parameters and a batch of inputs and labels.
        batch: shape of the inputs of a batch.
        classes: number of classes of labels; inputs are tokens where labels have their shape.
        of_tokens: whether inputs are tokens, and labels the tokens that follow.
    """

    parameters: Callable[[], Parameters]
    loss: Callable[[Parameters, Any], Any]
    batch: tuple[int, ...]
    classes: int
    of_tokens: bool = False

    def batches(self) -> list[tuple[Any, Any]]:
        """Batches in device memory."""
        random = np.random.default_rng(0)
        if self.of_tokens:
            tokens = random.integers(0, self.classes, (BATCHES, *self.batch))
            return [(jnp.asarray(part), jnp.asarray(np.roll(part, -1, -1))) for part in tokens]
        inputs = random.standard_normal((BATCHES, *self.batch)).astype(np.float32)
        labels = random.integers(0, self.classes, (BATCHES, self.batch[0]))
        return [(jnp.asarray(x), jnp.asarray(y)) for x, y in zip(inputs, labels, strict=True)]


def _normal(random: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    fan_in = int(np.prod(shape[:-1]))
    scaled: NDArray[np.float32] = (random.standard_normal(shape) / np.sqrt(fan_in)).astype(np.float32)
    return scaled


def _cross_entropy(logits: Any, labels: Any) -> Any:
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)
    return -jnp.mean(picked)


_SIZES = (784, 1024, 1024, 10)


def _mlp_parameters() -> Parameters:
    random = np.random.default_rng(1)
    return {
        f"dense_{number}": {
            "kernel": jnp.asarray(_normal(random, before, after)),
            "bias": jnp.zeros(after),
        }
        for number, (before, after) in enumerate(itertools.pairwise(_SIZES))
    }


def _mlp_loss(parameters: Parameters, batch: Any) -> Any:
    hidden, labels = batch
    for number in range(len(_SIZES) - 1):
        layer = parameters[f"dense_{number}"]
        hidden = hidden @ layer["kernel"] + layer["bias"]
        if number < len(_SIZES) - 2:
            hidden = jax.nn.relu(hidden)
    return _cross_entropy(hidden, labels)


_CHANNELS = (3, 32, 64, 96)


def _cnn_parameters() -> Parameters:
    random = np.random.default_rng(2)
    parameters: Parameters = {
        f"conv_{number}": {
            "kernel": jnp.asarray(_normal(random, 3, 3, before, after)),
            "bias": jnp.zeros(after),
        }
        for number, (before, after) in enumerate(itertools.pairwise(_CHANNELS))
    }
    parameters["head"] = {"kernel": jnp.asarray(_normal(random, _CHANNELS[-1], 10)), "bias": jnp.zeros(10)}
    return parameters


def _cnn_loss(parameters: Parameters, batch: Any) -> Any:
    hidden, labels = batch
    for number in range(len(_CHANNELS) - 1):
        layer = parameters[f"conv_{number}"]
        hidden = jax.lax.conv_general_dilated(
            hidden, layer["kernel"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        hidden = jax.nn.relu(hidden + layer["bias"])
    head = parameters["head"]
    return _cross_entropy(hidden.mean((1, 2)) @ head["kernel"] + head["bias"], labels)


_LAYERS, _WIDTH, _HEADS, _WORDS, _EXAMPLES, _LENGTH = 4, 192, 6, 512, 8, 64


def _transformer_parameters() -> Parameters:
    random = np.random.default_rng(3)

    def normal(*shape: int) -> Any:
        return jnp.asarray(random.standard_normal(shape) * 0.02, jnp.float32)

    return {
        "embedding": normal(_WORDS, _WIDTH),
        "positions": normal(_LENGTH, _WIDTH),
        "layers": {
            "attention": normal(_LAYERS, _WIDTH, 3 * _WIDTH),
            "projection": normal(_LAYERS, _WIDTH, _WIDTH),
            "up": normal(_LAYERS, _WIDTH, 4 * _WIDTH),
            "down": normal(_LAYERS, 4 * _WIDTH, _WIDTH),
            "attention_scale": jnp.ones((_LAYERS, _WIDTH)),
            "feed_forward_scale": jnp.ones((_LAYERS, _WIDTH)),
        },
        "head": normal(_WIDTH, _WORDS),
    }


def _normalized(values: Any, scale: Any) -> Any:
    centred = values - values.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(values.var(-1, keepdims=True) + 1e-5) * scale


def _transformer_loss(parameters: Parameters, batch: Any) -> Any:
    tokens, labels = batch
    mask = np.tril(np.ones((_LENGTH, _LENGTH), bool))

    def layer(hidden: Any, weights: Any) -> tuple[Any, None]:
        projected = _normalized(hidden, weights["attention_scale"]) @ weights["attention"]
        shape = (_EXAMPLES, _LENGTH, _HEADS, _WIDTH // _HEADS)
        query, key, value = (part.reshape(shape) for part in jnp.split(projected, 3, -1))
        scores = jnp.einsum("bthd,bshd->bhts", query, key) / np.sqrt(_WIDTH // _HEADS)
        shares = jax.nn.softmax(jnp.where(mask, scores, -1e9), -1)
        mixed = jnp.einsum("bhts,bshd->bthd", shares, value).reshape(_EXAMPLES, _LENGTH, _WIDTH)
        hidden = hidden + mixed @ weights["projection"]
        raised = jax.nn.gelu(_normalized(hidden, weights["feed_forward_scale"]) @ weights["up"])
        return hidden + raised @ weights["down"], None

    hidden = parameters["embedding"][tokens] + parameters["positions"]
    hidden, _ = jax.lax.scan(layer, hidden, parameters["layers"])
    return _cross_entropy(hidden @ parameters["head"], labels)


MLP = JaxModel(_mlp_parameters, _mlp_loss, (256, 784), 10)
CNN = JaxModel(_cnn_parameters, _cnn_loss, (64, 32, 32, 3), 10)
TRANSFORMER = JaxModel(
    _transformer_parameters, _transformer_loss, (_EXAMPLES, _LENGTH), _WORDS, of_tokens=True
)
