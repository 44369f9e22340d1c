"""The command line: `vectora-jail run | shell | check | explain | probe | doctor | init | demo`.

Exit codes are part of the contract (see the table in the README). A user's mistake is one or two lines on stderr,
never a traceback.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .policy import Ceiling, Policy

EX_REFUSED = 1
EX_NO_FILE = 2
EX_JAIL = 125
"""`run` and `shell`: there was no jail; the command has not run."""


def _say(text: str) -> None:
    print(f"vectora-jail: {text}", file=sys.stderr)


def _ceiling(args: argparse.Namespace) -> Ceiling:
    from .policyfile import load_ceiling

    return load_ceiling(args.ceiling)


def _workspace(args: argparse.Namespace) -> str:
    return str(os.path.realpath(args.workspace))


def _changed(policy: Policy, args: argparse.Namespace) -> Policy:
    """Apply `--level` and `--network`, which only the person at the keyboard can give."""
    from dataclasses import replace

    changes: dict[str, Any] = {}
    if getattr(args, "level", None):
        changes["level"] = args.level
    if getattr(args, "network", None):
        changes["network"] = replace(policy.network, mode=args.network)
    return policy.with_(**changes) if changes else policy


def _policy(args: argparse.Namespace) -> Policy:
    """Return the workspace's policy, or the defaults: who asks for a jail gets one."""
    from .policy import Policy
    from .policyfile import load_policy

    ceiling = _ceiling(args)
    policy = load_policy(_workspace(args), ceiling=ceiling)
    if not policy.enabled:
        policy = Policy(ceiling=ceiling)
    return _changed(policy, args)


def run(args: argparse.Namespace) -> int:
    """Run one command in a jail of the workspace; the command's exit code."""
    from dataclasses import asdict

    from .jail import Jail

    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        _say("run needs a command: vectora-jail run -- CMD…")
        return EX_NO_FILE
    with Jail.open(_workspace(args), policy=_policy(args)) as jail:
        if args.json:
            result = jail.exec(command, stdin=_stdin())
            out = {
                "exit_code": result.exit_code,
                "signal": result.signal,
                "timed_out": result.timed_out,
                "stdout": result.stdout_text,
                "stderr": result.stderr_text,
                "duration": result.duration,
                "violations": [asdict(violation) for violation in result.violations],
                "truncated": result.truncated,
                "isolation": jail.report.isolation,
            }
            print(json.dumps(out))
            return result.exit_code
        stream = jail.stream(command, stdin=_stdin())
        for chunk in stream:
            target = sys.stdout.buffer if chunk.fd == 1 else sys.stderr.buffer
            target.write(chunk.data)
            target.flush()
        result_of = stream.result
        if result_of is None:
            return EX_JAIL
        for violation in result_of.violations:
            _say(f"{violation.kind}: {violation.what}" + (f" ({violation.hint})" if violation.hint else ""))
        return result_of.exit_code


def _stdin() -> Any:
    """Pass our stdin on unless it is a terminal, which no command of the jail may hold."""
    try:
        return None if sys.stdin is None or sys.stdin.isatty() else sys.stdin.fileno()
    except (OSError, ValueError):
        return None


def shell(args: argparse.Namespace) -> int:
    """Open an interactive terminal inside the jail; the shell's exit code."""
    from ._console import interact
    from .jail import Jail

    with Jail.open(_workspace(args), policy=_policy(args)) as jail:
        return interact(jail, args.command or None)


def check(args: argparse.Namespace) -> int:
    """Validate a policy file and print every problem with its line."""
    from .policyfile import FILE_NAME, parse_policy

    path = args.file or FILE_NAME
    if os.path.isdir(path):
        path = os.path.join(path, FILE_NAME)
    if not os.path.lexists(path):
        _say(f"{path}: no such file; `vectora-jail init` writes one")
        return EX_NO_FILE
    policy = parse_policy(path, ceiling=_ceiling(args))
    if policy.refused:
        for problem in policy.problems:
            print(problem, file=sys.stderr)
        _say(f"{path}: refused, nothing would run in this workspace")
        return EX_REFUSED
    if not policy.enabled:
        reason = {"no_sandbox_table": "it has no [sandbox]", "sandbox_disabled_in_config": "enabled = false"}
        print(f"{path}: valid, sandbox disabled ({reason.get(policy.reason, policy.reason)})")
        return 0
    print(f"{path}: valid, sandbox enabled (backend {policy.backend}, level {policy.level})")
    return 0


def explain(args: argparse.Namespace) -> int:
    """Print the plan of a jail of the workspace without starting anything."""
    from .planning import make_plan

    plan = make_plan(_workspace(args), _policy(args))
    print(json.dumps(plan.to_json(), indent=2) if args.json else plan.explain())
    return 0


def doctor(args: argparse.Namespace) -> int:
    """Say what this host can enforce."""
    from .doctor import doctor as findings_of
    from .doctor import exit_code
    from .probe import host_facts

    findings = findings_of(host_facts())
    if args.json:
        print(json.dumps([finding._asdict() for finding in findings], indent=2))
        return exit_code(findings)
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        print(f"{finding.name:<{width}}  {finding.state:<7}  {finding.detail}")
        if finding.fix:
            print(f"{'':<{width}}           fix: {finding.fix}")
    return exit_code(findings)


def init(args: argparse.Namespace) -> int:
    """Write a commented `[sandbox]` section."""
    from .policydocs import init_text
    from .policyfile import FILE_NAME

    path = os.path.join(args.workspace, FILE_NAME)
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(init_text())
    except FileExistsError:
        _say(f"{path} is there already; it was left as it is")
        return EX_REFUSED
    print(f"wrote {path}; `vectora-jail check {path}` validates it")
    return 0


def probe(args: argparse.Namespace) -> int:
    """Ask a real jail whether something is possible."""
    from ._asking import ask

    if not (args.read or args.write or args.connect or args.syscall):
        _say("probe needs a question: --read P, --write P, --connect H:P or --syscall N")
        return EX_NO_FILE
    answers = ask(_workspace(args), _policy(args), args)
    for answer in answers:
        print(answer.text)
    return 0 if all(answer.allowed for answer in answers) else 1


def demo(args: argparse.Namespace) -> int:
    """Show what an agent can and cannot do, without and with the jail."""
    from .demo import main

    return main(keep=args.keep)


def _parser() -> argparse.ArgumentParser:
    from . import __version__

    parser = argparse.ArgumentParser(
        prog="vectora-jail",
        description="Bound what an AI coding agent can touch to a workspace's declared paths.",
    )
    parser.add_argument("--version", action="version", version=f"vectora-jail {__version__}")
    commands = parser.add_subparsers(dest="what", required=True, metavar="COMMAND")

    def add(name: str, function: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(function=function)
        return sub

    def workspace(sub: argparse.ArgumentParser) -> None:
        sub.add_argument(
            "-w", "--workspace", default=".", metavar="DIR", help="the workspace (default: here)"
        )
        sub.add_argument("--ceiling", metavar="FILE", help="consents (default: the user's own ceiling.toml)")

    def policy(sub: argparse.ArgumentParser) -> None:
        workspace(sub)
        sub.add_argument("--level", choices=("read-only", "workspace-write", "danger-full-access"))
        sub.add_argument("--network", choices=("none", "allowlist", "host"))

    sub = add("run", run, "run one command in a jail of the workspace")
    policy(sub)
    sub.add_argument("--json", action="store_true", help="print one JSON object instead of the output")
    sub.add_argument("command", nargs=argparse.REMAINDER, metavar="-- CMD")
    sub = add("shell", shell, "open an interactive terminal inside a jail of the workspace")
    policy(sub)
    sub.add_argument("command", nargs="*", metavar="CMD")
    sub = add("check", check, "validate a policy file")
    sub.add_argument("file", nargs="?", metavar="FILE")
    sub.add_argument("--ceiling", metavar="FILE")
    sub = add("explain", explain, "print the resolved plan without starting anything")
    policy(sub)
    sub.add_argument("--json", action="store_true")
    sub = add("probe", probe, "ask a real jail whether something is possible (exit 0 allowed, 1 denied)")
    policy(sub)
    sub.add_argument("--read", action="append", default=[], metavar="PATH")
    sub.add_argument("--write", action="append", default=[], metavar="PATH")
    sub.add_argument("--connect", action="append", default=[], metavar="HOST:PORT")
    sub.add_argument("--syscall", action="append", default=[], metavar="NAME")
    sub = add("doctor", doctor, "say what this host can enforce and what fixes the rest")
    sub.add_argument("--json", action="store_true")
    sub = add("init", init, "write a commented [sandbox] section into vectora.toml")
    sub.add_argument("-w", "--workspace", default=".", metavar="DIR")
    sub = add("demo", demo, "show a jail at work on a sample workspace")
    sub.add_argument("--keep", action="store_true", help="leave the sample workspace behind")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    from .errors import JailError, PolicyError

    args = _parser().parse_args(argv)
    function: Callable[[argparse.Namespace], int] = args.function
    failed = EX_JAIL if args.what in ("run", "shell") else EX_REFUSED
    try:
        return function(args)
    except PolicyError as exc:
        _say("the policy is refused")
        for line in str(exc).splitlines():
            print(f"  {line}", file=sys.stderr)
        return failed
    except (JailError, ValueError) as exc:
        _say(str(exc))
        return failed
    except BrokenPipeError:
        return 141
    except OSError as exc:
        _say(f"{exc.filename}: {exc.strerror}" if exc.filename else str(exc))
        return failed
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
