"""The system call deny list as data: what is refused, with which errno, when, and why.

Everything that is not listed is allowed: the list holds kernel surface that no build tool needs, and the few
calls by which a command could harm the worker, the host or another jail. `seccomp.py` turns it into a filter.
A rule compares only what the kernel itself looks at: an `int` argument by its low 32 bits (garbage above them
must not slip past, seccomp(2)), a pointer or long by all 64.

Decisions that are not obvious:

- `openat2` answers ENOSYS: its mode lies in memory, where no filter can look, and could carry set-id bits.
  Every user of it has a way back to `openat` for kernels before 5.6. `fchmodat2` passes its mode in a
  register and is filtered like `chmod`. `clone3` answers ENOSYS for the same reason as `openat2` (its flags
  lie in memory); libc then uses `clone`.
- `mkdir` is filtered for S_ISUID only: the kernel drops both bits from the mode of a new directory by itself,
  and `cp -r` passes S_ISGID of the source (/usr/local is 2775 on Debian).
- `personality` allows the two queries and ADDR_NO_RANDOMIZE: ThreadSanitizer and gdb restart their program
  with it, and it weakens nothing but the caller.
- Address families are an allow list (unix, inet, inet6, netlink). The families that peers name answer EPERM,
  all others EAFNOSUPPORT, as from a kernel built without them.
- Numbers above the newest known call answer ENOSYS: a call that we have not judged does not exist yet for the
  jail.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass, field

from vectora_jail._syscall_numbers import ARCHES, NEWEST, numbers

__all__ = ["ARCHES", "NEWEST", "RULES", "Check", "Rule", "allowable", "is_syscall", "numbers", "select"]

_LOW32 = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison of one argument: `(argument & mask) <op> value`.

    Ops: "eq", "ne" (with `mask`), "any" and "none" (some, no bit of `mask` is set; `value` unused). The low
    32 bits are compared, except for "set64", which is true when any of all 64 bits is set.
    """

    arg: int
    op: str
    value: int = 0
    mask: int = _LOW32


@dataclass(frozen=True, slots=True)
class Rule:
    """Calls of `name` that satisfy one of the alternatives `when` get `errno`; no `when` means always."""

    name: str
    errno: int
    reason: str
    when: tuple[tuple[Check, ...], ...] = ()
    part: str = ""
    """Names this rule among several of one call, so that `allow` can take off one alone (`socket.vsock`)."""
    modes: frozenset[str] = field(default_factory=frozenset)
    """Where it applies, of "bwrap", "landlock", "lockdown", "disk", "no-inet"; empty means everywhere."""
    arch: str = ""
    """The only architecture that has the call; empty means every one that knows the name."""
    fixed: bool = False
    """Part of another wall (network, accounting): `[sandbox.seccomp] allow` does not take it off."""
    quiet: bool = False
    """Probed by ordinary programs at start; never worth an event."""

    @property
    def key(self) -> str:
        """The name that `[sandbox.seccomp] allow` uses for this rule alone."""
        return f"{self.name}.{self.part}" if self.part else self.name


def _eq(arg: int, value: int, mask: int = _LOW32) -> Check:
    return Check(arg, "eq", value, mask)


def _ne(arg: int, value: int) -> Check:
    return Check(arg, "ne", value)


def _any(arg: int, mask: int) -> Check:
    return Check(arg, "any", mask=mask)


def _deny(
    names: str, reason: str, *, mode: str = "", code: int = errno.EPERM, quiet: bool = False
) -> list[Rule]:
    modes = frozenset({mode} if mode else ())
    return [Rule(name, code, reason, modes=modes, quiet=quiet) for name in names.split()]


# clone(2): CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET; CLONE_NEWTIME lies in the bits
# that clone uses for the exit signal and exists for clone3 and unshare only.
CLONE_NEW = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
SET_ID = 0o6000
O_CREAT, O_TMPFILE_BIT = 0o100, 0o20000000
TIOCSTI, TIOCLINUX, TIOCSETD = 0x5412, 0x541C, 0x5423
F_SETLEASE, F_SETDELEG = 1024, 1040
AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16
NAMED_FAMILIES = {"vsock": 40, "packet": 17, "bluetooth": 31, "key": 15, "alg": 38}
SOCK_RAW, SOCK_PACKET, SOCK_TYPE_MASK = 3, 10, 0xF
ADDR_NO_RANDOMIZE = 0x0040000
PERSONALITY_OK = (0, 0xFFFFFFFF, ADDR_NO_RANDOMIZE)

_ALWAYS = [
    *_deny("mount umount2", "mounting would lay bare what a mask covers, or cover what protects"),
    *_deny("pivot_root chroot", "another root is another view of the file system"),
    *_deny(
        "open_tree open_tree_attr move_mount fsopen fsconfig fsmount fspick mount_setattr",
        "the new mount interface does all that mount(2) does, and takes mounts off in a copy",
    ),
    *_deny("statmount listmount listns", "tells of mounts and namespaces beside the jail's own"),
    *_deny("unshare", "new namespaces bring new capabilities, and with them more of the kernel"),
    *_deny("setns", "entering another namespace leaves the jail"),
    *_deny("init_module finit_module delete_module", "kernel modules"),
    *_deny("kexec_load kexec_file_load reboot", "another kernel, or none"),
    *_deny("swapon swapoff acct quotactl quotactl_fd", "host-wide storage and accounting"),
    *_deny("settimeofday clock_settime adjtimex clock_adjtime", "the host's clock"),
    *_deny("ptrace", "reads and drives other processes; with it a command can make the worker its tracer"),
    *_deny(
        "process_vm_readv process_vm_writev process_madvise process_mrelease kcmp",
        "reads, writes or reclaims the memory of another process",
    ),
    *_deny("pidfd_getfd", "takes descriptors out of another process, the worker's socket among them"),
    *_deny("bpf", "programs inside the kernel; a rich source of escalations"),
    *_deny("perf_event_open", "counts and samples other processes; a rich source of escalations", quiet=True),
    *_deny("userfaultfd", "stops the kernel amid a copy: makes kernel races winnable", quiet=True),
    *_deny(
        "io_uring_setup io_uring_enter io_uring_register",
        "opens, connects and creates without passing this filter; runtimes fall back to epoll on ENOSYS",
        code=errno.ENOSYS,
        quiet=True,
    ),
    *_deny(
        "clone3",
        "flags lie in memory; libc falls back to clone, which is filtered",
        code=errno.ENOSYS,
        quiet=True,
    ),
    *_deny(
        "openat2",
        "mode lies in memory and could set set-id bits; callers fall back to openat",
        code=errno.ENOSYS,
        quiet=True,
    ),
    *_deny("memfd_secret", "memory that no limit can account for", code=errno.ENOSYS, quiet=True),
    *_deny("add_key request_key keyctl", "keyrings know no namespace: the backend's too", quiet=True),
    *_deny("open_by_handle_at name_to_handle_at", "opens files by inode, past every path rule"),
    *_deny("fanotify_init", "watches whole file systems"),
    *_deny("syslog", "the kernel's log names addresses and other users' processes"),
    *_deny("vhangup", "takes a terminal away from others"),
    *_deny("lookup_dcookie nfsservctl", "obsolete kernel interfaces"),
    *_deny("ioperm iopl modify_ldt", "raw ports and segment tables (x86)"),
    *_deny("lsm_set_self_attr", "changes the label of the security module"),
]  # fmt: skip

_LOCKDOWN = [
    *_deny(
        "mbind set_mempolicy set_mempolicy_home_node migrate_pages move_pages",
        "placement of memory on the host's nodes",
        mode="lockdown",
    ),
    *_deny("sethostname setdomainname", "the jail's own name stays as it was given", mode="lockdown"),
    *_deny("vmsplice", "maps pages of this process into pipes; a source of escalations", mode="lockdown"),
]

_ARGUMENTS = [
    Rule("clone", errno.EPERM, "new namespaces, as unshare", ((_any(0, CLONE_NEW),),), part="namespaces"),
    Rule(
        "ioctl",
        errno.EPERM,
        "types into the terminal of another session",
        ((_eq(1, TIOCSTI),),),
        part="tiocsti",
    ),
    Rule(
        "ioctl",
        errno.EPERM,
        "pastes into, and reads, virtual consoles",
        ((_eq(1, TIOCLINUX),),),
        part="tioclinux",
    ),
    Rule(
        "ioctl",
        errno.EPERM,
        "loads line disciplines, kernel modules",
        ((_eq(1, TIOCSETD),),),
        part="tiocsetd",
    ),
    Rule(
        "fcntl",
        errno.EPERM,
        "a lease or delegation makes whoever opens the file wait for up to 45 s, on the host too",
        tuple((_eq(1, command),) for command in (F_SETLEASE, F_SETDELEG)),
        part="lease",
    ),
    Rule(
        "personality",
        errno.EPERM,
        "old personalities weaken the address space (READ_IMPLIES_EXEC, MMAP_PAGE_ZERO)",
        (tuple(_ne(0, value) for value in PERSONALITY_OK),),
    ),
]

_SOCKETS = [
    *(
        Rule("socket", errno.EPERM, f"AF_{name.upper()}: not for builds", ((_eq(0, number),),), part=name)
        for name, number in NAMED_FAMILIES.items()
    ),
    Rule(
        "socket",
        errno.EPERM,
        "raw packets (netlink's SOCK_RAW is not one)",
        tuple(
            (_eq(0, family), _eq(1, kind, SOCK_TYPE_MASK))
            for family in (AF_INET, AF_INET6)
            for kind in (SOCK_RAW, SOCK_PACKET)
        ),
        part="raw",
    ),
    Rule(
        "socket",
        errno.EAFNOSUPPORT,
        "address families are modules that the kernel loads on demand",
        (tuple(_ne(0, family) for family in (AF_UNIX, AF_INET, AF_INET6, AF_NETLINK)),),
        part="families",
    ),
    Rule("socketpair", errno.EAFNOSUPPORT, "as socket", ((_ne(0, AF_UNIX),),), part="families"),
    Rule(
        "socket",
        errno.EPERM,
        "of netlink only the route family (getifaddrs)",
        ((_eq(0, AF_NETLINK), _ne(2, 0)),),
        part="netlink",
        modes=frozenset({"lockdown"}),
    ),
]  # fmt: skip


def _set_id(name: str, mode_arg: int, bits: int = SET_ID) -> Rule:
    return Rule(
        name,
        errno.EPERM,
        "a set-id file on the host's disk outlives the jail",
        ((_any(mode_arg, bits),),),
        part="setid",
    )


def _set_id_open(name: str, flags_arg: int) -> Rule:
    # The kernel ignores the mode unless the call may create (fs/open.c, WILL_CREATE), and callers leave
    # garbage there.
    return Rule(
        name,
        errno.EPERM,
        "a set-id file on the host's disk outlives the jail",
        ((_any(flags_arg, O_CREAT | O_TMPFILE_BIT), _any(flags_arg + 1, SET_ID)),),
        part="setid",
    )


_SET_ID = [
    _set_id("chmod", 1),
    _set_id("fchmod", 1),
    _set_id("fchmodat", 2),
    _set_id("fchmodat2", 2),
    _set_id("creat", 1),
    _set_id("mknod", 1),
    _set_id("mknodat", 2),
    _set_id("mkdir", 1, 0o4000),
    _set_id("mkdirat", 2, 0o4000),
    _set_id_open("open", 1),
    _set_id_open("openat", 2),
]

_PID1 = "cripples pid 1, the worker, without a signal: the kernel compares user ids only"
_BWRAP, _LANDLOCK = frozenset({"bwrap"}), frozenset({"landlock"})
_SCHED = ("sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr")

# getpriority(2): PRIO_PROCESS 0; ioprio_set(2): IOPRIO_WHO_PROCESS 1. Groups and users are refused
# altogether: a command can join the worker's group (same session), and the user is the worker's and, outside
# a pid namespace, the backend's.
_PRIORITY = (("setpriority", 0), ("ioprio_set", 1))


def _others(name: str, when: tuple[tuple[Check, ...], ...], modes: frozenset[str] = frozenset()) -> Rule:
    return Rule(name, errno.EPERM, _PID1, when, part="others", modes=modes, fixed="landlock" in modes)


_WORKER = [
    _others("prlimit64", ((_ne(0, 0), Check(2, "set64")),)),
    *(_others(name, ((_eq(0, 1),),), _BWRAP) for name in _SCHED),
    *(_others(name, ((_ne(0, which),), (_eq(1, 1),)), _BWRAP) for name, which in _PRIORITY),
    # Without a pid namespace the backend itself is in reach: every process but the caller.
    *(_others(name, ((_ne(0, 0),),), _LANDLOCK) for name in _SCHED),
    *(_others(name, ((_ne(0, which),), (_ne(1, 0),)), _LANDLOCK) for name, which in _PRIORITY),
]  # fmt: skip

_IPC = "System V and POSIX queues have no path: without an ipc namespace they are the host's"
_LANDLOCK_ONLY = [
    *_deny("shmget shmat shmctl semget semop semtimedop semctl", _IPC, mode="landlock"),
    *_deny("msgget msgsnd msgrcv msgctl mq_open mq_unlink", _IPC, mode="landlock"),
    Rule(
        "socket",
        errno.EPERM,
        "Landlock does not see the path of a unix socket: the user's session bus would run anything outside",
        ((_eq(0, AF_UNIX),),),
        part="unix",
        modes=_LANDLOCK,
    ),
    Rule(
        "socket",
        errno.EPERM,
        "without a network namespace this is the host's network",
        tuple((_eq(0, family),) for family in (AF_INET, AF_INET6, AF_NETLINK)),
        part="inet",
        modes=frozenset({"no-inet"}),
        fixed=True,
    ),
]

_DISK = [
    Rule(
        "fallocate",
        errno.EOPNOTSUPP,
        "allocates without being counted as written; libc falls back to writing",
        modes=frozenset({"disk"}),
        fixed=True,
        quiet=True,
    )
]

RULES: tuple[Rule, ...] = (
    *_ALWAYS, *_LOCKDOWN, *_ARGUMENTS, *_SOCKETS, *_SET_ID, *_WORKER, *_LANDLOCK_ONLY, *_DISK,
)  # fmt: skip
"""The shipped list; the order matters only among rules of one call (the first that applies answers)."""


def is_syscall(name: str) -> bool:
    """Return whether an architecture has a call of this name (`[sandbox.seccomp] deny` takes these)."""
    return any(name in numbers(arch) for arch in ARCHES)


def allowable() -> frozenset[str]:
    """Return what `[sandbox.seccomp] allow` takes: a call on the list, or one rule of it (`socket.raw`)."""
    removable = [rule for rule in RULES if not rule.fixed]
    return frozenset({rule.name for rule in removable} | {rule.key for rule in removable})


def select(
    modes: frozenset[str],
    *,
    allow: frozenset[str] = frozenset(),
    deny: frozenset[str] = frozenset(),
    keep_set_id: bool,
) -> tuple[Rule, ...]:
    """Return the rules that apply in `modes`, `deny` added in front and `allow` taken off.

    `keep_set_id` holds the set-id rules against `allow`: a set-id file of root is root for every user of the
    host.
    """

    def stays(rule: Rule) -> bool:
        if rule.fixed or (keep_set_id and rule.part == "setid"):
            return True
        return rule.name not in allow and rule.key not in allow

    added = tuple(Rule(name, errno.EPERM, "denied by the policy", fixed=True) for name in sorted(deny))
    return added + tuple(rule for rule in RULES if (not rule.modes or rule.modes & modes) and stays(rule))
