/* dispatch.c — one request in, one reply out: which function answers which op. */
#include "worker.h"

#include "rawsys.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

static void begin(struct mp_writer *w, uint8_t *buf, size_t cap, const struct request *q, uint32_t pairs)
{
	mp_writer_init(w, buf, cap);
	mp_write_map(w, 1 + pairs);
	mp_write_str(w, "id");
	if (q && q->has_id)
		mp_write_int(w, q->id);
	else
		mp_write_nil(w);
}

void reply_empty(struct lane *l, const struct request *q)
{
	uint8_t buf[64];
	struct mp_writer w;
	begin(&w, buf, sizeof buf, q, 0);
	lane_send(l, &w, -1);
}

void reply_error(struct lane *l, const struct request *q, int err)
{
	uint8_t buf[256];
	struct mp_writer w;
	char text[128] = "the worker could not do it";

	strncpy(text, strerror(-err), sizeof text - 1);
	begin(&w, buf, sizeof buf, q, 2);
	mp_write_str(&w, "error");
	mp_write_str(&w, text);
	mp_write_str(&w, "errno");
	mp_write_int(&w, -err);
	lane_send(l, &w, -1);
}

/* ---- bodies ---- */

/* The map that came in a memfd: read, never mapped, into memory whose size does not depend on what was sent. */
static int load_body(struct slab *s, int fd, size_t *len)
{
	struct stat st;

	if (fstat(fd, &st) < 0)
		return -errno;
	if (!S_ISREG(st.st_mode) || st.st_size <= 0)
		return -EINVAL;
	if (st.st_size > VJ_FRAME_MAX)
		return -EMSGSIZE;
	if (!slab_body(s))
		return -ENOMEM;
	for (*len = 0; *len < (size_t)st.st_size;) {
		ssize_t n = pread(fd, s->body + *len, (size_t)st.st_size - *len, (off_t)*len);
		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return n < 0 ? -errno : -EBADMSG;
		*len += (size_t)n;
	}
	return 0;
}

static char **body_pointers(struct slab *s)
{
	return (char **)(void *)(s->body + VJ_FRAME_MAX + 4096);
}

static int parse(struct request *q, struct message *m)
{
	bool in_body = m->buf == m->slab->body; /* a long frame of a stream */
	int e = in_body ? request_parse(q, m->buf, m->len, body_pointers(m->slab), BODY_POINTERS)
			: request_parse(q, m->buf, m->len, m->slab->pointers, SLAB_POINTERS);
	/* A body beside a path is a file's content, which stays in its descriptor. */
	if (e || !q->body || q->has_path || in_body)
		return e;
	if (!m->nfds)
		return -EBADF;
	int fd = m->fds[--m->nfds];
	e = load_body(m->slab, fd, &m->len);
	close(fd);
	if (e)
		return e;
	m->buf = m->slab->body;
	return request_parse(q, m->buf, m->len, body_pointers(m->slab), BODY_POINTERS);
}

/* ---- commands ---- */

static int start(struct lane *l, struct message *m, const struct request *q, enum job_kind kind)
{
	struct job *j;
	struct chan *chan = NULL;
	struct slab *next = slab_get(); /* first: without it the next message has no place */
	int e, master = -1, slave = -1, pts = -1;

	if (!next)
		return -ENOMEM;
	/* A caller with descriptors that wants little output may leave them out and take it from the reply. */
	const bool own = l->kind != LANE_PACKET || (kind == JOB_EXEC && !m->nfds && q->cap);
	e = m->nfds && (kind == JOB_TERMINAL || own) ? -EBADF : 0;
	if (!e && kind == JOB_TERMINAL)
		e = terminal_open((unsigned)q->rows, (unsigned)q->cols, &master, &slave, &pts);
	if (!e && own) {
		e = kind == JOB_TERMINAL ? chan_terminal(l, q, master, &chan)
					 : chan_open(l, q, kind, m->fds, &chan);
		if (e)
			chan = NULL;
		else if (kind == JOB_TERMINAL)
			master = -1;
		else
			m->nfds = 3;
	}
	if (e)
		goto out;
	e = job_start(l, m->slab, q, kind, m->fds, m->nfds, slave, &j);
	if (e)
		goto out;
	if (slave >= 0)
		close(slave);
	if (chan)
		chan_attach(chan, j);
	j->master = master;
	j->pts = pts;
	m->slab = next;
	m->nfds = 0;
	return 0;
out:
	chan_close(chan);
	if (slave >= 0)
		close(slave);
	if (master >= 0)
		close(master);
	slab_put(next);
	return e;
}

static int add_lane(struct message *m)
{
	int type = 0;
	socklen_t len = sizeof type;

	if (m->nfds != 1)
		return -EBADF;
	if (getsockopt(m->fds[0], SOL_SOCKET, SO_TYPE, &type, &len) < 0)
		return -errno;
	if (type != SOCK_SEQPACKET)
		return -EINVAL;
	struct lane *l;
	int e = lane_open(m->fds[0], LANE_PACKET, false, &l);
	if (!e)
		m->nfds = 0;
	return e;
}

static void list(struct lane *l, const struct request *q)
{
	static uint8_t buf[VJ_MESSAGE_MAX];
	struct mp_writer w;
	begin(&w, buf, sizeof buf, q, 1);
	mp_write_str(&w, "jobs");
	job_list(&w, now_ns());
	lane_send(l, &w, -1);
}

/* Ops that name another call. */
static int on_target(struct lane *l, const struct request *q)
{
	struct job *j = q->has_target ? job_find(q->target) : NULL;
	int e = j ? 0 : -ESRCH;

	if (j && mp_is(q->op, "kill")) {
		j->cancelled = true;
		job_kill(j);
	} else if (j && mp_is(q->op, "signal"))
		e = job_signal(j, (int)(q->signo & 0xff), q->tree);
	else if (j)
		e = terminal_resize(j, (unsigned)q->rows, (unsigned)q->cols);
	if (!e)
		reply_empty(l, q);
	return e;
}

/* Input for a call and acknowledgement of its output; both are answered only when they fail. */
static int on_stream(struct lane *l, const struct request *q)
{
	struct job *j = job_find(q->id);
	if (mp_is(q->op, "credit") && q->n) {
		egress_credit(l, q->n);
		return 0;
	}
	if (!j || !j->chan)
		return 0; /* it ended meanwhile */
	if (!mp_is(q->op, "credit"))
		return chan_input(j->chan, q->data, q->last);
	chan_credit(j->chan, q->fd, q->bytes);
	return 0;
}

static int answer(struct lane *l, struct message *m, const struct request *q)
{
	struct job *j;

	if (mp_is(q->op, "exec"))
		return start(l, m, q, JOB_EXEC);
	if (mp_is(q->op, "ping")) {
		reply_empty(l, q);
		return 0;
	}
	if (mp_is(q->op, "cancel")) {
		if ((j = job_find(q->id))) {
			j->cancelled = true;
			job_kill(j);
		}
		return 0; /* the call itself answers */
	}
	if (mp_is(q->op, "spawn"))
		return start(l, m, q, JOB_SPAWN);
	if (mp_is(q->op, "terminal"))
		return start(l, m, q, JOB_TERMINAL);
	if (mp_is(q->op, "signal") || mp_is(q->op, "kill") || mp_is(q->op, "resize"))
		return on_target(l, q);
	if (mp_is(q->op, "lane")) {
		int e = add_lane(m);
		if (!e)
			reply_empty(l, q);
		return e;
	}
	if (mp_is(q->op, "stdin") || mp_is(q->op, "data") || mp_is(q->op, "credit"))
		return on_stream(l, q);
	if (mp_is(q->op, "list")) {
		list(l, q);
		return 0;
	}
	if (mp_is(q->op, "egress"))
		return egress_open(l, q);
	if (mp_is(q->op, "connect"))
		return connect_open(l, q);
	return helper_call(l, m); /* which knows the file calls, and says ENOSYS to anything else */
}

void dispatch(struct lane *l, struct message *m)
{
	struct request q;
	int e = parse(&q, m);

	if (!e && !q.has_id)
		e = -EBADMSG;
	if (!e && mp_is(q.op, "hello")) {
		hello(l, &q, m);
		return;
	}
	if (!e && !worker.confined && l->kind != LANE_JSON)
		e = -EPROTO;
	if (!e)
		e = answer(l, m, &q);
	if (e)
		reply_error(l, &q, e);
}
