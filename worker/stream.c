/* stream.c — a lane without descriptors: frames (u32 big-endian length, then the map) or JSON lines on a byte stream.
 *
 * There is at most one, the main lane. What cannot be written at once waits in a buffer; above STREAM_CONGESTED the
 * worker takes no further requests and reads no further output, so that a slow host slows the commands down.
 */
#include "worker.h"

#include "json.h"
#include "rawsys.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define IN_SIZE (VJ_FRAME_MAX + 4096u)
#define OUT_SIZE (64u * 1024 * 1024) /* the largest reply as JSON, where one byte may take six */
#define STREAM_CONGESTED (1024u * 1024)
#define READ_MAX (64u * 1024)

static struct {
	struct source out;
	uint8_t *in_buf, *out_buf;
	size_t in_len, skip; /* bytes of a frame that is too long and is thrown away */
	size_t out_at, out_len, out_peak;
	bool json, overlong, eof, congested;
	struct lane_ref lane;
} st = {.out = {.slot = -1, .fd = -1}};

static uint8_t *map(size_t size)
{
	void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	return p == MAP_FAILED ? NULL : p;
}

bool stream_congested(void)
{
	return st.congested;
}

/* ---- out ---- */

static void set_congested(void)
{
	bool now = st.out_len > STREAM_CONGESTED;
	struct lane *l = lane_get(st.lane);
	if (now == st.congested)
		return;
	st.congested = now;
	/* Out of the poll set and not only without events: a hang-up is told in any case, again and again. */
	if (l && now)
		source_remove(&l->src);
	else if (l && !st.eof)
		source_add(&l->src, SRC_LANE, l->src.fd, POLLIN, l);
	if (!now)
		chan_resume();
}

static void stream_flush(void)
{
	while (st.out_len) {
		ssize_t n = write(st.out.fd, st.out_buf + st.out_at, st.out_len);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0 && errno != EAGAIN)
			worker_exit(0); /* nobody reads any more */
		if (n <= 0)
			break;
		st.out_at += (size_t)n;
		st.out_len -= (size_t)n;
	}
	if (!st.out_len) {
		if (st.out_peak > STREAM_CONGESTED)
			madvise(st.out_buf, OUT_SIZE, MADV_DONTNEED);
		st.out_at = st.out_peak = 0;
	}
	source_events(&st.out, st.out_len ? POLLOUT : 0);
	set_congested();
	if (st.eof && !st.out_len && !jobs_active())
		worker_exit(0);
}

void stream_send(struct lane *l, const struct mp_writer *w)
{
	(void)l;
	if (st.out_at && st.out_at + st.out_len + w->len * 7 + 64 > OUT_SIZE) {
		memmove(st.out_buf, st.out_buf + st.out_at, st.out_len);
		st.out_at = 0;
	}
	struct mp_writer o;
	uint8_t *end = st.out_buf + st.out_at + st.out_len;
	mp_writer_init(&o, end, OUT_SIZE - st.out_at - st.out_len);
	if (st.json) {
		if (msgpack_to_json(w->buf, w->len, &o) < 0)
			worker_exit(1);
		st.out_len += o.len;
	} else {
		if (o.cap < w->len + 4)
			worker_exit(1);
		for (int i = 0; i < 4; i++)
			end[i] = (uint8_t)(w->len >> (24 - 8 * i));
		memcpy(end + 4, w->buf, w->len);
		st.out_len += w->len + 4;
	}
	if (st.out_at + st.out_len > st.out_peak)
		st.out_peak = st.out_at + st.out_len;
	stream_flush();
}

/* ---- in ---- */

/* One message goes into memory that can belong to a job: the slab's own place, or a body's when it is long. */
static int place(struct message *m, const uint8_t *p, size_t len)
{
	m->buf = m->slab->message;
	if (!st.json && len <= VJ_MESSAGE_MAX) {
		memcpy(m->buf, p, m->len = len);
		return 0;
	}
	struct mp_writer w;
	if (st.json) {
		mp_writer_init(&w, m->buf, VJ_MESSAGE_MAX);
		int e = json_to_msgpack((const char *)p, len, &w);
		m->len = w.len;
		if (e != -EMSGSIZE)
			return e;
	}
	if (!slab_body(m->slab))
		return -ENOMEM;
	m->buf = m->slab->body;
	if (!st.json) {
		memcpy(m->buf, p, m->len = len);
		return 0;
	}
	mp_writer_init(&w, m->buf, VJ_FRAME_MAX);
	int e = json_to_msgpack((const char *)p, len, &w);
	m->len = w.len;
	return e;
}

static void deliver(struct lane *l, const uint8_t *p, size_t len)
{
	struct message m = {.slab = lane_take_spare()};
	if (!m.slab) {
		reply_error(l, NULL, -ENOMEM);
		return;
	}
	lease_renew();
	int e = place(&m, p, len);
	m.slab->used = (uint32_t)m.len;
	if (e)
		reply_error(l, NULL, e);
	else
		dispatch(l, &m);
	if (m.nfds)
		close_fds(m.fds, m.nfds);
	lane_give_spare(m.slab);
}

/* The complete frames at the beginning of the buffer; how many bytes they took. */
static size_t take_frames(struct lane *l)
{
	size_t at = 0;
	while (st.in_len - at >= 4 && !st.skip && !st.congested) {
		const uint8_t *p = st.in_buf + at;
		size_t len = (size_t)p[0] << 24 | (size_t)p[1] << 16 | (size_t)p[2] << 8 | p[3];
		if (len > VJ_FRAME_MAX) {
			st.skip = len;
			at += 4;
			reply_error(l, NULL, -EMSGSIZE);
			break;
		}
		if (st.in_len - at - 4 < len)
			break;
		at += 4 + len;
		deliver(l, p + 4, len);
	}
	if (st.skip) {
		size_t n = st.in_len - at < st.skip ? st.in_len - at : st.skip;
		st.skip -= n;
		at += n;
	}
	return at;
}

static size_t take_lines(struct lane *l)
{
	size_t at = 0;
	while (!st.congested) {
		const uint8_t *p = st.in_buf + at, *end = memchr(p, '\n', st.in_len - at);
		if (!end)
			break;
		size_t len = (size_t)(end - p);
		at += len + 1;
		if (st.overlong)
			st.overlong = false; /* the end of a line whose beginning was thrown away */
		else if (len)
			deliver(l, p, len);
	}
	if (!at && st.in_len == IN_SIZE) {
		if (!st.overlong)
			reply_error(l, NULL, -EMSGSIZE);
		st.overlong = true;
		at = st.in_len;
	}
	return at;
}

static void take(struct lane *l)
{
	size_t at = st.json ? take_lines(l) : take_frames(l);
	if (!at)
		return;
	st.in_len -= at;
	memmove(st.in_buf, st.in_buf + at, st.in_len);
	if (!st.in_len && at > STREAM_CONGESTED)
		madvise(st.in_buf, IN_SIZE, MADV_DONTNEED);
}

void stream_ready(struct lane *l, short revents)
{
	(void)revents;
	if (st.congested || st.in_len == IN_SIZE)
		return;
	size_t room = IN_SIZE - st.in_len;
	ssize_t n = read(l->src.fd, st.in_buf + st.in_len, room < READ_MAX ? room : READ_MAX);
	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	if (n <= 0) {
		if (!st.json)
			lane_drop(l);
		/* A person's `echo … | worker --json` gets its answers first. */
		if (st.in_len && !st.overlong)
			deliver(l, st.in_buf, st.in_len);
		st.in_len = 0;
		st.eof = true;
		source_remove(&l->src);
		stream_flush();
		return;
	}
	st.in_len += (size_t)n;
	take(l);
}

void stream_turn(void)
{
	struct lane *l = lane_get(st.lane);
	if (l && st.in_len && !st.congested)
		take(l); /* what was left while the way out was full */
	if (st.eof && !jobs_active())
		stream_flush();
}

void stream_out_ready(short revents)
{
	if (!(revents & POLLOUT) && revents & (POLLERR | POLLHUP))
		worker_exit(0); /* nobody reads any more */
	stream_flush();
}

int stream_open(struct lane *l, int out, bool json)
{
	st.json = json;
	worker.stream = true;
	st.lane = lane_ref(l);
	st.in_buf = map(IN_SIZE);
	st.out_buf = map(OUT_SIZE);
	if (!st.in_buf || !st.out_buf)
		return -ENOMEM;
	/* A terminal's flags belong to whoever else uses it; pipes and sockets are ours. */
	if (!isatty(out)) {
		int flags = fcntl(out, F_GETFL);
		if (flags < 0 || fcntl(out, F_SETFL, flags | O_NONBLOCK) < 0)
			return -errno;
	}
	int e = source_add(&st.out, SRC_STREAM_OUT, out, 0, NULL);
	if (!e && !json) {
		memcpy(st.out_buf, VJ_STREAM_MAGIC, sizeof VJ_STREAM_MAGIC - 1);
		st.out_len = sizeof VJ_STREAM_MAGIC - 1;
		stream_flush();
	}
	return e;
}
