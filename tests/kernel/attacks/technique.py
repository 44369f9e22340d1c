"""What one attack is: a program, how its success is seen, and what it may expect outside a jail.

A technique runs twice in the same world: as an ordinary process (there it must succeed, so that the test is about
something) and inside the jail (there it must fail). Its program finds the names of the world in its globals:

W workspace · OUT a directory that is not granted · HOME a home with sensitive files · RO a read-only grant ·
VICTIM (BACKEND) the pid of a host process that holds the nonce · SHMID, SHM_FILE, TMP_FILE where else it lies ·
PORT, PORT6, PORT_ANY, UDP, UNIX, UNIX_DGRAM, ABSTRACT listeners of the host · FREE_PORT a port that the host dials ·
NONCE_PREFIX how a nonce begins · won(text) says that it succeeded · attempt(function, *args) returns
what it returned or the OSError · call(name, *args) makes a raw system call, −errno on failure.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["CATEGORIES", "Technique"]

CATEGORIES = {"secrets": 20, "writes": 15, "processes": 10, "surface": 15, "network": 10, "protocol": 10}
"""Category → how many techniques the suite must hold at least."""


@dataclass(frozen=True, slots=True)
class Technique:
    """One attack."""

    name: str
    category: str
    program: str
    """Python, run by /usr/bin/python3 -I in the workspace."""
    seen: str = "output"
    """How success is seen: "output" (it printed the won-marker), "leak" (the secret's nonce is in its output or in any
    file of the workspace that held none before), "host" (`check` says so)."""
    check: str = ""
    """Python expression over the world, evaluated by the test outside the jail, true when the attack succeeded."""
    prepare: str = ""
    """Python, run by the test before each of the two runs: what the host has lying around."""
    later: str = ""
    """Python, run by the test once the jail is up: what the host does to a tree that is being watched."""
    during: str = ""
    """Python expression, evaluated by the test every 0.1 s while the program runs; `w.seen` remembers a true one."""
    outside: str = "succeeds"
    """"succeeds", or why the same cannot succeed, or must not be run, without a jail."""
    root_only: bool = False
    """Only root can do this anywhere."""
    landlock: bool = True
    """Whether the landlock-only mode claims to stop it too."""
    policy: dict[str, object] = field(default_factory=dict)
    """Changes of the policy under which the jail must hold (`{"lockdown": True}`)."""
