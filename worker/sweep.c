/* sweep.c — which processes belong to which call.
 *
 * Each command sets RLIMIT_RTTIME, soft and hard, to 2^60 - n before its exec. Every descendant inherits that hard
 * limit, none can raise it, it bounds nothing real, and the worker reads it with prlimit64 (prlimit(2), proc(5)).
 */
#include "worker.h"

#include "compat.h"
#include "rawsys.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/statfs.h>
#include <unistd.h>

/* Where the processes begin in the directory /proc; the 60 names before them are skipped when that is true here. */
#define PROC_FIRST_PROCESS 256
#define PROC_MAGIC 0x9fa0
#define ANCESTORS_MAX 256

static pid_t self;

static pid_t number(const char *name)
{
	long v = 0;
	for (; *name; name++) {
		if (*name < '0' || *name > '9' || v > 100000000)
			return 0;
		v = v * 10 + (*name - '0');
	}
	return (pid_t)v;
}

void scan_begin(struct scan *s)
{
	s->at = s->len = 0;
	s->vanished = 0;
	raw3(SYS_lseek, s->fd, s->start, SEEK_SET);
}

/* The next process in the directory, this one included; 0 at the end. */
static pid_t next_pid(struct scan *s)
{
	for (;;) {
		if (s->at >= s->len) {
			long n = raw3(SYS_getdents64, s->fd, s->buf, sizeof s->buf);
			if (n <= 0)
				return 0;
			s->len = (size_t)n;
			s->at = 0;
		}
		const struct vj_dirent64 *d = (const void *)(s->buf + s->at);
		s->at += d->reclen;
		pid_t pid = number(d->name);
		if (pid)
			return pid;
	}
}

int scan_open(struct scan *s)
{
	s->fd = open("/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (s->fd < 0)
		return -errno;
	self = getpid();
	/* Trust the short way only after it has shown this process. */
	s->start = PROC_FIRST_PROCESS;
	scan_begin(s);
	for (pid_t pid; (pid = next_pid(s));)
		if (pid == self)
			return 0;
	s->start = 0;
	return 0;
}

uint64_t tag_base(void)
{
	return worker.pid1 ? VJ_TAG_BASE : VJ_TAG_BASE - (uint64_t)worker.pid * VJ_TAG_SPAN;
}

static size_t read_stat(int proc, pid_t pid, char *text, size_t cap)
{
	char name[24], *p = name + sizeof name;
	static const char tail[] = "/stat";
	p -= sizeof tail;
	memcpy(p, tail, sizeof tail);
	for (pid_t v = pid; v; v /= 10)
		*--p = (char)('0' + v % 10);
	long fd = raw4(SYS_openat, proc, p, O_RDONLY | O_CLOEXEC, 0);
	if (fd < 0)
		return 0;
	long n = raw3(SYS_read, fd, text, cap - 1);
	raw1(SYS_close, fd);
	text[n > 0 ? n : 0] = 0;
	return n > 0 ? (size_t)n : 0;
}

/* Is it below this process? A subreaper is an ancestor of everything that its commands started. */
static bool descends(int proc, pid_t pid)
{
	char text[512];

	for (int depth = 0; depth < ANCESTORS_MAX && pid > 1; depth++) {
		const char *p = read_stat(proc, pid, text, sizeof text) ? strrchr(text, ')') : NULL;
		if (!p || p[1] != ' ' || !p[2])
			return false;
		pid = 0; /* ") S 123 ": the parent is the field behind the state */
		for (p += 4; *p >= '0' && *p <= '9'; p++)
			pid = pid * 10 + (*p - '0');
		if (pid == self)
			return true;
	}
	return false;
}

/* What a hard limit says: a tag of ours, or none. Inside a pid namespace whatever was lowered below the base is ours;
 * elsewhere what lies in another worker's range is ours only where a command of ours has put itself there. */
static uint64_t tag_of(int proc, pid_t pid, uint64_t hard)
{
	uint64_t base = tag_base();
	if (hard > VJ_TAG_BASE)
		return VJ_UNTAGGED;
	if (worker.pid1 || (hard <= base && hard + VJ_TAG_SPAN > base))
		return hard;
	return descends(proc, pid) ? hard : VJ_UNTAGGED;
}

uint64_t process_tag(const struct scan *s, pid_t pid)
{
	struct vj_rlimit limit = {0, VJ_UNTAGGED};
	if (raw4(SYS_prlimit64, pid, RLIMIT_RTTIME, 0, &limit) < 0)
		return VJ_UNTAGGED;
	return tag_of(s->fd, pid, limit.hard);
}

int scan_next(struct scan *s, pid_t *pid, uint64_t *tag)
{
	for (;;) {
		struct vj_rlimit limit = {0, VJ_UNTAGGED};
		*pid = next_pid(s);
		if (!*pid)
			return 0;
		if (*pid == self)
			continue;
		long e = raw4(SYS_prlimit64, *pid, RLIMIT_RTTIME, 0, &limit);
		if (e == -ESRCH)
			s->vanished++;
		if (e < 0)
			continue; /* another user's process cannot be one of ours */
		*tag = tag_of(s->fd, *pid, limit.hard);
		return 1;
	}
}

int last_pid_open(void)
{
	struct statfs fs;
	int fd = open("/proc/loadavg", O_RDONLY | O_CLOEXEC);
	/* Containers may put a file of their own over it (lxcfs). */
	if (fd >= 0 && fstatfs(fd, &fs) == 0 && fs.f_type == PROC_MAGIC)
		return fd;
	if (fd >= 0)
		close(fd);
	return -1;
}

pid_t last_pid(int fd)
{
	char text[128];
	long n = fd < 0 ? 0 : raw4(SYS_pread64, fd, text, sizeof text - 1, 0);
	if (n <= 0 || text[n - 1] != '\n')
		return 0;
	text[n - 1] = 0;
	const char *p = strrchr(text, ' ');
	return p ? number(p + 1) : 0;
}

bool process_is_zombie(const struct scan *s, pid_t pid)
{
	char text[512];
	if (!read_stat(s->fd, pid, text, sizeof text))
		return true; /* gone meanwhile */
	const char *p = strrchr(text, ')'); /* the name before it may hold anything */
	return p && p[1] == ' ' && (p[2] == 'Z' || p[2] == 'X');
}
