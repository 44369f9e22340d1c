/* json_write.c — msgpack to one line of JSON: one pass that stops at the first error, with a look ahead for bytes that
 * are no text. */
#include "json.h"

#include <errno.h>
#include <string.h>

unsigned json_utf8(const uint8_t *p, const uint8_t *end)
{
	static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
	unsigned n = p[0] < 0x80 ? 1 : p[0] < 0xc0 ? 0 : p[0] < 0xe0 ? 2 : p[0] < 0xf0 ? 3 : p[0] < 0xf8 ? 4 : 0;
	if (n < 2 || n > (size_t)(end - p))
		return n == 1;
	uint32_t c = p[0] & (0x7fu >> n);
	for (unsigned i = 1; i < n; i++) {
		if ((p[i] & 0xc0) != 0x80)
			return 0;
		c = c << 6 | (p[i] & 0x3f);
	}
	return c < least[n] || c > 0x10ffff || (c >= 0xd800 && c < 0xe000) ? 0 : n;
}

static void put_text(struct mp_writer *w, const char *text)
{
	mp_put(w, text, strlen(text));
}

static bool is_text(struct mp_bytes b)
{
	const uint8_t *p = b.ptr, *end = p + b.len;
	while (p < end) {
		unsigned n = *p < 0x80 ? 1 : json_utf8(p, end);
		if (!n)
			return false;
		p += n;
	}
	return true;
}

/* Does the value at r, or an element of it, hold bytes that are no text? (A map in it decides for its own keys.) */
static bool needs_base64(struct mp_reader *r, int depth)
{
	enum mp_type type = mp_peek(r);
	bool found = false;
	if (type == MP_STR || type == MP_BIN)
		return !is_text(mp_read_bytes(r));
	if (type == MP_ARRAY && depth < VJ_DEPTH_MAX)
		for (uint32_t n = mp_read_array(r); n && !found && !r->err; n--)
			found = needs_base64(r, depth + 1);
	else
		mp_skip(r);
	return found;
}

static void quoted(struct mp_writer *w, struct mp_bytes b)
{
	const uint8_t *p = b.ptr, *end = p + b.len;
	while (p < end) {
		const uint8_t *run = p;
		while (p < end && *p >= 0x20 && *p != '"' && *p != '\\')
			p++;
		mp_put(w, run, (size_t)(p - run));
		if (p == end)
			break;
		static const char from[] = "\"\\\b\f\n\r\t", to[] = "\"\\bfnrt", hex[] = "0123456789abcdef";
		const char *at = *p ? strchr(from, *p) : NULL;
		if (at)
			mp_put(w, (char[]){'\\', to[at - from]}, 2);
		else
			mp_put(w, (char[]){'\\', 'u', '0', '0', hex[*p >> 4], hex[*p & 15]}, 6);
		p++;
	}
}

static void base64(struct mp_writer *w, struct mp_bytes b)
{
	static const char set[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
	const uint8_t *p = b.ptr;
	for (size_t left = b.len; left && !w->overflow; left -= left < 3 ? left : 3, p += 3) {
		uint32_t v = (uint32_t)p[0] << 16 | (left > 1 ? (uint32_t)p[1] << 8 : 0) | (left > 2 ? p[2] : 0);
		char quad[4] = {set[v >> 18], set[v >> 12 & 63], left > 1 ? set[v >> 6 & 63] : '=',
				left > 2 ? set[v & 63] : '='};
		mp_put(w, quad, 4);
	}
}

static void integer(struct mp_writer *w, struct mp_reader *r)
{
	struct mp_reader first = *r;
	int64_t i = mp_read_int(r);
	uint64_t v = i < 0 ? 0 - (uint64_t)i : (uint64_t)i;
	char text[24], *p = text + sizeof text;
	if (r->err) { /* past INT64_MAX */
		*r = first;
		v = mp_read_uint(r);
	}
	do
		*--p = (char)('0' + v % 10);
	while (v /= 10);
	if (i < 0)
		*--p = '-';
	mp_put(w, p, (size_t)(text + sizeof text - p));
}

static void value(struct mp_writer *w, struct mp_reader *r, int depth, bool b64);

static void map(struct mp_writer *w, struct mp_reader *r, int depth)
{
	put_text(w, "{");
	uint32_t n = mp_read_map(r);
	for (uint32_t i = 0; i < n && !r->err && !w->overflow; i++) {
		struct mp_bytes key = mp_read_bytes(r);
		struct mp_reader ahead = *r;
		bool b64 = needs_base64(&ahead, depth);
		if (!is_text(key)) {
			r->err = EBADMSG;
			return;
		}
		put_text(w, i ? ",\"" : "\"");
		quoted(w, key);
		put_text(w, b64 ? "_b64\":" : "\":");
		value(w, r, depth, b64);
	}
	put_text(w, "}");
}

static void array(struct mp_writer *w, struct mp_reader *r, int depth, bool b64)
{
	put_text(w, "[");
	uint32_t n = mp_read_array(r);
	for (uint32_t i = 0; i < n && !r->err && !w->overflow; i++) {
		if (i)
			put_text(w, ",");
		value(w, r, depth, b64);
	}
	put_text(w, "]");
}

static void value(struct mp_writer *w, struct mp_reader *r, int depth, bool b64)
{
	switch (mp_peek(r)) {
	case MP_NIL:
		mp_skip(r);
		put_text(w, "null");
		break;
	case MP_BOOL:
		put_text(w, mp_read_bool(r) ? "true" : "false");
		break;
	case MP_INT:
		integer(w, r);
		break;
	case MP_STR:
	case MP_BIN:
		put_text(w, "\"");
		(b64 ? base64 : quoted)(w, mp_read_bytes(r));
		put_text(w, "\"");
		break;
	case MP_ARRAY:
		if (depth < VJ_DEPTH_MAX) {
			array(w, r, depth + 1, b64);
			break;
		}
		r->err = EBADMSG;
		break;
	case MP_MAP:
		if (depth < VJ_DEPTH_MAX) {
			map(w, r, depth + 1);
			break;
		}
		r->err = EBADMSG;
		break;
	case MP_FLOAT: /* no reply has one */
	case MP_BAD:
		r->err = EBADMSG;
		break;
	}
}

int msgpack_to_json(const void *msg, size_t len, struct mp_writer *w)
{
	struct mp_reader r;
	size_t start = w->len;

	mp_reader_init(&r, msg, len);
	if (mp_peek(&r) != MP_MAP)
		return -EBADMSG;
	value(w, &r, 0, false);
	put_text(w, "\n");
	if (!w->overflow && !r.err && r.p == r.end)
		return 0;
	int e = r.err || !w->overflow ? -EBADMSG : -EMSGSIZE;
	w->len = start;
	w->overflow = false;
	return e;
}
