/* confine.c — hello: the walls that this process puts around itself and so around every command.
 *
 * The order is that of the design: what a non-dumpable process cannot open any more comes first, the filter last, and
 * then a child tries what must be denied. Each wall answers with its errno; the host decides what it can accept.
 */
#include "worker.h"

#include "compat.h"
#include "rawsys.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__)
#define ARCH_NAME "x86_64"
#else
#define ARCH_NAME "aarch64"
#endif

#define FILE_ACCESS (UINT64_C(1) << 0 | 1u << 1 | 1u << 2 | 1u << 14 | 1u << 15) /* what a rule on a file may name */
#define NOT_ASKED 0xffff

struct walls {
	int dumpable, no_new_privs, rlimits, landlock, seccomp, probe_write, probe_syscall;
};

struct probe {
	const char *path;
	long nr;
	volatile int write_errno, syscall_errno;
};

/* ---- one wall each: 0 or an errno ---- */

static void open_own_proc(void)
{
	worker.io_fd = open("/proc/self/io", O_RDONLY | O_CLOEXEC);
	worker.oom_fd = open("/proc/self/oom_score_adj", O_RDWR | O_CLOEXEC);
}

/* Tags hold because nothing inside may raise a hard limit, and the worker cannot be read by a capable tracer. */
static void drop_capabilities(void)
{
	static const unsigned drop[] = {VJ_CAP_SYS_RESOURCE, VJ_CAP_SYS_PTRACE};
	struct vj_cap_header head = {VJ_CAP_VERSION_3, 0};
	struct vj_cap_data data[2];

	prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
	if (raw2(SYS_capget, &head, data) < 0)
		return;
	for (size_t i = 0; i < VJ_ARRAY(drop); i++) {
		uint32_t bit = 1u << drop[i];
		prctl(PR_CAPBSET_DROP, drop[i], 0, 0, 0);
		data[0].effective &= ~bit;
		data[0].permitted &= ~bit;
		data[0].inheritable &= ~bit;
	}
	raw2(SYS_capset, &head, data);
}

/* [[resource, soft, hard] ...] into at most `cap` entries; their number or -errno. */
static int read_limits(const struct request *q, const uint8_t *at, struct vj_limit *out, uint32_t cap)
{
	struct mp_reader r;
	if (!at)
		return 0;
	mp_reader_init(&r, at, (size_t)(q->end - at));
	uint32_t n = mp_read_array(&r);
	if (n > cap)
		return -E2BIG;
	for (uint32_t i = 0; i < n; i++) {
		if (mp_read_array(&r) != 3)
			return -EBADMSG;
		uint64_t resource = mp_read_uint(&r);
		out[i].resource = (int)(resource & 0xff);
		out[i].value.soft = mp_read_uint(&r);
		out[i].value.hard = mp_read_uint(&r);
		if (resource > 63 || resource == RLIMIT_RTTIME)
			return -EINVAL;
	}
	return r.err ? -EBADMSG : (int)n;
}

static int wall_rlimits(const struct request *q)
{
	struct vj_limit limits[VJ_ARRAY(worker.cmd_limits)];
	int first = 0;

	int n = read_limits(q, q->cmd_rlimits, worker.cmd_limits, VJ_ARRAY(worker.cmd_limits));
	if (n < 0)
		return -n;
	worker.ncmd_limits = n;
	n = read_limits(q, q->worker_rlimits, limits, VJ_ARRAY(limits));
	if (n < 0)
		return -n;
	for (int i = 0; i < n; i++) {
		long e = raw4(SYS_prlimit64, 0, limits[i].resource, &limits[i].value, 0);
		if (e < 0 && !first)
			first = (int)-e;
	}
	return first;
}

static long make_ruleset(uint64_t fs, uint64_t net, uint64_t scoped)
{
	const struct vj_landlock_ruleset_attr attr = {fs, net, scoped};
	/* A kernel that does not know the later fields takes the shorter structure only. */
	size_t size = scoped ? sizeof attr : net ? offsetof(struct vj_landlock_ruleset_attr, scoped) : sizeof fs;
	return raw3(SYS_landlock_create_ruleset, &attr, size, 0);
}

static int add_rule(int ruleset, const char *path, uint64_t access)
{
	struct stat st;
	int fd = open(path, O_PATH | O_CLOEXEC);
	if (fd < 0) /* what does not exist needs no rule */
		return errno == ENOENT || errno == ENOTDIR || errno == EACCES ? 0 : errno;
	if (fstat(fd, &st) == 0 && !S_ISDIR(st.st_mode))
		access &= FILE_ACCESS;
	const struct vj_landlock_path_beneath_attr rule = {access, fd};
	long e = access ? raw4(SYS_landlock_add_rule, ruleset, VJ_LANDLOCK_RULE_PATH_BENEATH, &rule, 0) : 0;
	close(fd);
	return (int)-e;
}

static int wall_landlock(const struct request *q)
{
	struct mp_reader r, rules = {0};
	uint64_t fs = 0, net = 0, scoped = 0;
	char path[4096];
	int e = 0;

	mp_reader_init(&r, q->landlock, (size_t)(q->end - q->landlock));
	for (uint32_t n = mp_read_map(&r); n && !r.err; n--) {
		struct mp_bytes k = mp_read_bytes(&r);
		if (mp_is(k, "handled_fs"))
			fs = mp_read_uint(&r);
		else if (mp_is(k, "handled_net"))
			net = mp_read_uint(&r);
		else if (mp_is(k, "scoped"))
			scoped = mp_read_uint(&r);
		else {
			if (mp_is(k, "rules"))
				rules = r;
			mp_skip(&r);
		}
	}
	if (r.err)
		return EBADMSG;
	long ruleset = make_ruleset(fs, net, scoped);
	if (ruleset < 0)
		return (int)-ruleset;
	for (uint32_t n = rules.p ? mp_read_array(&rules) : 0; n && !e; n--) {
		if (mp_read_array(&rules) != 2)
			rules.err = EBADMSG;
		e = -mp_cstr(mp_read_bytes(&rules), path, sizeof path);
		uint64_t access = mp_read_uint(&rules);
		if (!e)
			e = rules.err ? EBADMSG : add_rule((int)ruleset, path, access & fs);
	}
	if (!e)
		e = (int)-raw2(SYS_landlock_restrict_self, ruleset, 0);
	close((int)ruleset);
	return e;
}

static int wall_seccomp(const struct request *q)
{
	const struct vj_sock_fprog prog = {(unsigned short)(q->seccomp.len / 8), q->seccomp.ptr};
	if (q->seccomp.len % 8 || q->seccomp.len / 8 > 4096)
		return EINVAL;
	return (int)-raw3(SYS_seccomp, VJ_SECCOMP_SET_MODE_FILTER, 0, &prog);
}

/* ---- the probe child: what must be denied, tried where nothing can go wrong in the worker ---- */

static NO_SANITIZE void probe_main(void *arg)
{
	struct probe *p = arg;
	long fd;

	if (p->path) {
		fd = raw4(SYS_openat, AT_FDCWD, p->path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
		if (fd >= 0)
			raw3(SYS_unlinkat, AT_FDCWD, p->path, 0);
		else if (fd == -EEXIST)
			fd = raw4(SYS_openat, AT_FDCWD, p->path, O_WRONLY | O_CLOEXEC | O_NONBLOCK, 0);
		p->write_errno = fd < 0 ? (int)-fd : 0;
	}
	if (p->nr >= 0) { /* arguments that make an allowed call fail without harm */
		long e = raw6(p->nr, -1, -1, -1, -1, -1, -1);
		p->syscall_errno = e < 0 && e > -4096 ? (int)-e : 0;
	}
	raw_exit(0);
}

static void run_probe(const struct request *q, struct walls *walls)
{
	char path[4096];
	struct probe p = {.nr = -1, .syscall_errno = NOT_ASKED};
	struct mp_reader r;
	int status;

	mp_reader_init(&r, q->probe, (size_t)(q->end - q->probe));
	for (uint32_t n = mp_read_map(&r); n && !r.err; n--) {
		struct mp_bytes k = mp_read_bytes(&r);
		if (mp_is(k, "write") && mp_peek(&r) != MP_NIL) {
			if (mp_cstr(mp_read_bytes(&r), path, sizeof path) == 0)
				p.path = path;
		} else if (mp_is(k, "syscall") && mp_peek(&r) != MP_NIL) {
			p.nr = (long)(mp_read_uint(&r) & 0x7fffffff);
			p.syscall_errno = 0;
		} else
			mp_skip(&r);
	}
	struct slab *s = slab_get();
	if (!s)
		return;
	long pid = raw_clone(CLONE_VM | SIGCHLD, s->stack_top, probe_main, &p);
	if (pid > 0)
		while (raw4(SYS_wait4, pid, &status, __WALL, 0) == -EINTR)
			continue;
	slab_put(s);
	if (pid < 0)
		return;
	if (p.path)
		walls->probe_write = p.write_errno;
	if (p.nr >= 0) /* a filter that kills denies as well */
		walls->probe_syscall = WIFSIGNALED(status) ? EPERM : p.syscall_errno;
}

/* ---- hello ---- */

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

	open_own_proc();
	walls.dumpable = errno_of(prctl(PR_SET_DUMPABLE, 0, 0, 0, 0));
	walls.no_new_privs = errno_of(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
	walls.rlimits = wall_rlimits(q);
	drop_capabilities();
	if (q->cmd_scope) {
		long fd = make_ruleset(0, 0, q->cmd_scope);
		worker.scope_fd = (int)fd;
		if (fd < 0)
			walls.landlock = (int)-fd;
	}
	if (q->landlock && (walls.landlock == NOT_ASKED || !walls.landlock))
		walls.landlock = wall_landlock(q);
	if (q->seccomp.len)
		walls.seccomp = wall_seccomp(q);
	if (q->probe)
		run_probe(q, &walls);
	m->slab = next;
	reply_hello(l, q, &walls);
}

/* ---- the lease: without a word from the host for so long, the jail ends; time asleep counts ---- */

static uint64_t boot_ns(void)
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

/* ---- descriptors ---- */

static void close_from(unsigned first, unsigned last)
{
	if (first > last || raw3(SYS_close_range, first, last, 0) == 0)
		return;
	for (unsigned fd = first; fd <= last && fd < 65536; fd++) /* before 5.9 */
		raw1(SYS_close, fd);
}

/* A request's descriptors must never be 0 to 3, the places that a command's take. */
static int raise_fd(int *fd)
{
	if (*fd > 2)
		return fcntl(*fd, F_SETFD, FD_CLOEXEC) < 0 ? -errno : 0;
	int high = fcntl(*fd, F_DUPFD_CLOEXEC, 10);
	if (high < 0)
		return -errno;
	*fd = high;
	return 0;
}

int confine_descriptors(int *channel, int *out)
{
	int null = open("/dev/null", O_RDWR | O_CLOEXEC), e;

	if (null < 0)
		return -errno;
	if ((e = raise_fd(channel)) < 0 || (out && (e = raise_fd(out)) < 0))
		return e;
	worker.null_fd = fcntl(null, F_DUPFD_CLOEXEC, 10);
	if (worker.null_fd < 0)
		return -errno;
	for (int fd = 0; fd < 4; fd++) /* standard error stays until hello: a start that fails says why */
		if (fd != *channel && fd != 2 && raw3(SYS_dup3, worker.null_fd, fd, O_CLOEXEC) < 0)
			return -EBADF;
	int keep[] = {3, *channel, out ? *out : 3, worker.null_fd};
	for (size_t i = 0; i < VJ_ARRAY(keep); i++) /* in order */
		for (size_t k = i + 1; k < VJ_ARRAY(keep); k++)
			if (keep[k] < keep[i]) {
				int t = keep[i];
				keep[i] = keep[k];
				keep[k] = t;
			}
	for (size_t i = 1; i < VJ_ARRAY(keep); i++)
		if (keep[i] > keep[i - 1])
			close_from((unsigned)keep[i - 1] + 1, (unsigned)keep[i] - 1);
	close_from((unsigned)keep[VJ_ARRAY(keep) - 1] + 1, ~0u);
	return 0;
}
