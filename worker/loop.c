/* loop.c — the one place where the worker waits: ppoll(2) over its sources, with SIGCHLD let in only there.
 *
 * The first descriptors are polled one by one, which is cheapest for the handful of a usual jail. Lanes beyond them go
 * into an epoll set that is polled as one. epoll's watches are counted for the user over all namespaces, so a command
 * may use them up: a lane that finds no watch is polled like the first ones, and nothing depends on the set.
 */
#include "worker.h"

#include "compat.h"
#include "rawsys.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <sys/epoll.h>
#include <time.h>
#include <unistd.h>

#define POLLED_FIRST 12 /* sources that never go into the set */
#define IN_SET (-2)     /* the slot of a source that is in it */
#define EVENTS_MAX 32
#define TURNS_BETWEEN_REAPS 16 /* ready descriptors hold SIGCHLD back; it may not starve */

static struct pollfd poll_set[VJ_SOURCES_MAX];
static struct source *sources[VJ_SOURCES_MAX];
static int nsources;
static struct source set = {.slot = -1, .fd = -1}; /* the epoll descriptor */
static volatile sig_atomic_t leaving;
static uint64_t wake_ns; /* 0 = no timer */

uint64_t now_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * UINT64_C(1000000000) + (uint64_t)t.tv_nsec;
}

void loop_wake_at(uint64_t ns)
{
	if (!wake_ns || ns < wake_ns)
		wake_ns = ns;
}

static bool add_to_set(struct source *s)
{
	struct epoll_event e = {.events = EPOLLIN, .data.ptr = s};

	if (set.fd < 0) {
		int fd = epoll_create1(EPOLL_CLOEXEC);
		if (fd < 0 || source_add(&set, SRC_SET, fd, POLLIN, NULL) < 0) {
			if (fd >= 0)
				close(fd);
			return false;
		}
	}
	if (epoll_ctl(set.fd, EPOLL_CTL_ADD, s->fd, &e) < 0)
		return false;
	s->slot = IN_SET;
	return true;
}

int source_add(struct source *s, enum source_kind kind, int fd, short events, void *owner)
{
	*s = (struct source){.kind = kind, .slot = -1, .fd = fd, .owner = owner};
	if (kind == SRC_LANE && nsources >= POLLED_FIRST && add_to_set(s))
		return 0;
	if (nsources == VJ_SOURCES_MAX)
		return -ENOSPC;
	s->slot = nsources;
	poll_set[nsources] = (struct pollfd){.fd = fd, .events = events};
	sources[nsources++] = s;
	return 0;
}

void source_events(struct source *s, short events)
{
	if (s->slot >= 0)
		poll_set[s->slot].events = events;
}

void source_remove(struct source *s)
{
	int i = s->slot;
	if (i == IN_SET) {
		s->slot = -1;
		epoll_ctl(set.fd, EPOLL_CTL_DEL, s->fd, NULL);
	}
	if (i < 0)
		return;
	s->slot = -1;
	if (i != --nsources) {
		poll_set[i] = poll_set[nsources];
		sources[i] = sources[nsources];
		sources[i]->slot = i;
	}
}

void source_close(struct source *s)
{
	source_remove(s);
	if (s->fd >= 0)
		raw1(SYS_close, s->fd);
	s->fd = -1;
}

static void handle_set(void)
{
	struct epoll_event events[EVENTS_MAX];
	int n = epoll_wait(set.fd, events, EVENTS_MAX, 0);
	for (int i = 0; i < n; i++) {
		struct source *s = events[i].data.ptr;
		if (s->slot == IN_SET) /* not dropped by one of the others meanwhile */
			lane_ready(s->owner, POLLIN);
	}
}

static void handle(struct source *s, short revents)
{
	switch (s->kind) {
	case SRC_LANE:
		lane_ready(s->owner, revents);
		break;
	case SRC_SET:
		handle_set();
		break;
	case SRC_EXEC_PIPE:
		job_exec_done(s->owner);
		break;
	case SRC_STATUS: { /* the reader of the status pipe is gone */
		struct job *j = s->owner;
		source_remove(s);
		j->cancelled = true;
		job_kill(j);
		break;
	}
	case SRC_STREAM_OUT:
		stream_out_ready(revents);
		break;
	case SRC_CHAN:
		chan_ready(s, revents);
		break;
	case SRC_HELPER:
		helper_done();
		break;
	case SRC_LISTEN:
		egress_ready(s);
		break;
	case SRC_CONNECT:
		connect_ready(s);
		break;
	case SRC_NONE:
	default:
		source_remove(s);
		break;
	}
}

static void on_sigchld(int signo)
{
	(void)signo; /* ppoll returns EINTR; that is all */
}

/* Without a pid namespace the kernel ends nobody with this process: it does that itself when it is told to go. */
static void on_sigterm(int signo)
{
	(void)signo;
	if (raw0(SYS_getpid) == worker.pid) /* and not a half-born command, which shares this variable */
		leaving = 1;
}

int loop_signals(void)
{
	struct sigaction sa = {.sa_handler = SIG_DFL};
	sigset_t blocked;

	/* What is ignored here would be ignored in every command: execve resets handlers only. */
	for (int i = 1; i < 65; i++)
		sigaction(i, &sa, NULL);
	sa.sa_handler = on_sigchld; /* no SA_NOCLDSTOP: a child that made us its tracer is told by SIGCHLD too */
	if (sigaction(SIGCHLD, &sa, NULL) < 0)
		return -errno;
	sa.sa_handler = on_sigterm;
	if (!worker.pid1 && sigaction(SIGTERM, &sa, NULL) < 0)
		return -errno;
	/* Nothing else is blocked: a signal queued to pid 1 would stay in the kernel's memory. */
	sigemptyset(&blocked);
	sigaddset(&blocked, SIGCHLD);
	sigaddset(&blocked, SIGPIPE);
	return sigprocmask(SIG_SETMASK, &blocked, NULL) < 0 ? -errno : 0;
}

static void run_timers(void)
{
	uint64_t now;

	while (wake_ns && wake_ns <= (now = now_ns())) {
		wake_ns = 0;
		job_timers(now);
		sampler_timers(now);
		forward_timers(now);
		lease_check();
		if (wake_ns == 1) /* more to do at once, after a look at the descriptors */
			break;
	}
}

void loop_run(void)
{
	const uint64_t mask = UINT64_C(1) << (SIGPIPE - 1);
	unsigned turns = 0;

	for (;;) {
		struct timespec wait, *timeout = NULL;
		if (wake_ns) {
			uint64_t now = wake_ns == 1 ? 1 : now_ns();
			uint64_t left = wake_ns > now ? wake_ns - now : 0;
			wait.tv_sec = (time_t)(left / UINT64_C(1000000000));
			wait.tv_nsec = (long)(left % UINT64_C(1000000000));
			timeout = &wait;
		}
		long n = raw5(SYS_ppoll, poll_set, nsources, timeout, &mask, VJ_SIGSET_BYTES);
		if (leaving)
			worker_exit(0);
		if (n == -EINTR)
			job_reap();
		else if (n > 0) {
			/* From the end: a removal moves the last entry, which has been looked at, to the free place. */
			for (int i = nsources - 1; i >= 0 && n > 0; i--) {
				if (i >= nsources || !poll_set[i].revents)
					continue;
				short revents = poll_set[i].revents;
				poll_set[i].revents = 0;
				n--;
				handle(sources[i], revents);
			}
			if (++turns % TURNS_BETWEEN_REAPS == 0)
				job_reap();
		}
		if (wake_ns)
			run_timers();
		if (worker.stream)
			stream_turn();
	}
}
