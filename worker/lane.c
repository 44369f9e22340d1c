/* lane.c — the sockets that requests come from and replies go to. One SEQPACKET message is one request or reply. */
#include "worker.h"

#include "rawsys.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

static struct lane lanes[VJ_LANES_MAX];
static uint16_t free_lanes[VJ_LANES_MAX];
static int nfree, ntouched;
static struct slab *spare; /* where the next message goes */

struct lane_ref lane_ref(const struct lane *l)
{
	return (struct lane_ref){(uint16_t)(l - lanes), l->gen};
}

struct lane *lane_get(struct lane_ref ref)
{
	struct lane *l = &lanes[ref.index];
	return l->open && l->gen == ref.gen ? l : NULL;
}

int lane_open(int fd, enum lane_kind kind, bool main, struct lane **out)
{
	int i, e;

	if (nfree)
		i = free_lanes[nfree - 1];
	else if (ntouched < VJ_LANES_MAX)
		i = ntouched;
	else
		return -EMFILE;
	struct lane *l = &lanes[i];
	if ((e = source_add(&l->src, SRC_LANE, fd, POLLIN, l)) < 0)
		return e;
	if (nfree)
		nfree--;
	else
		ntouched++;
	l->kind = kind;
	l->main = main;
	l->open = true;
	l->gen++;
	l->credit = 0;
	*out = l;
	return 0;
}

void lane_drop(struct lane *l)
{
	if (!l->open)
		return;
	if (l->main)
		worker_exit(0);
	l->open = false;
	/* A half-born command may hold a copy of the socket for a moment longer. */
	raw2(SYS_shutdown, l->src.fd, SHUT_RDWR);
	source_close(&l->src);
	job_cancel_lane(lane_ref(l));
	forward_drop(lane_ref(l));
	free_lanes[nfree++] = (uint16_t)(l - lanes);
}

void lane_send(struct lane *l, const struct mp_writer *w, int fd)
{
	struct iovec iov = {w->buf, w->len};
	union {
		struct cmsghdr align;
		char buf[CMSG_SPACE(sizeof(int))];
	} control = {0};
	struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};

	if (w->overflow) {
		lane_drop(l);
		return;
	}
	if (l->kind != LANE_PACKET) {
		stream_send(l, w);
		return;
	}
	if (fd >= 0) {
		msg.msg_control = control.buf;
		msg.msg_controllen = sizeof control.buf;
		struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
		c->cmsg_level = SOL_SOCKET;
		c->cmsg_type = SCM_RIGHTS;
		c->cmsg_len = CMSG_LEN(sizeof(int));
		memcpy(CMSG_DATA(c), &fd, sizeof fd);
	}
	if (raw3(SYS_sendmsg, l->src.fd, &msg, MSG_DONTWAIT | MSG_NOSIGNAL) < 0)
		lane_drop(l);
}

/* The descriptors of a message. Returns 0, or -EMFILE when some were lost: then none is kept. */
static int take_fds(struct msghdr *msg, int *fds, int *nfds)
{
	/* All descriptors of a message come in one control message, and nobody asked for any other kind. */
	const struct cmsghdr *c = CMSG_FIRSTHDR(msg);
	if (c && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS) {
		size_t n = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
		for (size_t i = 0; i < n; i++) {
			int fd;
			memcpy(&fd, CMSG_DATA(c) + i * sizeof fd, sizeof fd);
			if (*nfds < VJ_FDS_MAX)
				fds[(*nfds)++] = fd;
			else
				raw1(SYS_close, fd);
		}
	}
	if (!(msg->msg_flags & MSG_CTRUNC))
		return 0;
	close_fds(fds, *nfds);
	*nfds = 0;
	return -EMFILE;
}

struct slab *lane_take_spare(void)
{
	struct slab *s = spare ? spare : slab_get();
	spare = NULL;
	return s;
}

void lane_give_spare(struct slab *s)
{
	spare = s;
}

void lane_ready(struct lane *l, short revents)
{
	union {
		struct cmsghdr align;
		char buf[CMSG_SPACE(VJ_FDS_MAX * sizeof(int))];
	} control;

	if (l->kind != LANE_PACKET) {
		stream_ready(l, revents);
		return;
	}
	struct message m = {.slab = lane_take_spare()};
	if (!m.slab)
		return; /* no memory: the message waits in the socket */
	m.buf = m.slab->message;
	struct iovec iov = {m.buf, VJ_MESSAGE_MAX};
	struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.buf,
			     .msg_controllen = sizeof control.buf};
	long n = raw3(SYS_recvmsg, l->src.fd, &msg, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
	if (n <= 0) {
		lane_give_spare(m.slab);
		if (n != -EAGAIN && n != -EINTR)
			lane_drop(l);
		return;
	}
	m.len = m.slab->used = (uint32_t)n;
	int e = take_fds(&msg, m.fds, &m.nfds);
	if (msg.msg_flags & MSG_TRUNC)
		e = -EMSGSIZE;
	lease_renew();
	if (e)
		reply_error(l, NULL, e);
	else
		dispatch(l, &m);
	if (m.nfds)
		close_fds(m.fds, m.nfds);
	lane_give_spare(m.slab);
}
