"""The first bad operation of planted numerical faults: the right operation, module and source line, and no false alarm."""

from __future__ import annotations

import pytest
import torch

from tests.sdk.trace.planted import PLANTED
from watchstep.trace import Tracer, diagnose
from watchstep.trace import tracer as tracer_module
from watchstep.trace.report import render_diagnosis


@pytest.mark.parametrize("on_host", [True, False], ids=["host", "device"])
@pytest.mark.parametrize("name", sorted(PLANTED))
def test_the_first_bad_operation_is_named_with_its_line(
    name: str, on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not on_host:  # as on a device, whose results are read at the end of the step
        monkeypatch.setattr(tracer_module, "is_on_host", lambda tensor: False)
    torch.manual_seed(0)
    planted = PLANTED[name]()
    tracer = Tracer(planted.model)
    with tracer.step(7):
        planted.step()
    trace = tracer.trace()
    first = diagnose(trace).first
    assert first is not None
    assert first.operation.name == planted.operation, render_diagnosis(trace, diagnose(trace), verbose=True)
    site = trace.line_of(first.operation)
    assert site is not None
    assert (site.line, site.file) == (planted.line, planted.step.__code__.co_filename)
    assert (first.operation.module, first.operation.phase, first.operation.step) == (
        planted.module,
        planted.phase,
        7,
    )
    assert first.cause == ("tensor" if planted.tensor else "operation")
    if planted.tensor:
        assert first.tensor is not None
        assert first.tensor.name == planted.tensor
