"""What outlives one worker of a workspace: where planted git files go, what was found, what was covered."""

from __future__ import annotations

import hashlib
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from .results import Hazard, Violation

if TYPE_CHECKING:
    from ._tree import Finding

__all__ = ["Carried", "audit_directory", "carried", "forget_empty", "spec_with", "violation_of"]

WORKSPACES_MAX: Final = 1000
FINDINGS_MAX: Final = 200
KNOWN_MAX: Final = 50_000


@dataclass(slots=True)
class Carried:
    """What one worker of a workspace leaves for the next one in this process."""

    known: list[Any] = field(default_factory=list)
    """Objects that were covered: they stay so under any name, while the rules are the same."""
    rules: Any = None
    hazards: list[Hazard] = field(default_factory=list)

    def keep(self, spec: Mapping[str, Any], known: list[Any]) -> None:
        """Remember what was covered under the rules of a tree's specification."""
        self.known, self.rules = known[:KNOWN_MAX], _rules(spec)

    def add(self, found: Sequence[Finding]) -> None:
        """Remember findings for the report."""
        self.hazards += [Hazard("git_redirect", _tell(finding)) for finding in found]
        del self.hazards[:-FINDINGS_MAX]


_carried: OrderedDict[bytes, Carried] = OrderedDict()
_lock = threading.Lock()


def carried(workspace: bytes) -> Carried:
    """Return what is remembered of a workspace, for reading and writing."""
    with _lock:
        entry = _carried.get(workspace)
        if entry is None:
            entry = _carried[workspace] = Carried()
            if len(_carried) > WORKSPACES_MAX:
                _carried.popitem(last=False)
        _carried.move_to_end(workspace)
        return entry


def _rules(spec: Mapping[str, Any]) -> Any:
    return spec.get("masks"), spec.get("mask_paths")


def _tell(finding: Finding) -> str:
    text = finding.text.decode("utf-8", "replace").strip().splitlines()
    first = text[0][:120] if text else ""
    where = (
        f"moved to {os.fsdecode(finding.moved)}"
        if finding.moved
        else f"not moved: {os.strerror(finding.errno)}"
        if finding.errno
        else "removed"
    )
    return f"{os.fsdecode(finding.path)}: {finding.kind} ({first}), {where}"


def violation_of(finding: Finding) -> Violation:
    """Return a finding as a violation of the call that left it."""
    return Violation("path", os.fsdecode(finding.path), rule="git_redirect", hint=_tell(finding))


def _state_home() -> str:
    configured = os.environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(configured):
        return configured
    return os.path.join(os.path.expanduser("~"), ".local", "state")


def _private(path: str, roots: Sequence[bytes]) -> bool:
    """Make a directory of this user that nobody else can enter, outside every root; False where that cannot be."""
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        st = os.stat(path, follow_symlinks=False)
        real = os.fsencode(os.path.realpath(path))
    except OSError:
        return False
    if not stat.S_ISDIR(st.st_mode) or st.st_uid != os.geteuid() or real != os.fsencode(path):
        return False
    if any(real == root or real.startswith(root.rstrip(b"/") + b"/") for root in roots):
        return False
    if st.st_mode & 0o077:
        os.chmod(path, 0o700)
    return True


def audit_directory(workspace: bytes, roots: Sequence[bytes]) -> bytes | None:
    """Return the private directory for what an agent planted in this workspace; None where there is no safe place.

    It lies in `$XDG_STATE_HOME` (or `~/.local/state`), or, where that is granted to the jail, in `/var/tmp`.
    """
    digest = hashlib.sha256(workspace).hexdigest()[:24]
    places = (
        os.path.join(_state_home(), "vectora-jail"),
        f"/var/tmp/vectora-jail-{os.geteuid()}",  # noqa: S108 — checked to be ours alone
    )
    for place in places:
        path = os.path.join(os.path.realpath(place), "audit", digest)
        outside = not any(os.fsencode(path).startswith(root.rstrip(b"/") + b"/") for root in roots)
        if outside and _private(os.path.realpath(place), roots) and _private(path, roots):
            return os.fsencode(path)
    return None


def spec_with(spec: Mapping[str, Any], workspace: bytes) -> dict[str, Any]:
    """Return a plan's tree with what only the process that starts it knows: the audit store, what was covered."""
    extended = dict(spec)
    roots = [root for root, _ in spec.get("roots", ())]
    if spec.get("git"):
        audit = audit_directory(workspace, roots)
        if audit is not None:
            extended["audit"] = audit
    before = carried(workspace)
    if before.known and before.rules == _rules(spec):
        extended["known"] = before.known
    return extended


def forget_empty(spec: Mapping[str, Any]) -> None:
    """Remove an audit directory in which nothing was put."""
    audit = spec.get("audit")
    if audit is not None:
        try:
            os.rmdir(audit)
        except OSError:
            return
