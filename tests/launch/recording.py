"""A program that records by itself, as those do that others launch: ``python recording.py STORE PROJECT RUN FAULT``.

Its loss is NaN once the file FAULT is there. It ends with 86 where it is stopped, and with 0 once the file FAULT.end is there.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from watchstep import Hook, StopTraining
from watchstep.stopping import EXIT_STOPPED


def main() -> None:
    store, project, run, fault = sys.argv[1:]
    with Hook(store, project=project, run=run, on_stop="raise") as hook:
        try:
            step = 0
            while not Path(f"{fault}.end").exists():
                hook.log(loss=float("nan") if Path(fault).exists() else 1.0 / (1 + step))
                hook.step()
                step += 1
                time.sleep(0.01)
        except StopTraining:
            sys.exit(EXIT_STOPPED)


if __name__ == "__main__":
    main()
