/* forward.c — doors between the jail's loopback and the host: accepted and connected sockets travel by descriptor.
 *
 * `egress` listens inside and hands each connection to the host while it has credit; without credit connections wait in
 * the kernel's backlog. `connect` reaches a server inside. Neither reads a byte of what is sent.
 */
#include "worker.h"

#include "compat.h"
#include "rawsys.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define LISTENERS_MAX 1024
#define CONNECTS_MAX 64
#define BACKLOG 4096
#define PAUSE_NS (UINT64_C(50) * 1000000)
#define CONNECT_NS (UINT64_C(5) * 1000000000)

struct listener {
	struct source src;
	struct lane_ref lane;
	char addr[INET6_ADDRSTRLEN];
	uint16_t port;
	bool used;
};

struct connect {
	struct source src;
	struct lane_ref lane;
	int64_t id;
	uint64_t deadline_ns;
	uint16_t port;
	bool used, six; /* six: the second try, on ::1 */
};

static struct listener listeners[LISTENERS_MAX];
static int nlisteners; /* entries ever used */
static struct connect connects[CONNECTS_MAX];
static uint64_t again_ns; /* when listeners that could not accept are looked at again */

union address {
	struct sockaddr any;
	struct sockaddr_in four;
	struct sockaddr_in6 six;
};

/* ---- egress ---- */

/* 0 or -errno; only addresses of the loopback can be asked for. */
static int parse_address(const char *text, uint16_t port, union address *a, socklen_t *len)
{
	memset(a, 0, sizeof *a);
	if (inet_pton(AF_INET, text, &a->four.sin_addr) == 1) {
		a->four.sin_family = AF_INET;
		a->four.sin_port = htons(port);
		*len = sizeof a->four;
		return (ntohl(a->four.sin_addr.s_addr) >> 24) == 127 ? 0 : -EADDRNOTAVAIL;
	}
	if (inet_pton(AF_INET6, text, &a->six.sin6_addr) != 1)
		return -EINVAL;
	a->six.sin6_family = AF_INET6;
	a->six.sin6_port = htons(port);
	*len = sizeof a->six;
	return IN6_IS_ADDR_LOOPBACK(&a->six.sin6_addr) ? 0 : -EADDRNOTAVAIL;
}

static int listen_on(const char *text, uint16_t port)
{
	union address a;
	socklen_t len;
	const int one = 1;

	int e = parse_address(text, port, &a, &len);
	if (e)
		return e;
	int fd = socket(a.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0)
		return -errno;
	/* After a listener that is gone; never SO_REUSEPORT, which would let a command share the port. */
	setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
	if (a.any.sa_family == AF_INET6)
		setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &one, sizeof one);
	if (bind(fd, &a.any, len) < 0 || listen(fd, BACKLOG) < 0) {
		e = -errno;
		close(fd);
		return e;
	}
	return fd;
}

static int add_listener(struct lane *l, struct mp_bytes addr, uint64_t port)
{
	struct listener *n = NULL;

	for (int i = 0; i < nlisteners && !n; i++)
		if (!listeners[i].used)
			n = &listeners[i];
	if (!n && nlisteners < LISTENERS_MAX)
		n = &listeners[nlisteners++];
	if (!n)
		return -EMFILE;
	int e = mp_cstr(addr, n->addr, sizeof n->addr);
	if (e || !port || port > 65535)
		return e ? e : -EINVAL;
	int fd = listen_on(n->addr, (uint16_t)port);
	if (fd < 0)
		return fd;
	n->src = (struct source){.slot = -1, .fd = fd};
	if (l->credit && (e = source_add(&n->src, SRC_LISTEN, fd, POLLIN, n)) < 0) {
		close(fd);
		return e;
	}
	n->used = true;
	n->port = (uint16_t)port;
	n->lane = lane_ref(l);
	return 0;
}

int egress_open(struct lane *l, const struct request *q)
{
	static uint8_t buf[8192];
	struct mp_reader r;
	struct mp_writer w;

	if (!q->listen || l->kind != LANE_PACKET)
		return q->listen ? -EOPNOTSUPP : -EINVAL;
	mp_reader_init(&r, q->listen, (size_t)(q->end - q->listen));
	uint32_t n = mp_read_array(&r);
	if (n > LISTENERS_MAX)
		return -E2BIG;
	l->credit += q->n;
	l->egress_id = q->id;
	mp_writer_init(&w, buf, sizeof buf);
	mp_write_map(&w, 2);
	mp_write_str(&w, "id");
	mp_write_int(&w, q->id);
	mp_write_str(&w, "bound");
	mp_write_array(&w, n);
	while (n--) {
		bool pair = mp_read_array(&r) == 2;
		struct mp_bytes addr = mp_read_bytes(&r);
		uint64_t port = mp_read_uint(&r);
		mp_write_int(&w, pair && !r.err ? -add_listener(l, addr, port) : EBADMSG);
	}
	lane_send(l, &w, -1);
	return 0;
}

static void watch(struct lane_ref ref, bool on)
{
	for (int i = 0; i < nlisteners; i++) {
		struct listener *n = &listeners[i];
		if (!n->used || n->lane.index != ref.index || n->lane.gen != ref.gen)
			continue;
		if (!on)
			source_remove(&n->src);
		else if (n->src.slot < 0)
			source_add(&n->src, SRC_LISTEN, n->src.fd, POLLIN, n);
	}
}

void egress_credit(struct lane *l, uint64_t n)
{
	bool none = !l->credit;
	l->credit += n > UINT32_MAX ? UINT32_MAX : n;
	if (none && l->credit)
		watch(lane_ref(l), true);
}

void egress_ready(struct source *s)
{
	struct listener *n = s->owner;
	struct lane *l = lane_get(n->lane);
	uint8_t buf[160];
	struct mp_writer w;

	if (!l)
		return;
	int fd = accept4(s->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
	if (fd < 0) {
		if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
			/* It stays ready: look away for a moment instead of turning round and round. */
			source_remove(s);
			again_ns = now_ns() + PAUSE_NS;
			loop_wake_at(again_ns);
		}
		return;
	}
	mp_writer_init(&w, buf, sizeof buf);
	mp_write_map(&w, 4);
	mp_write_str(&w, "id");
	mp_write_int(&w, l->egress_id);
	mp_write_str(&w, "event");
	mp_write_str(&w, "accepted");
	mp_write_str(&w, "addr");
	mp_write_str(&w, n->addr);
	mp_write_str(&w, "port");
	mp_write_uint(&w, n->port);
	if (!--l->credit)
		watch(n->lane, false);
	lane_send(l, &w, fd);
	raw1(SYS_close, fd);
}

/* ---- connect ---- */

static int dial(struct connect *c)
{
	union address a;
	socklen_t len;

	int e = parse_address(c->six ? "::1" : "127.0.0.1", c->port, &a, &len);
	if (e)
		return e;
	int fd = socket(a.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0)
		return -errno;
	if (connect(fd, &a.any, len) < 0 && errno != EINPROGRESS)
		e = -errno;
	else
		e = source_add(&c->src, SRC_CONNECT, fd, POLLOUT, c);
	if (e)
		close(fd);
	return e;
}

/* The answer, with the connected socket or an error. */
static void dialled(struct connect *c, int e)
{
	struct lane *l = lane_get(c->lane);
	uint8_t buf[64];
	struct mp_writer w;
	const struct request q = {.id = c->id, .has_id = true};

	c->used = false;
	if (l && e)
		reply_error(l, &q, e);
	else if (l) {
		mp_writer_init(&w, buf, sizeof buf);
		mp_write_map(&w, 1);
		mp_write_str(&w, "id");
		mp_write_int(&w, c->id);
		lane_send(l, &w, c->src.fd);
	}
	source_close(&c->src);
}

/* A server that listens on one of the two loopbacks only is found on either. */
static void dial_next(struct connect *c, int e)
{
	while (e && !c->six) {
		source_close(&c->src);
		c->six = true;
		int again = dial(c);
		if (!again)
			return;
		e = again == -EADDRNOTAVAIL || again == -EAFNOSUPPORT ? e : again;
	}
	dialled(c, e);
}

int connect_open(struct lane *l, const struct request *q)
{
	struct connect *c = NULL;

	if (!q->port || q->port > 65535)
		return -EINVAL;
	if (l->kind != LANE_PACKET)
		return -EOPNOTSUPP;
	for (int i = 0; i < CONNECTS_MAX && !c; i++)
		if (!connects[i].used)
			c = &connects[i];
	if (!c)
		return -EAGAIN;
	*c = (struct connect){.src = {.slot = -1, .fd = -1}, .lane = lane_ref(l), .id = q->id, .used = true,
			      .port = (uint16_t)q->port, .deadline_ns = now_ns() + CONNECT_NS};
	int e = dial(c);
	if (e)
		dial_next(c, e);
	if (c->used)
		loop_wake_at(c->deadline_ns);
	return 0;
}

void connect_ready(struct source *s)
{
	struct connect *c = s->owner;
	int e = 0;
	socklen_t len = sizeof e;

	if (getsockopt(s->fd, SOL_SOCKET, SO_ERROR, &e, &len) < 0)
		e = errno;
	if (e)
		dial_next(c, -e);
	else
		dialled(c, 0);
}

void forward_timers(uint64_t now)
{
	for (int i = 0; again_ns && again_ns <= now && i < nlisteners; i++) {
		struct lane *l = listeners[i].used ? lane_get(listeners[i].lane) : NULL;
		if (l && l->credit)
			watch(listeners[i].lane, true);
	}
	if (again_ns > now)
		loop_wake_at(again_ns);
	else
		again_ns = 0;
	for (int i = 0; i < CONNECTS_MAX; i++) {
		if (!connects[i].used)
			continue;
		if (connects[i].deadline_ns <= now)
			dialled(&connects[i], -ETIMEDOUT);
		else
			loop_wake_at(connects[i].deadline_ns);
	}
}

void forward_drop(struct lane_ref ref)
{
	for (int i = 0; i < nlisteners; i++)
		if (listeners[i].used && listeners[i].lane.index == ref.index && listeners[i].lane.gen == ref.gen) {
			source_close(&listeners[i].src);
			listeners[i].used = false;
		}
	for (int i = 0; i < CONNECTS_MAX; i++)
		if (connects[i].used && connects[i].lane.index == ref.index && connects[i].lane.gen == ref.gen) {
			source_close(&connects[i].src);
			connects[i].used = false;
		}
}
