/* request.c — one pass over a request; strings are terminated in place and never copied. */
#include "worker.h"

#include <errno.h>
#include <string.h>

struct parse {
	struct mp_reader r;
	uint8_t *pending; /* where the NUL of the last string goes once the byte there has been read */
	char **ptr, **ptr_end;
	int err;
};

static void settle(struct parse *p)
{
	if (p->pending)
		*p->pending = 0;
	p->pending = NULL;
}

static char *text(struct parse *p)
{
	struct mp_bytes b = mp_read_bytes(&p->r);
	settle(p);
	if (p->r.err || !b.ptr)
		return NULL;
	if (memchr(b.ptr, 0, b.len))
		p->err = -EINVAL;
	p->pending = (uint8_t *)(uintptr_t)b.ptr + b.len;
	return (char *)(uintptr_t)b.ptr;
}

static char **texts(struct parse *p)
{
	uint32_t n = mp_read_array(&p->r);
	char **first = p->ptr;
	if (n >= (size_t)(p->ptr_end - p->ptr)) {
		p->err = -E2BIG;
		return NULL;
	}
	for (uint32_t i = 0; i < n && !p->r.err; i++)
		*p->ptr++ = text(p);
	*p->ptr++ = NULL;
	return first;
}

static bool is(struct mp_bytes b, const char *name, size_t len)
{
	return b.len == len && memcmp(b.ptr, name, len) == 0;
}
#define IS(name) is(k, name, sizeof name - 1)

static const uint8_t *nested(struct mp_reader *r)
{
	const uint8_t *at = r->p;
	mp_skip(r);
	return at;
}

/* The keys that only hello has. */
static void hello_value(struct request *q, struct mp_reader *r, struct mp_bytes k)
{
	if (IS("seccomp"))
		q->seccomp = mp_read_bytes(r);
	else if (IS("nonce"))
		q->nonce = mp_read_bytes(r);
	else if (IS("landlock"))
		q->landlock = nested(r);
	else if (IS("worker_rlimits"))
		q->worker_rlimits = nested(r);
	else if (IS("cmd_rlimits"))
		q->cmd_rlimits = nested(r);
	else if (IS("probe"))
		q->probe = nested(r);
	else if (IS("limits"))
		q->limits = nested(r);
	else if (IS("version"))
		q->version = mp_read_uint(r);
	else if (IS("lease"))
		q->lease = mp_read_uint(r);
	else if (IS("cmd_scope"))
		q->cmd_scope = mp_read_uint(r);
	else if (IS("umask")) {
		q->umask = mp_read_uint(r);
		q->has_umask = true;
	} else
		mp_skip(r);
}

/* A string stays in the message; a negative number where a count belongs is an error of the reader. */
static void value(struct request *q, struct parse *p, struct mp_bytes k)
{
	struct mp_reader *r = &p->r;

	/* The keys of an exec first. */
	if (IS("op"))
		q->op = mp_read_bytes(r);
	else if (IS("id")) {
		q->id = mp_read_int(r);
		q->has_id = true;
	} else if (IS("command"))
		q->argv = texts(p);
	else if (IS("env"))
		q->envp = texts(p);
	else if (IS("cwd"))
		q->cwd = text(p);
	else if (IS("timeout_ms"))
		q->timeout_ms = mp_read_uint(r);
	else if (IS("leftovers")) {
		struct mp_bytes b = mp_read_bytes(r);
		q->keep = mp_is(b, "keep");
		if (!q->keep && !mp_is(b, "kill"))
			p->err = -EINVAL;
	} else if (IS("cpu_ms"))
		q->cpu_ms = mp_read_uint(r);
	else if (IS("cap"))
		q->cap = mp_read_uint(r);
	else if (IS("merge"))
		q->merge = mp_read_bool(r);
	else if (IS("status"))
		q->status = mp_read_bool(r);
	else if (IS("script"))
		q->script = mp_read_bool(r);
	else if (IS("body"))
		q->body = mp_read_bool(r);
	else if (IS("stdin") && mp_peek(r) == MP_BOOL)
		q->want_stdin = mp_read_bool(r);
	else if (IS("target")) {
		q->target = mp_read_int(r);
		q->has_target = true;
	} else if (IS("signo"))
		q->signo = mp_read_int(r);
	else if (IS("tree"))
		q->tree = mp_read_bool(r);
	else if (IS("rows"))
		q->rows = mp_read_uint(r);
	else if (IS("cols"))
		q->cols = mp_read_uint(r);
	else if (IS("fd"))
		q->fd = mp_read_int(r);
	else if (IS("data"))
		q->data = mp_read_bytes(r);
	else if (IS("last"))
		q->last = mp_read_bool(r);
	else if (IS("bytes"))
		q->bytes = mp_read_uint(r);
	else if (IS("path")) {
		q->path = mp_read_bytes(r);
		q->has_path = true;
	} else if (IS("listen"))
		q->listen = nested(r);
	else if (IS("port"))
		q->port = mp_read_uint(r);
	else if (IS("n") || IS("credit"))
		q->n = mp_read_uint(r);
	else
		hello_value(q, r, k);
}

int request_parse(struct request *q, void *buf, size_t len, char **pointers, size_t npointers)
{
	struct parse p = {.ptr = pointers, .ptr_end = pointers + npointers};

	memset(q, 0, sizeof *q);
	q->end = (const uint8_t *)buf + len;
	mp_reader_init(&p.r, buf, len);
	for (uint32_t n = mp_read_map(&p.r); n && !p.r.err && !p.err; n--) {
		struct mp_bytes k = mp_read_bytes(&p.r);
		settle(&p);
		if (p.r.err)
			break;
		if (!k.len || mp_peek(&p.r) == MP_NIL)
			mp_skip(&p.r);
		else
			value(q, &p, k);
	}
	settle(&p);
	if (p.err)
		return p.err;
	if (p.r.err || p.r.p != p.r.end || !q->op.len)
		return -EBADMSG;
	return 0;
}
