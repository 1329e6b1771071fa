"""The Triton programs compile to machine code for their target GPUs. No GPU is needed or used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.release

COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from watchstep.pytorch.cuda import programs

BLOCKS = {"BLOCK": programs.BLOCK, "BLOCKS": programs.BLOCKS}
for function, arguments, constants in [
    (programs.measure_spans, {"table": "*i64", "partials": "*fp64", "rows": "*i64", "regions": "i32"}, BLOCKS),
    (
        programs.merge_spans,
        {"table": "*i64", "partials": "*fp64", "rows": "*i64", "regions": "i32", "programs": "i32"},
        {"MERGED": programs.MERGED},
    ),
    (
        programs.check_spans,
        {"table": "*i64", "flag": "*i64", "regions": "i32", "turn": "i32", "slices": "i32"},
        BLOCKS,
    ),
]:
    signature = {**arguments, **dict.fromkeys(constants, "constexpr")}
    aligned = {(place,): [["tt.divisibility", 16]] for place, kind in enumerate(arguments.values()) if kind[0] == "*"}
    compiled = triton.compile(
        ASTSource(function, signature, constants, aligned),
        target=GPUTarget("cuda", int(sys.argv[1]), 32),
        options={"num_warps": 4, "enable_fp_fusion": False, "maxnreg": 128},
    )
    assert compiled.asm["cubin"]
    print(function.__name__, "wide" if "ld.global.v4" in compiled.asm["ptx"] else "narrow")
"""


@pytest.mark.parametrize("capability", [80, 90], ids=["A100", "H100, H200"])
def test_programs_compile(capability: int, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed: it has builds for Linux alone")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = subprocess.run(
        [sys.executable, "-c", COMPILE, str(capability)],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    # Elements are read sixteen bytes a thread at once; what merges reads little.
    assert found.stdout.split("\n")[:3] == ["measure_spans wide", "merge_spans narrow", "check_spans wide"]
