"""What changes while a jail runs: grants with an end, and questions to whoever may grant."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from vectora_jail.egress_dial import Door
from vectora_jail.egress_io import in_thread
from vectora_jail.netrules import NetRules, Rule, RuleError, parse_rule

#: Different targets that may be asked for at once; a jail that asks for more is refused, not queued.
MAX_QUESTIONS = 16
# For so long a refused question is not put again, in seconds: clients retry at once.
_REMEMBER_NO_S = 10.0


@dataclass(frozen=True, slots=True)
class Request:
    """One target that no rule names, put to `on_request`."""

    door: Door
    host: str
    port: int
    rule_needed: str


#: Answers True to let this one connection through; to let later ones through too it calls `allow` itself.
OnRequest = Callable[[Request], "bool | Awaitable[bool]"]


def now() -> float:
    """Give the seconds since boot, those asleep included (CLOCK_BOOTTIME), or monotonic ones."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.clock_gettime(clock) if clock is not None else time.monotonic()


class Grants:
    """The run-time grants of one jail; usable from any thread."""

    def __init__(self, rules: NetRules) -> None:
        self._rules = rules
        self._held: dict[str, tuple[Rule, float | None]] = {}
        self._lock = threading.Lock()

    def add(self, text: str, ttl: float | None) -> Rule:
        """Add or renew a grant; raises RuleError for a wrong rule, a denied one, or one without consent."""
        rule = parse_rule(text)
        if ttl is not None and not ttl > 0:
            raise RuleError(text, "a grant lasts longer than 0 seconds")
        if rule.needs_private and not self._rules.private_addresses:
            raise RuleError(text, "a private address needs the ceiling's private_addresses")
        if rule.kind in ("host", "localhost"):
            decisions = [self._rules.decide(rule.name, port, (rule,)) for port in rule.ports]
            if all(decision.action == "deny" for decision in decisions):
                raise RuleError(text, decisions[0].reason)
        with self._lock:
            self._held[str(rule)] = (rule, now() + ttl if ttl is not None else None)
        return rule

    def remove(self, text: str) -> bool:
        """Take a grant back; whether there was one."""
        with self._lock:
            return self._held.pop(str(parse_rule(text)), None) is not None

    def rules(self) -> tuple[Rule, ...]:
        """Give the grants that are valid now."""
        if not self._held:
            return ()
        with self._lock:
            time_now = now()
            for text, (_, end) in tuple(self._held.items()):
                if end is not None and end <= time_now:
                    del self._held[text]
            return tuple(rule for rule, _ in self._held.values())


class Asker:
    """Puts each unknown target once, however many connections wait for the answer."""

    def __init__(self, on_request: OnRequest, timeout_s: float) -> None:
        self._on_request = on_request
        self._timeout_s = timeout_s
        self._open: dict[tuple[str, int], asyncio.Task[bool]] = {}
        self._refused: dict[tuple[str, int], float] = {}

    async def ask(self, request: Request) -> bool:
        """Wait for the answer; False also for none in time, too many questions, and a failing callback."""
        key = request.host, request.port
        if self._refused.get(key, 0.0) > now():
            return False
        task = self._open.get(key)
        if task is None:
            if len(self._open) >= MAX_QUESTIONS:
                return False
            task = asyncio.ensure_future(self._put(request))
            self._open[key] = task
            task.add_done_callback(lambda _: self._open.pop(key, None))
        answer = await asyncio.shield(task)
        if not answer:
            if len(self._refused) > 1024:
                self._refused.clear()
            self._refused[key] = now() + _REMEMBER_NO_S
        return answer

    def close(self) -> None:
        """Withdraw every open question."""
        for task in tuple(self._open.values()):
            task.cancel()

    async def _put(self, request: Request) -> bool:
        try:
            answer = self._on_request(request)
            if inspect.isawaitable(answer):
                answer = await asyncio.wait_for(answer, self._timeout_s)
        except (Exception, asyncio.TimeoutError):  # noqa: BLE001 - a callback that fails has not consented
            return False
        return answer is True


def bridged(on_request: OnRequest, loop: asyncio.AbstractEventLoop | None) -> OnRequest:
    """Give a callback for the network thread that runs the caller's one on its own loop, or on a thread."""

    async def call(request: Request) -> bool:
        answer = on_request(request)
        return await answer if inspect.isawaitable(answer) else answer

    async def ask(request: Request) -> bool:
        if loop is not None:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call(request), loop))
        return await in_thread(lambda: asyncio.run(call(request)))

    return ask
