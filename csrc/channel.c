/* channel.c — see channel.h for the contract. */
#define _GNU_SOURCE
#include "channel.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define FIRST_BUFFER (16u * 1024)
#define KEEP_BUFFER (256u * 1024)  /* larger buffers are freed after the call */
#define STREAM_WINDOW (256u * 1024) /* VJ_STREAM: read at most this much ahead of the caller */
#define PIPE_LARGE (1024 * 1024)
#define LARGE_PIPES_MAX 16 /* the kernel counts pipe pages per user; see pipe(7), pipe-user-pages-soft */
#define SPIN_NS 50000

static int null_fd = -1;
static pthread_once_t null_once = PTHREAD_ONCE_INIT;
static int large_pipes; /* how many pipes are raised now, all calls together */

static void open_null(void)
{
	null_fd = open("/dev/null", O_RDWR | O_CLOEXEC);
}

static int64_t now_ns(void)
{
	struct timespec ts;
	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (int64_t)ts.tv_sec * 1000000000 + ts.tv_nsec;
}

static void close_fd(int *fd)
{
	if (*fd >= 0)
		close(*fd);
	*fd = -1;
}

void vj_call_init(struct vj_call *c, int lane)
{
	memset(c, 0, sizeof *c);
	c->lane = lane;
	c->epoll = c->stdin_end = c->reply_fd = -1;
	c->read_end[0] = c->read_end[1] = c->write_end[0] = c->write_end[1] = -1;
	c->patience_ms = 2;
}

/* Close what belongs to one command and keep what the next call on this lane can use. */
static void end_call(struct vj_call *c)
{
	for (int i = 0; i < 2; i++) {
		close_fd(&c->read_end[i]);
		close_fd(&c->write_end[i]);
	}
	close_fd(&c->stdin_end);
	free(c->input);
	c->input = NULL;
	c->input_len = c->input_at = 0;
	c->busy = 0;
}

void vj_call_clear(struct vj_call *c)
{
	end_call(c);
	close_fd(&c->epoll);
	close_fd(&c->reply_fd);
	free(c->reply);
	free(c->out[0].data);
	free(c->out[1].data);
	vj_call_init(c, -1);
}

static void reset_streams(struct vj_call *c)
{
	for (int i = 0; i < 2; i++) {
		struct vj_stream *s = &c->out[i];
		if (s->size > KEEP_BUFFER) {
			free(s->data);
			s->data = NULL;
			s->size = 0;
		}
		s->len = s->next = 0;
		s->dropped = 0;
	}
}

/* ---- sending ---- */

static int send_message(int lane, const uint8_t *data, size_t len, const int *fds, size_t nfds)
{
	union {
		char space[CMSG_SPACE(sizeof(int) * VJ_FDS_MAX)];
		struct cmsghdr align;
	} control;
	struct iovec iov = { .iov_base = (void *)(uintptr_t)data, .iov_len = len };
	struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1 };

	if (nfds > VJ_FDS_MAX)
		return -EINVAL;
	if (nfds) {
		memset(&control, 0, sizeof control);
		msg.msg_control = control.space;
		msg.msg_controllen = CMSG_SPACE(sizeof(int) * nfds);
		struct cmsghdr *cmsg = CMSG_FIRSTHDR(&msg);
		cmsg->cmsg_level = SOL_SOCKET;
		cmsg->cmsg_type = SCM_RIGHTS;
		cmsg->cmsg_len = CMSG_LEN(sizeof(int) * nfds);
		memcpy(CMSG_DATA(cmsg), fds, sizeof(int) * nfds);
	}
	for (;;) {
		/* A lane carries one request at a time: a full buffer means a worker that has stopped reading. */
		if (sendmsg(lane, &msg, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0)
			return 0;
		if (errno != EINTR)
			return errno == ECONNRESET || errno == ENOTCONN ? -EPIPE : -errno;
	}
}

static int make_output(struct vj_call *c, int which, int64_t uid, int64_t gid)
{
	int ends[2];
	if (pipe2(ends, O_CLOEXEC) < 0)
		return -errno;
	c->read_end[which] = ends[0];
	c->write_end[which] = ends[1];
	if (fcntl(ends[0], F_SETFL, O_NONBLOCK) < 0)
		return -errno;
	if (uid >= 0 && fchown(ends[1], (uid_t)uid, (gid_t)gid) < 0)
		return -errno;
	return 0;
}

static int make_input(struct vj_call *c, int *command_end, int64_t uid, int64_t gid)
{
	int ends[2];
	if (pipe2(ends, O_CLOEXEC) < 0)
		return -errno;
	*command_end = ends[0];
	c->stdin_end = ends[1];
	if (fcntl(ends[1], F_SETFL, O_NONBLOCK) < 0)
		return -errno;
	if (uid >= 0 && fchown(ends[0], (uid_t)uid, (gid_t)gid) < 0)
		return -errno;
	return 0;
}

int vj_exec(struct vj_call *c, const uint8_t *request, size_t len, const int given[4], unsigned flags, size_t cap,
            int64_t owner_uid, int64_t owner_gid)
{
	int fds[4], command_stdin = -1, rc = 0;
	size_t n = 3;

	if (c->busy)
		return -EBUSY;
	pthread_once(&null_once, open_null);
	reset_streams(c);
	c->flags = flags;
	c->cap = cap < 2 ? 2 : cap;
	c->stdin_last = 0;
	c->reply_len = 0;
	c->plain = 0;
	memcpy(fds, given, sizeof fds);

	if (flags & VJ_FEED) {
		rc = make_input(c, &command_stdin, owner_uid, owner_gid);
		fds[0] = command_stdin;
	}
	if (!rc && (flags & VJ_CAPTURE_OUT)) {
		rc = make_output(c, 0, owner_uid, owner_gid);
		fds[1] = c->write_end[0];
	}
	if (!rc && (flags & VJ_CAPTURE_ERR)) {
		rc = make_output(c, 1, owner_uid, owner_gid);
		fds[2] = c->write_end[1];
	}
	if (flags & VJ_MERGE)
		fds[2] = fds[1];
	for (int i = 0; i < 3; i++)
		if (fds[i] < 0)
			fds[i] = null_fd;
	if (fds[3] >= 0)
		n = 4;
	if (!rc)
		rc = send_message(c->lane, request, len, fds, n);
	close_fd(&command_stdin);
	if (rc) {
		end_call(c);
		return rc;
	}
	c->busy = 1;
	return 0;
}

int vj_post(struct vj_call *c, const uint8_t *request, size_t len, const int *fds, size_t nfds)
{
	if (c->busy)
		return -EBUSY;
	reset_streams(c);
	c->flags = 0;
	c->reply_len = 0;
	c->plain = 0;
	int rc = send_message(c->lane, request, len, fds, nfds);
	if (rc == 0)
		c->busy = 1;
	return rc;
}

/* ---- receiving ---- */

/* The worker is not trusted: a truncated message or one with more than one descriptor ends the channel (−EPROTO), and
 * every descriptor that came is closed. */
static int take_descriptors(struct msghdr *msg, int *fd)
{
	int seen = 0;
	for (struct cmsghdr *cmsg = CMSG_FIRSTHDR(msg); cmsg; cmsg = CMSG_NXTHDR(msg, cmsg)) {
		if (cmsg->cmsg_level != SOL_SOCKET || cmsg->cmsg_type != SCM_RIGHTS)
			continue;
		size_t n = (cmsg->cmsg_len - CMSG_LEN(0)) / sizeof(int);
		for (size_t i = 0; i < n; i++) {
			int got;
			memcpy(&got, CMSG_DATA(cmsg) + i * sizeof(int), sizeof got);
			if (seen++ == 0)
				*fd = got;
			else
				close(got);
		}
	}
	if (seen > 1 || (msg->msg_flags & (MSG_CTRUNC | MSG_TRUNC))) {
		close_fd(fd);
		return -EPROTO;
	}
	return 0;
}

static int receive_reply(struct vj_call *c)
{
	union {
		char space[CMSG_SPACE(sizeof(int) * 2)];
		struct cmsghdr align;
	} control;
	if (!c->reply && !(c->reply = malloc(VJ_REPLY_MAX)))
		return -ENOMEM;
	struct iovec iov = { .iov_base = c->reply, .iov_len = VJ_REPLY_MAX };
	struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.space,
	                      .msg_controllen = sizeof control.space };

	close_fd(&c->reply_fd);
	ssize_t n = recvmsg(c->lane, &msg, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
	if (n < 0) {
		if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)
			return VJ_PENDING;
		return errno == ECONNRESET ? -EPIPE : -errno;
	}
	int rc = take_descriptors(&msg, &c->reply_fd);
	if (rc)
		return rc;
	if (n == 0) /* a SEQPACKET peer that closed */
		return -EPIPE;
	c->reply_len = (size_t)n;
	return VJ_DONE;
}

static void raise_pipe(int fd)
{
	if (__atomic_load_n(&large_pipes, __ATOMIC_RELAXED) >= LARGE_PIPES_MAX)
		return;
	__atomic_fetch_add(&large_pipes, 1, __ATOMIC_RELAXED);
	if (fcntl(fd, F_SETPIPE_SZ, PIPE_LARGE) < 0)
		__atomic_fetch_sub(&large_pipes, 1, __ATOMIC_RELAXED);
}

static void lower_count(int fd)
{
	if (fcntl(fd, F_GETPIPE_SZ) >= PIPE_LARGE)
		__atomic_fetch_sub(&large_pipes, 1, __ATOMIC_RELAXED);
}

/* Room for the next read: the end of the buffer while it may grow, then the ring behind the head. */
static uint8_t *room(struct vj_stream *s, size_t cap, size_t *space)
{
	if (s->len < cap) {
		if (s->len == s->size) {
			size_t size = s->size ? s->size * 2 : FIRST_BUFFER;
			if (size > cap)
				size = cap;
			uint8_t *data = realloc(s->data, size);
			if (!data)
				return NULL;
			s->data = data;
			s->size = size;
		}
		*space = (s->size < cap ? s->size : cap) - s->len;
		return s->data + s->len;
	}
	size_t head = cap / 2;
	if (s->next < head || s->next >= cap)
		s->next = head;
	*space = cap - s->next;
	return s->data + s->next;
}

static void account(struct vj_stream *s, size_t cap, size_t n)
{
	if (s->len < cap) {
		s->len += n;
		return;
	}
	s->next += n;
	s->dropped += n;
}

/* Read what is there. 1: something came, 0: nothing now, −errno. End-of-file closes our end. */
static int drain(struct vj_call *c, int which)
{
	struct vj_stream *s = &c->out[which];
	int got = 0;
	while (c->read_end[which] >= 0) {
		size_t space;
		if ((c->flags & VJ_STREAM) && s->len >= STREAM_WINDOW)
			return 1;
		uint8_t *at = room(s, c->flags & VJ_STREAM ? STREAM_WINDOW : c->cap, &space);
		if (!at)
			return -ENOMEM;
		ssize_t n = read(c->read_end[which], at, space);
		if (n > 0) {
			account(s, c->flags & VJ_STREAM ? STREAM_WINDOW : c->cap, (size_t)n);
			got = 1;
			if ((size_t)n < space)
				return 1;
			if (s->size == KEEP_BUFFER) /* it came faster than we read: a larger pipe saves switches */
				raise_pipe(c->read_end[which]);
			continue;
		}
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0 && errno == EAGAIN)
			return got;
		if (n < 0)
			return -errno;
		lower_count(c->read_end[which]);
		close_fd(&c->read_end[which]);
	}
	return got;
}

/* ---- stdin ---- */

static int write_input(struct vj_call *c)
{
	sigset_t pipe_set, old, pending;
	const struct timespec zero = { 0, 0 };
	int rc = 0;

	/* The command may have closed its stdin; the embedding program may not ignore SIGPIPE. */
	sigemptyset(&pipe_set);
	sigaddset(&pipe_set, SIGPIPE);
	sigpending(&pending);
	pthread_sigmask(SIG_BLOCK, &pipe_set, &old);
	while (c->input_at < c->input_len) {
		ssize_t n = write(c->stdin_end, c->input + c->input_at, c->input_len - c->input_at);
		if (n > 0) {
			c->input_at += (size_t)n;
			continue;
		}
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0 && errno == EAGAIN)
			break;
		if (n < 0 && errno == EPIPE) {
			if (!sigismember(&pending, SIGPIPE))
				sigtimedwait(&pipe_set, NULL, &zero);
			c->stdin_last = 1; /* nobody reads any more: what is left has no addressee */
			c->input_at = c->input_len;
			break;
		}
		rc = n < 0 ? -errno : -EIO;
		break;
	}
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	if (!rc && c->input_at == c->input_len && c->stdin_last)
		close_fd(&c->stdin_end);
	return rc;
}

int vj_call_feed(struct vj_call *c, const uint8_t *data, size_t len, int last)
{
	if (c->stdin_end < 0)
		return -EPIPE;
	if (c->input_at < c->input_len)
		return -EBUSY;
	free(c->input);
	c->input = NULL;
	c->input_len = c->input_at = 0;
	if (len) {
		c->input = malloc(len);
		if (!c->input)
			return -ENOMEM;
		memcpy(c->input, data, len);
		c->input_len = len;
	}
	if (last)
		c->stdin_last = 1;
	return write_input(c);
}

/* ---- waiting ---- */

static int collect_rest(struct vj_call *c)
{
	/* Every process of the command is gone: what it wrote is in the pipes. A process that was meant to stay may
	 * hold them open, so the end of the data is EAGAIN as well as end-of-file. */
	for (int i = 0; i < 2; i++) {
		close_fd(&c->write_end[i]);
		for (;;) {
			int rc = drain(c, i);
			if (rc < 0)
				return rc;
			if (rc == 0 || (c->flags & VJ_STREAM))
				break;
		}
		if (c->read_end[i] >= 0 && (c->flags & VJ_STREAM) && c->out[i].len >= STREAM_WINDOW)
			return VJ_DATA;
	}
	return VJ_DONE;
}

static int advance(struct vj_call *c, int look_at_pipes)
{
	if (c->reply_len == 0) {
		int rc = receive_reply(c);
		if (rc < 0)
			return rc;
	}
	if (c->reply_len) {
		int rc = collect_rest(c);
		if (rc != VJ_DATA)
			end_call(c);
		if (rc == VJ_DONE && (c->flags & (VJ_CAPTURE_OUT | VJ_CAPTURE_ERR)))
			c->plain = vj_plain_read(c->reply, c->reply_len, c->numbers);
		return rc;
	}
	if (c->stdin_end >= 0) {
		int rc = write_input(c);
		if (rc < 0)
			return rc;
		if (c->stdin_end >= 0 && c->input_at == c->input_len)
			return VJ_NEED_INPUT;
	}
	if (look_at_pipes) {
		for (int i = 0; i < 2; i++) {
			int rc = drain(c, i);
			if (rc < 0)
				return rc;
		}
		if ((c->flags & VJ_STREAM) && (c->out[0].len || c->out[1].len))
			return VJ_DATA;
	}
	return VJ_PENDING;
}

int vj_call_step(struct vj_call *c)
{
	return advance(c, 1);
}

int vj_call_wait(struct vj_call *c, int64_t timeout_ms)
{
	const int64_t deadline = timeout_ms < 0 ? INT64_MAX : now_ns() + timeout_ms * 1000000;
	/* Most commands write little and end soon: waiting for the reply alone wakes us once instead of once a write.
	 * A pipe holds 64 KiB meanwhile. */
	int alone = !(c->flags & (VJ_STREAM | VJ_FEED));

	for (;;) {
		struct pollfd set[4] = { { .fd = c->lane, .events = POLLIN } };
		nfds_t n = 1;
		int64_t left = deadline == INT64_MAX ? -1 : (deadline - now_ns() + 999999) / 1000000;
		if (deadline != INT64_MAX && left <= 0)
			left = 0;
		int64_t pause = left;
		if (alone) {
			if (left < 0 || left > c->patience_ms)
				pause = c->patience_ms;
		} else {
			for (int i = 0; i < 2; i++)
				if (c->read_end[i] >= 0)
					set[n++] = (struct pollfd){ .fd = c->read_end[i], .events = POLLIN };
			if (c->stdin_end >= 0)
				set[n++] = (struct pollfd){ .fd = c->stdin_end, .events = POLLOUT };
		}
		int ready = poll(set, n, pause > 3600000 ? 3600000 : (int)pause);
		if (ready < 0)
			return errno == EINTR ? -EINTR : -errno;
		if (ready == 0 && !alone && left == 0)
			return VJ_PENDING;
		int rc = advance(c, !alone || ready == 0);
		if (rc != VJ_PENDING)
			return rc;
		if (ready == 0 && left == 0)
			return VJ_PENDING;
		if (ready == 0)
			alone = 0;
	}
}

int vj_run(struct vj_call *c, const uint8_t *request, size_t len, const int fds[4], unsigned flags, size_t cap,
           int64_t owner_uid, int64_t owner_gid, int64_t timeout_ms)
{
	int rc = vj_exec(c, request, len, fds, flags, cap, owner_uid, owner_gid);
	return rc ? rc : vj_call_wait(c, timeout_ms);
}

int vj_call_pollfd(struct vj_call *c)
{
	struct epoll_event ev = { .events = EPOLLIN };
	if (c->epoll < 0) {
		c->epoll = epoll_create1(EPOLL_CLOEXEC);
		if (c->epoll < 0)
			return -errno;
		if (epoll_ctl(c->epoll, EPOLL_CTL_ADD, c->lane, &ev) < 0)
			return -errno;
	}
	/* Closing a pipe takes it off the set, so only new descriptors are added here. */
	for (int i = 0; i < 2; i++)
		if (c->read_end[i] >= 0 && epoll_ctl(c->epoll, EPOLL_CTL_ADD, c->read_end[i], &ev) < 0 && errno != EEXIST)
			return -errno;
	ev.events = EPOLLOUT;
	if (c->stdin_end >= 0 && epoll_ctl(c->epoll, EPOLL_CTL_ADD, c->stdin_end, &ev) < 0 && errno != EEXIST)
		return -errno;
	return c->epoll;
}

void vj_call_drop(struct vj_call *c, int which)
{
	c->out[which].len = c->out[which].next = 0;
	c->out[which].dropped = 0;
}

static int several_cpus(void)
{
	static _Thread_local int known, age;
	if (age-- <= 0) {
		cpu_set_t set;
		known = sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 1;
		age = 64;
	}
	return known;
}

int vj_request(struct vj_call *c, const uint8_t *request, size_t len, const int *fds, size_t nfds, int64_t timeout_ms)
{
	int rc = vj_post(c, request, len, fds, nfds);
	if (rc)
		return rc;
	/* A wake-up across CPUs costs more than a small request: look for the answer a moment before sleeping. */
	if (several_cpus()) {
		const int64_t end = now_ns() + SPIN_NS;
		do {
			rc = receive_reply(c);
		} while (rc == VJ_PENDING && now_ns() < end);
		if (rc == VJ_DONE)
			c->busy = 0;
		if (rc)
			return rc;
	}
	return vj_call_wait(c, timeout_ms);
}
