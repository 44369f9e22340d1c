"""The exception tree of vectora_jail.

::

    JailError                      root, never raised directly: .code, .hint
    ├── PolicyError                the policy is refused (also a ValueError): .problems
    ├── SandboxDisabled            the workspace did not opt in: .workspace; take your own path
    ├── UnsupportedPolicy          this backend cannot do what the policy or the call asks: .backend, .layer
    ├── WorkerSpawnError           a jail could not be started: .layer, .stage, .errno
    ├── WorkerDiedError            a running jail ended under a call: .outcome, .cause
    ├── CommandFailed              only with `check=True`: the command did not end with 0: .result
    └── EditConflict               `edit_file` found no, or more than one, place to edit (also a ValueError)

Wrong input is a ValueError too; "this host cannot" (UnsupportedPolicy, WorkerSpawnError), "the policy
forbids" (PolicyError) and "the worker died" (WorkerDiedError) are never the same class. The file calls raise
the built-in OSError family instead. Every class pickles, so that an error crosses a process pool unchanged.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "CommandFailed",
    "EditConflict",
    "JailError",
    "PolicyError",
    "Problem",
    "SandboxDisabled",
    "UnsupportedPolicy",
    "WorkerDiedError",
    "WorkerSpawnError",
]


class Problem(NamedTuple):
    """One reason why a policy is refused, complete enough to print and to act upon."""

    key: str
    """Dotted key as written below the `sandbox` table (`network.mode`); `""` when the whole file is meant."""
    line: int = 0
    """1-based line in the file; 0: there is none (a policy made in Python, a problem of the whole file)."""
    found: str = ""
    expected: str = ""
    hint: str = ""
    file: str = ""
    ceiling: str = ""
    """Name of the `Ceiling` field whose consent is missing; `""` for any other problem."""

    def __str__(self) -> str:
        """Render as `file:line: key: found …; expected … (hint)`."""
        where = self.file
        if self.line:
            where = f"{where or 'line'}:{self.line}"
        text = "; ".join(
            part
            for part in (
                f"found {self.found}" if self.found else "",
                f"expected {self.expected}" if self.expected else "",
            )
            if part
        )
        hint = f" ({self.hint})" if self.hint else ""
        return ": ".join(part for part in (where, self.key, text) if part) + hint


class JailError(Exception):
    """Root of the tree; catch it to catch everything that this package raises by itself."""

    default_code: ClassVar[str] = "jail"

    def __init__(self, message: str = "", *, code: str = "", hint: str = "") -> None:
        super().__init__(message)
        self.code = code or self.default_code
        """Short stable identifier for programs (`policy_race`, `bwrap_missing`); never translated."""
        self.hint = hint
        """What to do about it, one sentence; `""` when there is nothing to advise."""

    @property
    def message(self) -> str:
        """Return the text without the hint."""
        return str(self.args[0]) if self.args else ""

    def __str__(self) -> str:
        return f"{self.message}; hint: {self.hint}" if self.hint else self.message


class PolicyError(JailError, ValueError):
    """The policy is refused: nothing runs until it is repaired.

    Codes: `policy` (the text or a value is wrong), `policy_ceiling` (consent is missing), `policy_race` (the
    file changed while a jail could write to it).
    """

    default_code = "policy"

    def __init__(
        self, message: str = "", *, problems: Iterable[Problem] = (), code: str = "", hint: str = ""
    ) -> None:
        self.problems = tuple(problems)
        """Every problem that was found, in the order of the file."""
        if not code and self.problems and all(problem.ceiling for problem in self.problems):
            code = "policy_ceiling"
        super().__init__(
            message or "\n".join(str(problem) for problem in self.problems), code=code, hint=hint
        )


class SandboxDisabled(JailError):
    """The workspace did not opt in, so that the caller takes its own path.

    Codes: `no_vectora_toml`, `no_sandbox_table`, `sandbox_disabled_in_config`.
    """

    default_code = "sandbox_disabled_in_config"

    def __init__(self, message: str = "", *, workspace: str = "", code: str = "", hint: str = "") -> None:
        super().__init__(
            message or f"no sandbox is enabled for {workspace or 'this workspace'}", code=code, hint=hint
        )
        self.workspace = workspace


class UnsupportedPolicy(JailError):
    """What the policy or the call asks for does not exist on this backend or this host."""

    default_code = "unsupported"

    def __init__(
        self, message: str = "", *, backend: str = "", layer: str = "", code: str = "", hint: str = ""
    ) -> None:
        super().__init__(message, code=code, hint=hint)
        self.backend = backend
        self.layer = layer


class WorkerSpawnError(JailError):
    """A jail could not be started; nothing of the agent's has run."""

    default_code = "spawn"

    def __init__(
        self,
        message: str = "",
        *,
        code: str = "",
        layer: str = "",
        hint: str = "",
        stage: str = "",
        errno: int = 0,
    ) -> None:
        super().__init__(message, code=code, hint=hint)
        self.layer = layer
        """The wall that could not be built (`userns`, `mounts`, `seccomp` …)."""
        self.stage = stage
        """The step of the start that failed (`exec bwrap`, `hello` …)."""
        self.errno = errno
        """The kernel's error number, 0 when there is none."""

    def __str__(self) -> str:
        detail = ", ".join(
            part
            for part in (
                f"stage {self.stage}" if self.stage else "",
                os.strerror(self.errno) if self.errno else "",
            )
            if part
        )
        text = f"{self.message} ({detail})" if detail else self.message
        return f"{text}; hint: {self.hint}" if self.hint else text


class WorkerDiedError(JailError):
    """A running jail ended, or its answers could not be trusted any more; the next call gets a new one.

    `outcome` says what is known of the call: `not_started`, `unknown` (it may have happened, wholly or in
    part) or `finished` (it ended, its result was lost). A call is never repeated by itself.
    """

    default_code = "worker_died"

    def __init__(
        self, message: str = "", *, code: str = "", outcome: str = "unknown", cause: str = "", hint: str = ""
    ) -> None:
        super().__init__(message, code=code, hint=hint)
        self.outcome = outcome
        self.cause = cause
        """Why the worker ended, as far as the host could find out (`signal 9`, `memory limit` …)."""


class CommandFailed(JailError):
    """A call with `check=True` whose command did not end with exit code 0."""

    default_code = "command_failed"

    def __init__(self, command: object = "", result: Any = None) -> None:
        code = getattr(result, "exit_code", None)
        super().__init__(f"the command {command!r} ended with exit code {code}")
        self.command = command
        self.result = result
        """The ExecResult, output included."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.command, self.result)


class EditConflict(JailError, ValueError):
    """`edit_file` did not find exactly one match; the file is unchanged."""

    default_code = "edit_conflict"

    def __init__(self, message: str = "", *, matches: int = 0, code: str = "", hint: str = "") -> None:
        super().__init__(message, code=code, hint=hint)
        self.matches = matches
