/* confine.c — the walls that this process can put around itself, and so around every command; one function each. */
#include "confine.h"

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
#include <unistd.h>

#define FILE_ACCESS (UINT64_C(1) << 0 | 1u << 1 | 1u << 2 | 1u << 14 | 1u << 15) /* what a rule on a file may name */

struct probe {
	const char *path;
	long nr;
	volatile int write_errno, syscall_errno;
};

void wall_own_proc(void)
{
	worker.io_fd = open("/proc/self/io", O_RDONLY | O_CLOEXEC);
	worker.oom_fd = open("/proc/self/oom_score_adj", O_RDWR | O_CLOEXEC);
	if (worker.oom_fd >= 0) {
		ssize_t n = read(worker.oom_fd, worker.oom_score, sizeof worker.oom_score);
		worker.oom_len = n > 0 ? (uint32_t)n : 0;
	}
}

/* Tags hold because nothing inside may raise a hard limit, and the worker cannot be read by a capable tracer. */
void wall_capabilities(void)
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

/* What a command would set to what it has already costs a call for nothing: such limits are left to inheritance, and
 * those that cannot harm the worker are set here for that purpose. */
static void inherit_limits(void)
{
	const uint64_t harmless = 1u << RLIMIT_CORE | 1u << RLIMIT_MEMLOCK | 1u << RLIMIT_SIGPENDING |
				  1u << RLIMIT_MSGQUEUE | 1u << RLIMIT_NICE | 1u << RLIMIT_RTPRIO;
	int n = 0;

	for (int i = 0; i < worker.ncmd_limits; i++) {
		const struct vj_limit want = worker.cmd_limits[i];
		struct vj_rlimit have;
		if (harmless >> want.resource & 1)
			raw4(SYS_prlimit64, 0, want.resource, &want.value, 0);
		if (raw4(SYS_prlimit64, 0, want.resource, 0, &have) < 0 || have.soft != want.value.soft ||
		    have.hard != want.value.hard)
			worker.cmd_limits[n++] = want;
	}
	worker.ncmd_limits = n;
}

int wall_rlimits(const struct request *q)
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
	inherit_limits();
	return first;
}

long landlock_ruleset(uint64_t fs, uint64_t net, uint64_t scoped)
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

int wall_landlock(const struct request *q)
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
	long ruleset = landlock_ruleset(fs, net, scoped);
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

int wall_seccomp(const struct request *q)
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

void wall_probe(const struct request *q, struct walls *walls)
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
	/* As low as possible: then the three descriptors of a request are neighbours, and one call closes them. */
	int low = fcntl(worker.null_fd, F_DUPFD_CLOEXEC, 4);
	if (low >= 0) {
		close(worker.null_fd);
		worker.null_fd = low;
	}
	return 0;
}
