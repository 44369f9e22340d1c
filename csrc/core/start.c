/* start.c — start bwrap and wait until a jail's worker runs; whatever fails on the way leaves nothing behind. */
#define _GNU_SOURCE
#include "start.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "child.h"
#include "kernel.h"
#include "starter.h"

#define READY_STEP_NS 200000 /* how often the program's name is looked at; everything else wakes us at once */

/* ---- waiting for bwrap ---- */

struct watch {
	int info, err; /* read ends, −1 after end-of-file */
	int monitor, worker; /* pidfds, −1 = none yet */
	int monitor_dead, worker_dead;
	char text[1024]; /* what came from --info-fd */
	size_t text_len;
	int64_t deadline;
	struct vj_start_error *error;
};

static int fail(struct vj_start_error *error, int stage, int err)
{
	error->stage = stage;
	error->err = err < 0 ? -err : err;
	return error->err ? -error->err : -ECHILD;
}

/* Keep what fits and throw the rest away: bwrap must never block on a full pipe. */
static void read_some(int *fd, char *buffer, size_t capacity, size_t *len)
{
	char rest[512];

	while (*fd >= 0) {
		int full = *len >= capacity;
		ssize_t n = full ? read(*fd, rest, sizeof rest) : read(*fd, buffer + *len, capacity - *len);
		if (n > 0 && !full)
			*len += (size_t)n;
		if (n == 0)
			vj_close(fd);
		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return;
	}
}

/* One wait of at most timeout_ns (and never beyond the deadline) for anything to happen. */
static void pump(struct watch *w, int64_t timeout_ns)
{
	struct pollfd p[4] = {{.fd = w->info, .events = POLLIN},
			      {.fd = w->err, .events = POLLIN},
			      {.fd = w->monitor_dead ? -1 : w->monitor, .events = POLLIN},
			      {.fd = w->worker_dead ? -1 : w->worker, .events = POLLIN}};
	int64_t left = (int64_t)vj_left_ms(w->deadline) * 1000000;
	struct timespec t = {0};

	if (timeout_ns > left)
		timeout_ns = left;
	t.tv_sec = (time_t)(timeout_ns / 1000000000);
	t.tv_nsec = (long)(timeout_ns % 1000000000);
	if (ppoll(p, 4, &t, NULL) < 0)
		return;
	size_t detail = w->error->detail_len;
	read_some(&w->info, w->text, sizeof w->text - 1, &w->text_len);
	read_some(&w->err, w->error->detail, sizeof w->error->detail, &detail);
	w->error->detail_len = (uint32_t)detail;
	w->text[w->text_len] = 0;
	w->monitor_dead |= p[2].revents != 0;
	w->worker_dead |= p[3].revents != 0;
}

/* The number after "child-pid", complete only when something follows it; 0: not there yet. */
static pid_t told_pid(const char *text)
{
	const char *at = strstr(text, "\"child-pid\"");
	char *end;

	if (at == NULL || (at = strchr(at, ':')) == NULL)
		return 0;
	long pid = strtol(at + 1, &end, 10);
	return end > at + 1 && *end && pid > 0 && pid <= INT_MAX ? (pid_t)pid : 0;
}

/* bwrap (or the launcher before it) has ended: its last words say why. */
static int ended(struct watch *w)
{
	pump(w, 0);
	if (w->text[0] == '!') { /* the launcher: "!errno what it did" */
		char *end;
		long err = strtol(w->text + 1, &end, 10);
		size_t len = strlen(end);
		if (len > sizeof w->error->detail)
			len = sizeof w->error->detail;
		memcpy(w->error->detail, end, len);
		w->error->detail_len = (uint32_t)len;
		return fail(w->error, VJ_STAGE_STAGING, (int)err);
	}
	return fail(w->error, VJ_STAGE_BWRAP, 0);
}

/* Field 4 of /proc/PID/stat; the name in field 2 may contain anything but ends at the last ')'. */
static pid_t parent_of(pid_t pid)
{
	char path[40], text[512];
	VJ_CLEANUP_FD int fd = -1;

	snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
	if ((fd = open(path, O_RDONLY | O_CLOEXEC)) < 0)
		return -1;
	ssize_t n = read(fd, text, sizeof text - 1);
	if (n <= 0)
		return -1;
	text[n] = 0;
	const char *at = strrchr(text, ')');
	int parent;
	return at && sscanf(at + 1, " %*c %d", &parent) == 1 ? (pid_t)parent : -1;
}

/* A start that fails now fails for a reason that the builder is about to tell. */
static int give_last_words(struct watch *w)
{
	int64_t limit = vj_now_ms() + 500;

	while (!w->monitor_dead && vj_left_ms(limit) > 0 && vj_left_ms(w->deadline) > 0)
		pump(w, 50000000);
	return w->monitor_dead;
}

/* Is s->pid, held by a pidfd, the monitor's child? 1, 0, or −1: hidden (procfs mounted with hidepid). */
static int is_child(const struct watch *w, const struct vj_started *s)
{
	pid_t parent = parent_of(s->pid);

	return parent == s->monitor_pid ? 1 : parent < 0 && !w->worker_dead ? -1 : 0;
}

/* The pid is somebody else's: it must not be killed when the start is abandoned. */
static int not_ours(struct watch *w, struct vj_started *s, int err)
{
	w->worker = -1;
	vj_close(&s->pidfd);
	s->pidfd = -1;
	return give_last_words(w) ? ended(w) : fail(w->error, VJ_STAGE_IDENTITY, err);
}

static int await_pid(struct watch *w, struct vj_started *s)
{
	pid_t pid;

	while ((pid = told_pid(w->text)) == 0) {
		if (w->monitor_dead)
			return ended(w);
		if (vj_left_ms(w->deadline) == 0 || w->text_len == sizeof w->text - 1)
			return fail(w->error, VJ_STAGE_INFO, ETIMEDOUT);
		pump(w, INT64_MAX);
	}
	/* the pidfd comes first: while it is alive, everything below /proc/PID is of that process */
	s->pid = pid;
	s->pidfd = w->worker = vj_pidfd_open(pid);
	if (s->pidfd < 0)
		return not_ours(w, s, -s->pidfd);
	return is_child(w, s) == 0 ? not_ours(w, s, ESRCH) : 0;
}

static ssize_t read_name(pid_t pid, char *name, size_t size)
{
	char path[40];
	VJ_CLEANUP_FD int fd = -1;

	snprintf(path, sizeof path, "/proc/%d/comm", (int)pid);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	return fd < 0 ? -1 : read(fd, name, size);
}

/* bwrap tells the pid before it mounts anything. The mounts are complete when its child executes the worker, which
 * shows in the process's name: readable by everybody, while /proc/PID/exe of a bwrap that has dropped its
 * capabilities is closed to an ordinary user. */
static int await_program(struct watch *w, struct vj_started *s)
{
	char builder[32], now[32];
	ssize_t len = read_name(s->monitor_pid, builder, sizeof builder);

	for (;;) {
		if (w->monitor_dead || w->worker_dead || len <= 0) {
			give_last_words(w);
			return ended(w);
		}
		ssize_t n = read_name(s->pid, now, sizeof now);
		if (n > 0 && (n != len || memcmp(now, builder, (size_t)n)))
			return is_child(w, s) == 1 ? 0 : not_ours(w, s, ESRCH);
		if (vj_left_ms(w->deadline) == 0)
			return fail(w->error, VJ_STAGE_READY, ETIMEDOUT);
		pump(w, READY_STEP_NS);
	}
}

static int same_object(int fd, const char *path)
{
	struct stat a, b;

	return fstat(fd, &a) == 0 && stat(path, &b) == 0 && a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

static int open_namespaces(struct watch *w, struct vj_started *s)
{
	char path[40];

	snprintf(path, sizeof path, "/proc/%d/ns/mnt", (int)s->pid);
	/* until the new program's credentials are complete the kernel may still say no */
	while ((s->mntns_fd = open(path, O_RDONLY | O_CLOEXEC)) < 0) {
		int err = errno;
		if ((err != EACCES && err != EPERM) || vj_left_ms(w->deadline) == 0 || w->monitor_dead)
			return w->monitor_dead ? ended(w) : fail(w->error, VJ_STAGE_NAMESPACE, err);
		pump(w, READY_STEP_NS);
	}
	if (same_object(s->mntns_fd, "/proc/self/ns/mnt"))
		return fail(w->error, VJ_STAGE_IDENTITY, EXDEV);
	s->userns_fd = ioctl(s->mntns_fd, VJ_NS_GET_USERNS);
	if (s->userns_fd < 0)
		return fail(w->error, VJ_STAGE_NAMESPACE, errno);
	fcntl(s->userns_fd, F_SETFD, FD_CLOEXEC);
	if (same_object(s->userns_fd, "/proc/self/ns/user"))
		vj_close(&s->userns_fd);
	pump(w, 0);
	return w->worker_dead || w->monitor_dead ? ended(w) : 0;
}

/* ---- one start ---- */

/* Children of a failed jail builder, ended before it so that it reaps them itself. */
static void kill_children(pid_t monitor)
{
	char path[64], text[256];
	VJ_CLEANUP_FD int fd = -1;

	snprintf(path, sizeof path, "/proc/%d/task/%d/children", (int)monitor, (int)monitor);
	if ((fd = open(path, O_RDONLY | O_CLOEXEC)) < 0)
		return;
	ssize_t n = read(fd, text, sizeof text - 1);
	text[n > 0 ? n : 0] = 0;
	for (char *at = text, *end; *at; at = end) {
		long pid = strtol(at, &end, 10);
		if (end == at)
			break;
		VJ_CLEANUP_FD int pidfd = vj_pidfd_open((pid_t)pid);
		if (pidfd >= 0 && parent_of((pid_t)pid) == monitor)
			vj_pidfd_kill(pidfd, SIGKILL);
		while (*end == ' ' || *end == '\n')
			end++;
	}
}

static void abandon(struct vj_started *s)
{
	int status;

	if (s->monitor_fd >= 0) {
		if (s->pidfd < 0)
			kill_children(s->monitor_pid);
		vj_reap(s->monitor_fd, s->pidfd, 1000, &status);
	}
	vj_close(&s->monitor_fd);
	vj_close(&s->pidfd);
	vj_close(&s->mntns_fd);
	vj_close(&s->userns_fd);
	s->monitor_pid = s->pid = -1;
}

struct layout {
	struct vj_dup dups[VJ_FD_DATA + VJ_START_FDS_MAX];
	int scratch[VJ_FD_DATA + VJ_START_FDS_MAX + 1];
	size_t n;
};

static void put(struct layout *l, int from, int to)
{
	l->dups[l->n++] = (struct vj_dup){from, to};
}

static int run(const struct vj_start_request *r, struct vj_started *s, struct vj_start_error *error)
{
	VJ_CLEANUP_FD int null = -1, args = -1, err_r = -1, err_w = -1, info_r = -1, info_w = -1;
	struct layout layout = {.n = 0};
	int pair[2];

	if (r->nfds > VJ_START_FDS_MAX)
		return fail(error, VJ_STAGE_PREPARE, E2BIG);
	if ((null = open("/dev/null", O_RDWR | O_CLOEXEC)) < 0 || pipe2(pair, O_CLOEXEC) != 0)
		return fail(error, VJ_STAGE_PREPARE, errno);
	err_r = pair[0], err_w = pair[1];
	put(&layout, null, 0);
	put(&layout, null, 1);
	put(&layout, err_w, 2);
	put(&layout, r->sock, VJ_FD_SOCKET);
	if (r->args) {
		if ((args = vj_memfd("vj-args", r->args, r->args_len)) < 0)
			return fail(error, VJ_STAGE_PREPARE, -args);
		if (pipe2(pair, O_CLOEXEC) != 0)
			return fail(error, VJ_STAGE_PREPARE, errno);
		info_r = pair[0], info_w = pair[1];
		put(&layout, args, VJ_FD_ARGS);
		put(&layout, info_w, VJ_FD_INFO);
	}
	for (uint32_t i = 0; i < r->nfds; i++)
		put(&layout, r->fds[i], VJ_FD_DATA + (int)i);
	if (fcntl(err_r, F_SETFL, O_NONBLOCK) != 0 || (info_r >= 0 && fcntl(info_r, F_SETFL, O_NONBLOCK) != 0))
		return fail(error, VJ_STAGE_PREPARE, errno);

	struct vj_child child = {.path = r->path,
				 .exec_fd = r->exec_fd,
				 .argv = r->argv,
				 .dups = layout.dups,
				 .ndups = layout.n,
				 .scratch = layout.scratch,
				 .new_session = 1};
	int err = vj_starter_run(&child, &s->monitor_pid, &s->monitor_fd);
	if (err)
		return fail(error, child.stage, err);
	vj_close(&err_w);
	vj_close(&info_w);
	if (!r->args) {
		s->pid = s->monitor_pid;
		s->pidfd = fcntl(s->monitor_fd, F_DUPFD_CLOEXEC, 0);
		return s->pidfd < 0 ? fail(error, VJ_STAGE_PREPARE, errno) : 0;
	}
	struct watch w = {.info = info_r,
			  .err = err_r,
			  .monitor = s->monitor_fd,
			  .worker = -1,
			  .deadline = vj_now_ms() + r->deadline_ms,
			  .error = error};
	err_r = info_r = -1; /* the watch has them now, and closes each at its end-of-file */
	if ((err = await_pid(&w, s)) == 0 && (err = await_program(&w, s)) == 0)
		err = open_namespaces(&w, s);
	vj_close(&w.err);
	vj_close(&w.info);
	return err;
}

int vj_start(const struct vj_start_request *request, struct vj_started *started, struct vj_start_error *error)
{
	*started = (struct vj_started){-1, -1, -1, -1, -1, -1};
	error->stage = VJ_STAGE_NONE;
	error->err = 0;
	error->detail_len = 0;
	int err = run(request, started, error);
	if (err)
		abandon(started);
	return err;
}

int vj_reap(int monitor_pidfd, int worker_pidfd, int deadline_ms, int *status)
{
	int err;

	if (worker_pidfd >= 0) {
		/* the monitor then ends by itself, after it has reaped the worker: nothing is left to an init */
		vj_pidfd_kill(worker_pidfd, SIGKILL);
		err = vj_child_wait(monitor_pidfd, deadline_ms / 2, status);
		if (err != -ETIMEDOUT)
			return err;
	}
	vj_pidfd_kill(monitor_pidfd, SIGKILL);
	return vj_child_wait(monitor_pidfd, worker_pidfd >= 0 ? deadline_ms - deadline_ms / 2 : deadline_ms, status);
}

int vj_open_path(const char *path, int *fd)
{
	struct vj_open_how how = {.flags = O_PATH | O_CLOEXEC,
				  .resolve = VJ_RESOLVE_NO_SYMLINKS | VJ_RESOLVE_NO_MAGICLINKS};

	*fd = (int)syscall(VJ_SYS_openat2, AT_FDCWD, path, &how, sizeof how);
	return *fd < 0 ? -errno : 0;
}
