/* chan.c — the pipes of a command whose caller sits at the far end of a byte stream.
 *
 * Output becomes events {id, event:"output", fd, seq, data}, at most `credit` bytes ahead of the host's
 * acknowledgement, or is collected for the reply (head and tail, the middle counted). Input comes by `stdin` requests.
 */
#include "worker.h"

#include "compat.h"
#include "rawsys.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define WINDOW (1024u * 1024)           /* bytes one side may be ahead of the other */
#define PACKET_CAP (24u * 1024)         /* what two streams may put into one message */
#define CHUNK (64u * 1024)              /* one output event */

struct chan {
	bool used, collect, terminal, in_last;
	struct job *job;
	struct source out[2], in; /* out[1] unused for a terminal and for merged streams */
	uint64_t credit[2], seq[2];
	struct kept kept;
	uint8_t *in_buf; /* WINDOW */
	size_t in_at, in_len;
};

static struct chan chans[VJ_JOBS_MAX];
static int nchans; /* entries ever used */

static void close_both(const int *fds)
{
	for (int i = 0; i < 2; i++)
		if (fds[i] >= 0)
			close(fds[i]);
}

static int nonblocking(int fd)
{
	int flags = fcntl(fd, F_GETFL);
	return flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0 ? -errno : 0;
}

static void release(struct chan *c)
{
	source_close(&c->out[0]);
	source_close(&c->out[1]);
	source_close(&c->in);
	kept_close(&c->kept);
	if (c->in_buf)
		munmap(c->in_buf, WINDOW);
	c->used = false;
}

static struct chan *chan_new(const struct lane *l, const struct request *q)
{
	struct chan *c = NULL;
	for (int i = 0; i < nchans && !c; i++)
		if (!chans[i].used)
			c = &chans[i];
	if (!c && nchans < VJ_JOBS_MAX)
		c = &chans[nchans++];
	if (!c)
		return NULL;
	memset(c, 0, sizeof *c);
	c->used = true;
	c->out[0].slot = c->out[1].slot = c->in.slot = c->out[0].fd = c->out[1].fd = c->in.fd = -1;
	c->collect = l->kind == LANE_JSON || q->cap;
	c->credit[0] = c->credit[1] = q->n ? q->n : l->kind == LANE_JSON ? UINT64_MAX / 2 : WINDOW;
	return c;
}

/* The three descriptors of the command and our ends of them. */
static int make_pipes(struct chan *c, const struct lane *l, const struct request *q, enum job_kind kind, int *fds)
{
	int in[2] = {-1, -1}, out[2] = {-1, -1}, err[2] = {-1, -1}, e = 0;

	c->collect = c->collect && kind == JOB_EXEC;
	if (q->want_stdin ? pipe2(in, O_CLOEXEC) < 0 : (in[0] = fcntl(worker.null_fd, F_DUPFD_CLOEXEC, 4)) < 0)
		return -errno;
	if (pipe2(out, O_CLOEXEC) < 0 || (!q->merge && pipe2(err, O_CLOEXEC) < 0) ||
	    (q->merge && (err[1] = fcntl(out[1], F_DUPFD_CLOEXEC, 4)) < 0))
		e = -errno;
	if (!e && c->collect)
		e = kept_open(&c->kept, q->merge ? 1 : 2,
			      l->kind == LANE_PACKET && q->cap > PACKET_CAP ? PACKET_CAP : q->cap);
	if (!e)
		e = nonblocking(out[0]);
	if (!e && !q->merge)
		e = nonblocking(err[0]);
	if (!e && q->want_stdin)
		e = nonblocking(in[1]);
	if (!e && !(e = source_add(&c->out[0], SRC_CHAN, out[0], POLLIN, c)))
		out[0] = -1;
	if (!e && !q->merge && !(e = source_add(&c->out[1], SRC_CHAN, err[0], POLLIN, c)))
		err[0] = -1;
	if (!e && q->want_stdin && !(e = source_add(&c->in, SRC_CHAN, in[1], 0, c)))
		in[1] = -1;
	if (e) {
		close_both(in);
		close_both(out);
		close_both(err);
		return e;
	}
	fds[0] = in[0];
	fds[1] = out[1];
	fds[2] = err[1];
	return 0;
}

int chan_open(struct lane *l, const struct request *q, enum job_kind kind, int *fds, struct chan **out)
{
	struct chan *c = chan_new(l, q);
	if (!c)
		return -EAGAIN;
	int e = make_pipes(c, l, q, kind, fds);
	if (e)
		release(c);
	*out = c;
	return e;
}

int chan_terminal(struct lane *l, const struct request *q, int master, struct chan **out)
{
	struct chan *c = chan_new(l, q);
	if (!c)
		return -EAGAIN;
	int copy = fcntl(master, F_DUPFD_CLOEXEC, 4), e = copy < 0 ? -errno : nonblocking(master);
	c->terminal = true;
	c->collect = false;
	if (!e)
		e = source_add(&c->in, SRC_CHAN, copy, 0, c);
	if (e && copy >= 0)
		close(copy);
	if (!e)
		e = source_add(&c->out[0], SRC_CHAN, master, POLLIN, c);
	if (e)
		release(c);
	*out = c;
	return e;
}

void chan_attach(struct chan *c, struct job *j)
{
	c->job = j;
	j->chan = c;
}

void chan_close(struct chan *c)
{
	if (c)
		release(c);
}

/* ---- output ---- */

static void send_output(struct chan *c, int i, const uint8_t *p, size_t n)
{
	static uint8_t buf[CHUNK + 256];
	struct mp_writer w;
	struct lane *l = lane_get(c->job->lane);

	mp_writer_init(&w, buf, sizeof buf);
	mp_write_map(&w, 5);
	mp_write_str(&w, "id");
	mp_write_int(&w, c->job->id);
	mp_write_str(&w, "event");
	mp_write_str(&w, "output");
	mp_write_str(&w, "fd");
	mp_write_int(&w, i + 1);
	mp_write_str(&w, "seq");
	mp_write_uint(&w, c->seq[i]++);
	mp_write_str(&w, "data");
	mp_write_bin(&w, p, n);
	if (l)
		lane_send(l, &w, -1);
}

/* Reads once. 1 = there may be more, 0 = nothing now (no data, no credit, no room), -1 = the end. */
static int pump(struct chan *c, int i)
{
	static uint8_t buf[CHUNK];
	size_t room = sizeof buf;

	if (c->out[i].fd < 0)
		return -1;
	if (!c->collect) {
		if (stream_congested() || !c->credit[i]) {
			source_remove(&c->out[i]); /* a hang-up would be told all the time */
			return 0;
		}
		if (room > c->credit[i])
			room = (size_t)c->credit[i];
	}
	ssize_t n = read(c->out[i].fd, buf, room);
	if (n < 0 && errno == EINTR)
		return 1;
	if (n < 0 && errno == EAGAIN)
		return 0;
	if (n <= 0) { /* EIO is how a terminal ends */
		source_close(&c->out[i]);
		return -1;
	}
	if (c->collect)
		kept_add(&c->kept, i, buf, (size_t)n);
	else {
		c->credit[i] -= (uint64_t)n;
		send_output(c, i, buf, (size_t)n);
	}
	return 1;
}

bool chan_finish(struct chan *c)
{
	bool done = true;
	source_close(&c->in);
	for (int i = 0; i < 2; i++) {
		int r;
		while ((r = pump(c, i)) > 0)
			continue;
		if (r < 0)
			continue;
		if (c->collect || (c->credit[i] && !stream_congested()))
			source_close(&c->out[i]); /* a kept process still holds the other end */
		else
			done = false;
	}
	return done;
}

static void resume_output(struct chan *c)
{
	for (int i = 0; i < 2; i++)
		if (c->out[i].fd >= 0 && c->out[i].slot < 0 && c->credit[i])
			source_add(&c->out[i], SRC_CHAN, c->out[i].fd, POLLIN, c);
	if (c->job && c->job->state == JOB_DRAINING)
		job_drained(c->job);
}

void chan_resume(void)
{
	for (int i = 0; i < nchans; i++)
		if (chans[i].used && !stream_congested())
			resume_output(&chans[i]);
}

void chan_discard(struct chan *c)
{
	source_close(&c->out[0]);
	source_close(&c->out[1]);
}

void chan_credit(struct chan *c, int64_t fd, uint64_t bytes)
{
	if (fd != 1 && fd != 2)
		return;
	c->credit[fd - 1] += bytes > WINDOW ? WINDOW : bytes;
	resume_output(c);
}

struct kept *chan_kept(struct chan *c)
{
	return c->collect ? &c->kept : NULL;
}

/* ---- input ---- */

static void send_credit(struct chan *c, uint64_t bytes)
{
	uint8_t buf[96];
	struct mp_writer w;
	struct lane *l = lane_get(c->job->lane);
	mp_writer_init(&w, buf, sizeof buf);
	mp_write_map(&w, 4);
	mp_write_str(&w, "id");
	mp_write_int(&w, c->job->id);
	mp_write_str(&w, "event");
	mp_write_str(&w, "credit");
	mp_write_str(&w, "fd");
	mp_write_int(&w, 0);
	mp_write_str(&w, "bytes");
	mp_write_uint(&w, bytes);
	if (l)
		lane_send(l, &w, -1);
}

static void feed(struct chan *c)
{
	uint64_t sent = 0;
	if (c->in.fd < 0) {
		sent = c->in_len;
		c->in_len = 0;
	}
	while (c->in_len && c->in.fd >= 0) {
		ssize_t n = write(c->in.fd, c->in_buf + c->in_at, c->in_len);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0 && errno != EAGAIN) { /* the command reads no more: what comes is thrown away */
			source_close(&c->in);
			sent += c->in_len;
			c->in_len = 0;
		}
		if (n <= 0)
			break;
		c->in_at += (size_t)n;
		c->in_len -= (size_t)n;
		sent += (uint64_t)n;
	}
	if (!c->in_len)
		c->in_at = 0;
	source_events(&c->in, c->in_len ? POLLOUT : 0);
	if (!c->in_len && c->in_last && !c->terminal)
		source_close(&c->in);
	if (sent)
		send_credit(c, sent);
}

int chan_input(struct chan *c, struct mp_bytes data, bool last)
{
	if (c->in_last)
		return -EPIPE;
	if (data.len > WINDOW - c->in_len)
		return -ENOBUFS; /* further ahead than the window */
	if (data.len && !c->in_buf) {
		void *p = mmap(NULL, WINDOW, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1,
			       0);
		if (p == MAP_FAILED)
			return -ENOMEM;
		c->in_buf = p;
	}
	if (data.len && c->in_at + c->in_len + data.len > WINDOW) {
		memmove(c->in_buf, c->in_buf + c->in_at, c->in_len);
		c->in_at = 0;
	}
	if (data.len)
		memcpy(c->in_buf + c->in_at + c->in_len, data.ptr, data.len);
	c->in_len += data.len;
	c->in_last = last;
	feed(c);
	return 0;
}

int chan_resize(struct chan *c, const void *winsize)
{
	return c->terminal && c->in.fd >= 0 ? (int)raw3(SYS_ioctl, c->in.fd, 0x5414 /* TIOCSWINSZ */, winsize) : -ENOTTY;
}

void chan_ready(struct source *s, short revents)
{
	struct chan *c = s->owner;
	if (s == &c->in) {
		if (revents & (POLLERR | POLLHUP) && !(revents & POLLOUT))
			source_close(s);
		else
			feed(c);
		return;
	}
	pump(c, s == &c->out[1]);
	if (c->job->state == JOB_DRAINING)
		job_drained(c->job);
}
