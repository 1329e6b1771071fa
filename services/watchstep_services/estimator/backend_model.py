"""What the backends of this package are made of: their settings, checked."""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel, ConfigDict


class BackendModel(BaseModel):
    """A backend is its settings: what one process writes down, another reads back and has the same backend.

    Clients and the like are private attributes, made when they are first used; so are imports of what an extra
    brings. A field is a setting that users give: ``Slurm(partition="gpu", nodes=2)``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    shares_files: ClassVar[bool] = False
    """Whether its jobs see this machine's files and interpreter, at the same places."""
