"""vectora-jail: bound what an AI coding agent can touch, one persistent jailed worker a workspace.

Names are loaded when they are first used (PEP 562): importing the package costs a few milliseconds and loads neither
asyncio nor any third-party library.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ._stream import AsyncStream as AsyncStream
    from ._stream import Stream as Stream
    from .errors import CommandFailed as CommandFailed
    from .errors import EditConflict as EditConflict
    from .errors import JailError as JailError
    from .errors import PolicyError as PolicyError
    from .errors import SandboxDisabled as SandboxDisabled
    from .errors import UnsupportedPolicy as UnsupportedPolicy
    from .errors import WorkerDiedError as WorkerDiedError
    from .errors import WorkerSpawnError as WorkerSpawnError
    from .jail import AsyncJail as AsyncJail
    from .jail import Jail as Jail
    from .manager import AsyncJailManager as AsyncJailManager
    from .manager import JailManager as JailManager
    from .policy import Ceiling as Ceiling
    from .policy import Limits as Limits
    from .policy import Network as Network
    from .policy import Policy as Policy
    from .policyfile import load_policy as load_policy
    from .policyfile import parse_policy as parse_policy
    from .policyfile import parse_policy_text as parse_policy_text
    from .probe import host_capabilities as host_capabilities
    from .process import AsyncProcess as AsyncProcess
    from .process import Process as Process
    from .results import Chunk as Chunk
    from .results import ExecResult as ExecResult
    from .results import JailReport as JailReport
    from .results import Violation as Violation
    from .safegit import safe_git_env as safe_git_env
    from .shell import AsyncShell as AsyncShell
    from .shell import Shell as Shell
    from .terminal import AsyncTerminal as AsyncTerminal
    from .terminal import Terminal as Terminal

__version__ = "0.1.0"

_HOME = {
    "AsyncJail": "jail",
    "AsyncJailManager": "manager",
    "AsyncProcess": "process",
    "AsyncShell": "shell",
    "AsyncStream": "_stream",
    "AsyncTerminal": "terminal",
    "Ceiling": "policy",
    "Chunk": "results",
    "CommandFailed": "errors",
    "EditConflict": "errors",
    "ExecResult": "results",
    "Jail": "jail",
    "JailError": "errors",
    "JailManager": "manager",
    "JailReport": "results",
    "Limits": "policy",
    "Network": "policy",
    "Policy": "policy",
    "PolicyError": "errors",
    "Process": "process",
    "SandboxDisabled": "errors",
    "Shell": "shell",
    "Stream": "_stream",
    "Terminal": "terminal",
    "UnsupportedPolicy": "errors",
    "Violation": "results",
    "WorkerDiedError": "errors",
    "WorkerSpawnError": "errors",
    "host_capabilities": "probe",
    "load_policy": "policyfile",
    "parse_policy": "policyfile",
    "parse_policy_text": "policyfile",
    "safe_git_env": "safegit",
}

__all__ = sorted(_HOME)  # noqa: PLE0605 — one table names both the export and its home


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
