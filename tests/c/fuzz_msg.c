/* fuzz_msg.c — libFuzzer: any bytes as a message; what can be read is written and read again the same. */
#include "msg.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define REQUIRE(x) ((x) ? (void)0 : abort())

/* Copies one value; recursion ends where mp_skip's does. */
static void copy(struct mp_reader *r, struct mp_writer *w, int depth)
{
	enum mp_type type = mp_peek(r);
	struct mp_bytes b;
	uint32_t n;

	switch (type) {
	case MP_NIL:
		mp_skip(r);
		mp_write_nil(w);
		return;
	case MP_BOOL:
		mp_write_bool(w, mp_read_bool(r));
		return;
	case MP_INT: {
		struct mp_reader again = *r;
		uint64_t u = mp_read_uint(r);
		if (!r->err) {
			mp_write_uint(w, u);
			return;
		}
		*r = again;
		mp_write_int(w, mp_read_int(r));
		return;
	}
	case MP_FLOAT:
		mp_write_float(w, mp_read_float(r));
		return;
	case MP_STR:
	case MP_BIN:
		b = mp_read_bytes(r);
		if (type == MP_STR)
			mp_write_strn(w, (const char *)b.ptr, b.len);
		else
			mp_write_bin(w, b.ptr, b.len);
		return;
	case MP_ARRAY:
	case MP_MAP:
		if (depth == VJ_DEPTH_MAX) {
			mp_skip(r);
			r->err = 1;
			return;
		}
		n = type == MP_MAP ? 2 * mp_read_map(r) : mp_read_array(r);
		if (type == MP_MAP)
			mp_write_map(w, n / 2);
		else
			mp_write_array(w, n);
		while (n-- && !r->err)
			copy(r, w, depth + 1);
		return;
	case MP_BAD:
		mp_skip(r);
		REQUIRE(r->err);
		return;
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static uint8_t first[1 << 17], second[1 << 17];
	struct mp_reader r, s;
	struct mp_writer w, v;

	if (size > 1 << 16)
		return 0;
	mp_reader_init(&s, data, size);
	mp_skip(&s);
	mp_reader_init(&r, data, size);
	mp_writer_init(&w, first, sizeof first);
	copy(&r, &w, 0);
	REQUIRE(!r.err == !s.err); /* skipping accepts what reading accepts */
	if (r.err)
		return 0;
	REQUIRE(r.p == s.p && !w.overflow);
	mp_reader_init(&r, first, w.len);
	mp_writer_init(&v, second, sizeof second);
	copy(&r, &v, 0);
	REQUIRE(!r.err && r.p == r.end && v.len == w.len && !memcmp(first, second, w.len));
	mp_writer_init(&v, second, w.len ? w.len - 1 : 0);
	mp_reader_init(&r, first, w.len);
	copy(&r, &v, 0);
	REQUIRE(v.overflow);
	return 0;
}
