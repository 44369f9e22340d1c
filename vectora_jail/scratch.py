"""A directory for temporary files where no private one can be mounted: made, checked, removed.

Its name can be foreseen and its parent may be /tmp, so that what is there already is used only when it is a
real directory of our own that nobody else can enter.
"""

from __future__ import annotations

import os
import stat

from vectora_jail.errors import WorkerSpawnError

__all__ = ["make_scratch", "remove_scratch"]


def make_scratch(path: bytes) -> None:
    """Make `path` with `home` and `tmp` in it, mode 0700 each; all may exist.

    Raises:
        WorkerSpawnError: code `scratch` when the place is somebody else's, or cannot be made.
    """
    for place in (path, path + b"/home", path + b"/tmp"):
        _make(place)


def _make(place: bytes) -> None:
    try:
        os.mkdir(place, 0o700)
    except FileExistsError:
        found = os.lstat(place)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise _error(place, "is not a directory of ours alone", 0) from None
    except OSError as error:
        raise _error(place, "cannot be made", error.errno or 0) from error


def remove_scratch(path: bytes) -> None:
    """Remove it with everything in it; what cannot be removed stays, links are never followed."""
    import shutil

    shutil.rmtree(path, ignore_errors=True)


def _error(place: bytes, what: str, errno: int) -> WorkerSpawnError:
    return WorkerSpawnError(
        f"the directory for temporary files {os.fsdecode(place)!r} {what}",
        code="scratch",
        layer="mounts",
        stage="scratch",
        errno=errno,
        hint="remove it, or set XDG_RUNTIME_DIR to a directory of this user",
    )
