/* enter.c — run the launcher's `enter` beside a jail and collect its answers. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "child.h"
#include "kernel.h"
#include "livemount.h"
#include "msg.h"
#include "start.h"

#define ENTER_OPS 3
#define ENTER_RESULT 4
#define ENTER_MNTNS 5
#define ENTER_USERNS 6
#define LATE_MAX 64

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int launcher = -1;
static int late[LATE_MAX]; /* pidfds of children that did not even end when killed (a hung file system) */
static size_t late_count;

static void enter_after_fork(void)
{
	pthread_mutex_init(&lock, NULL);
}

__attribute__((constructor)) static void enter_register(void)
{
	pthread_atfork(NULL, NULL, enter_after_fork);
}

int vj_set_launcher(int fd)
{
	int copy = fcntl(fd, F_DUPFD_CLOEXEC, 3);

	if (copy < 0)
		return -errno;
	pthread_mutex_lock(&lock);
	int old = launcher;
	launcher = copy;
	pthread_mutex_unlock(&lock);
	vj_close(&old);
	return 0;
}

static int launcher_copy(void)
{
	pthread_mutex_lock(&lock);
	int fd = launcher < 0 ? -ENOEXEC : fcntl(launcher, F_DUPFD_CLOEXEC, 3);
	int err = errno;
	pthread_mutex_unlock(&lock);
	return fd == -1 ? -err : fd;
}

/* Reap what has ended meanwhile, and remember pidfd (−1: nothing new). */
static void reap_late(int pidfd)
{
	int status;

	pthread_mutex_lock(&lock);
	for (size_t i = 0; i < late_count;)
		if (vj_child_wait(late[i], 0, &status) != -ETIMEDOUT) {
			vj_close(&late[i]);
			late[i] = late[--late_count];
		} else {
			i++;
		}
	if (pidfd >= 0 && late_count < LATE_MAX)
		late[late_count++] = pidfd;
	else
		vj_close(&pidfd);
	pthread_mutex_unlock(&lock);
}

/* Everything the child writes until it closes its end. */
static int collect(int fd, uint8_t *buffer, size_t capacity, size_t *len, int64_t deadline)
{
	for (*len = 0;;) {
		struct pollfd p = {.fd = fd, .events = POLLIN};
		int n = poll(&p, 1, vj_left_ms(deadline));
		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return n < 0 ? -errno : -ETIMEDOUT;
		if (*len == capacity)
			return -EMSGSIZE;
		ssize_t got = read(fd, buffer + *len, capacity - *len);
		if (got < 0 && errno == EINTR)
			continue;
		if (got <= 0)
			return got < 0 ? -errno : 0;
		*len += (size_t)got;
	}
}

static int decode(const uint8_t *answer, size_t len, int32_t *results, size_t capacity, size_t *count)
{
	struct mp_reader r;

	mp_reader_init(&r, answer, len);
	uint32_t n = mp_read_array(&r);
	int entered = (int)mp_read_int(&r);
	if (r.err || n == 0)
		return -EPROTO;
	if (entered)
		return -entered;
	if (n - 1 > capacity)
		return -EMSGSIZE;
	for (*count = 0; *count < n - 1; (*count)++)
		results[*count] = (int32_t)mp_read_int(&r);
	return r.err ? -EPROTO : 0;
}

static int run_launcher(const int fds[4], int image, pid_t *pid, int *pidfd)
{
	_Alignas(16) char stack[VJ_CHILD_STACK];
	int scratch[8];
	const struct vj_dup dups[] = {{fds[1], ENTER_RESULT}, {fds[0], ENTER_OPS}, {fds[2], ENTER_MNTNS},
				      {fds[3], ENTER_USERNS}};
	char *argv[] = {"vectora-jail-launcher", "enter", "3", "4", "5", fds[3] < 0 ? NULL : "6", NULL};
	struct vj_child child = {.exec_fd = image,
				 .argv = argv,
				 .dups = dups,
				 .ndups = fds[3] < 0 ? 3 : 4,
				 .scratch = scratch,
				 .new_session = 1};
	sigset_t all, before;

	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before); /* no handler may run in the child on our memory */
	int err = vj_child_start(&child, stack, pid, pidfd);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	return err;
}

int vj_enter(int mntns_fd, int userns_fd, const uint8_t *ops, size_t len, int deadline_ms, int32_t *results,
             size_t capacity, size_t *count)
{
	VJ_CLEANUP_FD int image = launcher_copy();
	VJ_CLEANUP_FD int ops_fd = -1, result_r = -1, result_w = -1, pidfd = -1;
	int64_t deadline = vj_now_ms() + deadline_ms;
	int pair[2], status;
	pid_t pid;

	*count = 0;
	reap_late(-1);
	if (image < 0)
		return image;
	if (len > VJ_OPS_MAX)
		return -E2BIG;
	if ((ops_fd = vj_memfd("vj-ops", ops, len)) < 0)
		return ops_fd;
	if (pipe2(pair, O_CLOEXEC) != 0)
		return -errno;
	result_r = pair[0], result_w = pair[1];
	size_t room = 16 + 5 * (capacity + 1), got;
	uint8_t *answer = malloc(room);
	if (answer == NULL)
		return -ENOMEM;
	int err = run_launcher((const int[]){ops_fd, result_w, mntns_fd, userns_fd}, image, &pid, &pidfd);
	if (err == 0) {
		vj_close(&result_w);
		err = collect(result_r, answer, room, &got, deadline);
		if (err)
			vj_pidfd_kill(pidfd, SIGKILL);
		if (vj_child_wait(pidfd, 1000, &status) == -ETIMEDOUT) {
			/* it answered and does not end, or hangs in the kernel: never waited for here */
			vj_pidfd_kill(pidfd, SIGKILL);
			reap_late(pidfd);
			pidfd = -1;
		}
		if (err == 0)
			err = decode(answer, got, results, capacity, count);
	}
	free(answer);
	return err;
}
