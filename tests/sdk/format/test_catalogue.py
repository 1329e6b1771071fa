"""A catalogue contains descriptions of tensors, and nothing else: what a writer packs besides is refused before it takes time."""

from __future__ import annotations

import base64
import json
import zlib

import pytest

from tests.sdk.format.blocks import tensor
from watchstep.format.catalogue import catalogue_bytes, catalogue_of

CATALOGUE = (tensor("a.weight", "weights"), tensor("b" * 512, "weights"))


def test_a_catalogue_returns_as_it_was() -> None:
    assert catalogue_of(catalogue_bytes(CATALOGUE)) == CATALOGUE


def test_data_behind_a_catalogue_are_refused() -> None:
    packed = base64.b64decode(catalogue_bytes(CATALOGUE))
    with pytest.raises(ValueError, match="followed by other data"):
        catalogue_of(base64.b64encode(packed + b"another"))


def test_a_tensor_with_more_text_than_names_have_is_refused() -> None:
    (data,) = json.loads(zlib.decompress(base64.b64decode(catalogue_bytes(CATALOGUE[:1]))))
    text = json.dumps([{**data, "unknown": "x" * 100_000}]).encode()
    with pytest.raises(ValueError, match="data other than tensors"):
        catalogue_of(base64.b64encode(zlib.compress(text)))
