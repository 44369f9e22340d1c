/* msg.c — the msgpack subset of msg.h: nil, bool, integers, floats, str, bin, arrays and maps (no extension types). */
#include "msg.h"

#include <errno.h>
#include <string.h>

/* ---- reading ---- */

void mp_reader_init(struct mp_reader *r, const void *buf, size_t len)
{
	r->p = buf;
	r->end = r->p + len;
	r->err = 0;
}

/* From now on nothing is left to read, so that the bounds check of every later read fails as well. */
static void fail(struct mp_reader *r)
{
	r->err = EBADMSG;
	r->p = r->end;
}

static size_t left(const struct mp_reader *r)
{
	return (size_t)(r->end - r->p);
}

/* The next n bytes, or NULL. */
static const uint8_t *take(struct mp_reader *r, uint64_t n)
{
	const uint8_t *p = r->p;
	if (n > left(r)) {
		fail(r);
		return NULL;
	}
	r->p += n;
	return p;
}

/* The tag byte; 0xc1, which msgpack never uses, at the end of the buffer. */
static uint8_t tag(struct mp_reader *r)
{
	if (r->p == r->end) {
		fail(r);
		return 0xc1;
	}
	return *r->p++;
}

/* A big-endian number of 1 << log2 bytes. */
static uint64_t number(struct mp_reader *r, unsigned log2)
{
	const uint8_t *p = take(r, 1u << log2);
	uint64_t v = 0;
	if (p)
		for (const uint8_t *q = p; q < p + (1u << log2); q++)
			v = v << 8 | *q;
	return v;
}

static enum mp_type type_of(uint8_t t)
{
	static const uint8_t types[32] = { /* 0xc0 … 0xdf */
		MP_NIL,	  MP_BAD,   MP_BOOL, MP_BOOL, MP_BIN, MP_BIN, MP_BIN, MP_BAD, MP_BAD,	MP_BAD,	  MP_FLOAT,
		MP_FLOAT, MP_INT,   MP_INT,  MP_INT,  MP_INT, MP_INT, MP_INT, MP_INT, MP_INT,	MP_BAD,	  MP_BAD,
		MP_BAD,	  MP_BAD,   MP_BAD,  MP_STR,  MP_STR, MP_STR, MP_ARRAY, MP_ARRAY, MP_MAP, MP_MAP,
	};
	if (t < 0x80 || t >= 0xe0)
		return MP_INT;
	if (t < 0xc0)
		return t < 0x90 ? MP_MAP : t < 0xa0 ? MP_ARRAY : MP_STR;
	return (enum mp_type)types[t - 0xc0];
}

enum mp_type mp_peek(const struct mp_reader *r)
{
	return r->p == r->end ? MP_BAD : type_of(*r->p);
}

/* The count of a container whose short form is `fix`|n and whose 16-bit form is `wide`; each element takes at least
 * `least` bytes, so a count that the rest of the buffer cannot hold is refused before anybody loops over it. */
static uint32_t count(struct mp_reader *r, uint8_t fix, uint8_t wide, unsigned least)
{
	uint8_t t = tag(r);
	uint64_t n;
	if ((t & 0xf0) == fix) {
		n = t & 0x0f;
	} else if (t == wide || t == wide + 1) {
		n = number(r, t == wide ? 1 : 2);
	} else {
		fail(r);
		return 0;
	}
	if (n * least > left(r)) {
		fail(r);
		return 0;
	}
	return (uint32_t)n;
}

uint32_t mp_read_map(struct mp_reader *r)
{
	return count(r, 0x80, 0xde, 2);
}

uint32_t mp_read_array(struct mp_reader *r)
{
	return count(r, 0x90, 0xdc, 1);
}

struct mp_bytes mp_read_bytes(struct mp_reader *r)
{
	uint8_t t = tag(r);
	uint64_t n = 0;
	if ((t & 0xe0) == 0xa0)
		n = t & 0x1f;
	else if (t >= 0xc4 && t <= 0xc6)
		n = number(r, t - 0xc4u);
	else if (t >= 0xd9 && t <= 0xdb)
		n = number(r, t - 0xd9u);
	else
		fail(r);
	const uint8_t *p = take(r, n);
	/* Never a null pointer: memcpy and memcmp do not take one, even for no bytes. */
	return p && !r->err ? (struct mp_bytes){p, (uint32_t)n} : (struct mp_bytes){(const uint8_t *)"", 0};
}

/* Any integer: its 64 bits, and whether they mean a negative number. */
static uint64_t integer(struct mp_reader *r, bool *negative)
{
	uint8_t t = tag(r);
	*negative = false;
	if (t < 0x80)
		return t;
	if (t >= 0xcc && t <= 0xcf)
		return number(r, t - 0xccu);
	uint64_t v = 0;
	if (t >= 0xe0) {
		v = (uint64_t)(int8_t)t;
	} else if (t >= 0xd0 && t <= 0xd3) {
		unsigned unused = 64 - (8u << (t - 0xd0u));
		v = (uint64_t)((int64_t)(number(r, t - 0xd0u) << unused) >> unused);
	} else {
		fail(r);
	}
	*negative = v >> 63;
	return v;
}

uint64_t mp_read_uint(struct mp_reader *r)
{
	bool negative;
	uint64_t v = integer(r, &negative);
	if (negative) {
		fail(r);
		return 0;
	}
	return v;
}

int64_t mp_read_int(struct mp_reader *r)
{
	bool negative;
	uint64_t v = integer(r, &negative);
	if (!negative && v > INT64_MAX) {
		fail(r);
		return 0;
	}
	return (int64_t)v;
}

bool mp_read_bool(struct mp_reader *r)
{
	uint8_t t = tag(r);
	if (t != 0xc2 && t != 0xc3)
		fail(r);
	return t == 0xc3;
}

double mp_read_float(struct mp_reader *r)
{
	uint8_t t = tag(r);
	if (t == 0xca) {
		uint32_t bits = (uint32_t)number(r, 2);
		float v;
		memcpy(&v, &bits, sizeof v);
		return (double)v;
	}
	uint64_t bits = 0;
	if (t == 0xcb)
		bits = number(r, 3);
	else
		fail(r);
	double v;
	memcpy(&v, &bits, sizeof v);
	return v;
}

void mp_skip(struct mp_reader *r)
{
	uint64_t todo[VJ_DEPTH_MAX + 1] = {1}; /* values still to skip at each depth */
	int depth = 0;
	bool negative;
	while (depth >= 0) {
		if (!todo[depth]) {
			depth--;
			continue;
		}
		todo[depth]--;
		enum mp_type type = mp_peek(r);
		switch (type) {
		case MP_NIL:
			r->p++;
			break;
		case MP_BOOL:
			mp_read_bool(r);
			break;
		case MP_INT:
			integer(r, &negative);
			break;
		case MP_FLOAT:
			mp_read_float(r);
			break;
		case MP_STR:
		case MP_BIN:
			mp_read_bytes(r);
			break;
		case MP_ARRAY:
		case MP_MAP:
			if (depth == VJ_DEPTH_MAX) {
				fail(r);
				break;
			}
			todo[++depth] = type == MP_MAP ? 2 * (uint64_t)mp_read_map(r) : mp_read_array(r);
			break;
		case MP_BAD:
			fail(r);
			break;
		}
		if (r->err)
			return;
	}
}

bool mp_is(struct mp_bytes b, const char *text)
{
	return strlen(text) == b.len && (!b.len || !memcmp(b.ptr, text, b.len));
}

int mp_cstr(struct mp_bytes b, char *out, size_t cap)
{
	if (b.len >= cap)
		return -ENAMETOOLONG;
	if (b.len) { /* an absent field has no pointer */
		if (memchr(b.ptr, 0, b.len))
			return -EINVAL;
		memcpy(out, b.ptr, b.len);
	}
	out[b.len] = 0;
	return 0;
}

/* ---- writing ---- */

void mp_writer_init(struct mp_writer *w, void *buf, size_t cap)
{
	*w = (struct mp_writer){.buf = buf, .cap = cap};
}

/* Room for n bytes at the end, or NULL. */
static uint8_t *room(struct mp_writer *w, size_t n)
{
	if (w->overflow || n > w->cap - w->len) {
		w->overflow = true;
		return NULL;
	}
	uint8_t *p = w->buf + w->len;
	w->len += n;
	return p;
}

void mp_put(struct mp_writer *w, const void *p, size_t n)
{
	uint8_t *to = room(w, n);
	if (to && n)
		memcpy(to, p, n);
}

/* A tag, a big-endian number of `width` bytes (0 to 8), and room for `body` bytes, which is returned: the header
 * and its body are written together or not at all. */
static uint8_t *head(struct mp_writer *w, unsigned t, unsigned width, uint64_t v, size_t body)
{
	uint8_t *p = body <= w->cap ? room(w, 1 + width + body) : room(w, SIZE_MAX);
	if (!p)
		return NULL;
	*p = (uint8_t)t;
	for (unsigned i = width; i > 0; i--, v >>= 8)
		p[i] = (uint8_t)v;
	return p + 1 + width;
}

void mp_write_nil(struct mp_writer *w)
{
	head(w, 0xc0, 0, 0, 0);
}

void mp_write_bool(struct mp_writer *w, bool v)
{
	head(w, v ? 0xc3 : 0xc2, 0, 0, 0);
}

void mp_write_uint(struct mp_writer *w, uint64_t v)
{
	if (v < 0x80)
		head(w, (unsigned)v, 0, 0, 0);
	else if (v <= UINT8_MAX)
		head(w, 0xcc, 1, v, 0);
	else if (v <= UINT16_MAX)
		head(w, 0xcd, 2, v, 0);
	else if (v <= UINT32_MAX)
		head(w, 0xce, 4, v, 0);
	else
		head(w, 0xcf, 8, v, 0);
}

void mp_write_int(struct mp_writer *w, int64_t v)
{
	if (v >= 0)
		mp_write_uint(w, (uint64_t)v);
	else if (v >= -32)
		head(w, (uint8_t)v, 0, 0, 0);
	else if (v >= INT8_MIN)
		head(w, 0xd0, 1, (uint64_t)v, 0);
	else if (v >= INT16_MIN)
		head(w, 0xd1, 2, (uint64_t)v, 0);
	else if (v >= INT32_MIN)
		head(w, 0xd2, 4, (uint64_t)v, 0);
	else
		head(w, 0xd3, 8, (uint64_t)v, 0);
}

void mp_write_float(struct mp_writer *w, double v)
{
	uint64_t bits;
	memcpy(&bits, &v, sizeof bits);
	head(w, 0xcb, 8, bits, 0);
}

/* A body after the shortest header for its length: `t8`, t8+1 and t8+2 are the tags with 8, 16 and 32 bits. */
static void blob(struct mp_writer *w, unsigned t8, const void *data, size_t len)
{
	uint8_t *p;
	if (t8 == 0xd9 && len < 32)
		p = head(w, 0xa0u | (unsigned)len, 0, 0, len);
	else if (len <= UINT8_MAX)
		p = head(w, t8, 1, len, len);
	else if (len <= UINT16_MAX)
		p = head(w, t8 + 1, 2, len, len);
	else if (len <= UINT32_MAX)
		p = head(w, t8 + 2, 4, len, len);
	else
		p = room(w, SIZE_MAX);
	if (p && len)
		memcpy(p, data, len);
}

void mp_write_strn(struct mp_writer *w, const char *text, size_t len)
{
	blob(w, 0xd9, text, len);
}

void mp_write_str(struct mp_writer *w, const char *text)
{
	blob(w, 0xd9, text, strlen(text));
}

void mp_write_bin(struct mp_writer *w, const void *p, size_t len)
{
	blob(w, 0xc4, p, len);
}

static void container(struct mp_writer *w, unsigned fix, unsigned wide, uint32_t n)
{
	if (n < 16)
		head(w, fix | n, 0, 0, 0);
	else if (n <= UINT16_MAX)
		head(w, wide, 2, n, 0);
	else
		head(w, wide + 1, 4, n, 0);
}

void mp_write_array(struct mp_writer *w, uint32_t n)
{
	container(w, 0x90, 0xdc, n);
}

void mp_write_map(struct mp_writer *w, uint32_t n)
{
	container(w, 0x80, 0xde, n);
}

uint8_t *mp_bin_begin(struct mp_writer *w, size_t max)
{
	size_t len = w->len;
	uint8_t *p = max <= UINT16_MAX ? head(w, 0xc5, 2, max, max) : room(w, SIZE_MAX);
	if (p)
		w->len = len; /* nothing counts until mp_bin_end says how much */
	return p;
}

void mp_bin_end(struct mp_writer *w, size_t len)
{
	head(w, 0xc5, 2, len, len);
}
