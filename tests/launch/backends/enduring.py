"""A program that goes on until it is ended, however its recording fares: ``python enduring.py FOLDER``.

Where and how it records, its launcher says. FOLDER/told.json has its process, its steps and its recorder's faults. Its loss is NaN
once the file FOLDER/fault is there.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from pathlib import Path

from watchstep import Hook


def main() -> None:
    folder = Path(sys.argv[1])
    fault, told, partial = (folder / name for name in ("fault", "told.json", "told.partial"))
    with Hook() as hook:
        for step in itertools.count():
            hook.log(loss=float("nan") if fault.exists() else 1.0 / (1 + step))
            hook.step()
            if step % 20 == 0:
                said = {"pid": os.getpid(), "steps": step, "faults": hook.health["faults"]}
                partial.write_text(json.dumps(said))
                partial.replace(told)
            time.sleep(0.01)


if __name__ == "__main__":
    main()
