"""The limit of open files, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import resource
from watchstep_services.core.process import most_connections, raise_file_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 2000))
print(most_connections())
raise_file_limit()
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], most_connections())
"""


def test_the_soft_limit_becomes_the_hard_one_and_connections_leave_a_reserve() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["44", "2000", "1744"]
