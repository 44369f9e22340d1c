/* hello.c — the first request: every wall in the order of the design, then the answer what each of them said.
 *
 * What a non-dumpable process cannot open any more comes first, the filter last, and then a child tries what must be
 * denied. Each wall answers with its errno; the host decides what it can accept.
 */
#include "confine.h"

#include "compat.h"
#include "rawsys.h"

#include <errno.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__)
#define ARCH_NAME "x86_64"
#else
#define ARCH_NAME "aarch64"
#endif

static void wall(struct mp_writer *w, const char *name, int value)
{
	mp_write_str(w, name);
	if (value == NOT_ASKED)
		mp_write_nil(w);
	else
		mp_write_int(w, value);
}

static void reply_hello(struct lane *l, const struct request *q, const struct walls *walls)
{
	uint8_t buf[1024];
	struct mp_writer w;
	long abi = raw3(SYS_landlock_create_ruleset, 0, 0, 1 /* LANDLOCK_CREATE_RULESET_VERSION */);

	mp_writer_init(&w, buf, sizeof buf);
	mp_write_map(&w, 7);
	mp_write_str(&w, "id");
	mp_write_int(&w, q->id);
	mp_write_str(&w, "version");
	mp_write_int(&w, VJ_PROTOCOL);
	mp_write_str(&w, "pid");
	mp_write_int(&w, getpid());
	mp_write_str(&w, "arch");
	mp_write_str(&w, ARCH_NAME);
	mp_write_str(&w, "landlock_abi");
	mp_write_int(&w, abi < 0 ? 0 : abi);
	mp_write_str(&w, "nonce");
	mp_write_bin(&w, q->nonce.ptr, q->nonce.len > 64 ? 0 : q->nonce.len);
	mp_write_str(&w, "walls");
	mp_write_map(&w, 7);
	wall(&w, "dumpable", walls->dumpable);
	wall(&w, "no_new_privs", walls->no_new_privs);
	wall(&w, "rlimits", walls->rlimits);
	wall(&w, "landlock", walls->landlock);
	wall(&w, "seccomp", walls->seccomp);
	wall(&w, "probe_write", walls->probe_write);
	wall(&w, "probe_syscall", walls->probe_syscall);
	lane_send(l, &w, -1);
}

static void read_sampler_limits(const struct request *q)
{
	struct mp_reader r;
	if (!q->limits)
		return;
	mp_reader_init(&r, q->limits, (size_t)(q->end - q->limits));
	for (uint32_t n = mp_read_map(&r); n && !r.err; n--) {
		struct mp_bytes k = mp_read_bytes(&r);
		if (mp_is(k, "memory"))
			worker.limit_memory = mp_read_uint(&r);
		else if (mp_is(k, "pids"))
			worker.limit_pids = mp_read_uint(&r);
		else if (mp_is(k, "disk"))
			worker.limit_disk = mp_read_uint(&r);
		else
			mp_skip(&r);
	}
}

static int errno_of(int result)
{
	return result < 0 ? errno : 0;
}

void hello(struct lane *l, const struct request *q, struct message *m)
{
	static char *no_env[] = {NULL};
	struct walls walls = {.landlock = NOT_ASKED, .seccomp = NOT_ASKED, .probe_write = NOT_ASKED,
			      .probe_syscall = NOT_ASKED};
	struct slab *next = NULL;
	int e = 0;

	if (worker.confined)
		e = -EALREADY;
	else if (q->version != VJ_PROTOCOL)
		e = -EPROTONOSUPPORT;
	else if (!(next = slab_get()))
		e = -ENOMEM;
	else if (q->cwd && chdir(q->cwd) < 0)
		e = -errno;
	if (e) {
		if (next)
			slab_put(next);
		reply_error(l, q, e);
		return;
	}
	worker.confined = true;
	worker.env = q->envp ? q->envp : no_env; /* they stay in the slab of this message */
	worker.path = path_of(worker.env);
	umask(q->has_umask ? (mode_t)(q->umask & 0777) : 022);
	dup2(worker.null_fd, 2);
	if (getpgrp() != getpid())
		setpgid(0, 0);
	read_sampler_limits(q);
	if (q->lease) {
		worker.lease_ns = (q->lease > 86400 ? 86400 : q->lease) * UINT64_C(1000000000);
		lease_renew();
		loop_wake_at(1);
	}

	wall_own_proc();
	walls.dumpable = errno_of(prctl(PR_SET_DUMPABLE, 0, 0, 0, 0));
	walls.no_new_privs = errno_of(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
	walls.rlimits = wall_rlimits(q);
	wall_capabilities();
	if (q->cmd_scope) {
		long fd = landlock_ruleset(0, 0, q->cmd_scope);
		worker.scope_fd = (int)fd;
		if (fd < 0)
			walls.landlock = (int)-fd;
	}
	if (q->landlock && (walls.landlock == NOT_ASKED || !walls.landlock))
		walls.landlock = wall_landlock(q);
	if (q->seccomp.len)
		walls.seccomp = wall_seccomp(q);
	if (q->probe)
		wall_probe(q, &walls);
	m->slab = next;
	reply_hello(l, q, &walls);
}

/* ---- the lease: without a word from the host for so long, the jail ends; time asleep counts ---- */

uint64_t boot_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_BOOTTIME, &t);
	return (uint64_t)t.tv_sec * UINT64_C(1000000000) + (uint64_t)t.tv_nsec;
}

void lease_renew(void)
{
	if (worker.lease_ns)
		worker.lease_end = boot_ns() + worker.lease_ns;
}

void lease_check(void)
{
	if (!worker.lease_ns)
		return;
	uint64_t now = boot_ns();
	if (now >= worker.lease_end)
		worker_exit(0);
	loop_wake_at(now_ns() + (worker.lease_end - now));
}
