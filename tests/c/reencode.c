/* reencode.c — for the comparison with another msgpack implementation: values from standard input are written again in
 * their shortest form. Status 1: malformed; 2: nested too deep, or followed by more. */
#include "msg.h"

#include <stdio.h>

static int copy(struct mp_reader *r, struct mp_writer *w, int depth)
{
	enum mp_type type = mp_peek(r);
	struct mp_reader before = *r;
	struct mp_bytes b;
	uint32_t n;
	int e = 0;

	switch (type) {
	case MP_NIL:
		mp_skip(r);
		mp_write_nil(w);
		break;
	case MP_BOOL:
		mp_write_bool(w, mp_read_bool(r));
		break;
	case MP_INT: {
		int64_t i = mp_read_int(r);
		if (!r->err) {
			mp_write_int(w, i);
			break;
		}
		*r = before;
		mp_write_uint(w, mp_read_uint(r));
		break;
	}
	case MP_FLOAT:
		mp_write_float(w, mp_read_float(r));
		break;
	case MP_STR:
		b = mp_read_bytes(r);
		mp_write_strn(w, (const char *)b.ptr, b.len);
		break;
	case MP_BIN:
		b = mp_read_bytes(r);
		mp_write_bin(w, b.ptr, b.len);
		break;
	case MP_ARRAY:
	case MP_MAP:
		if (depth == VJ_DEPTH_MAX)
			return 2;
		n = type == MP_ARRAY ? mp_read_array(r) : mp_read_map(r);
		if (type == MP_ARRAY)
			mp_write_array(w, n);
		else
			mp_write_map(w, n);
		for (uint64_t i = type == MP_MAP ? 2 * (uint64_t)n : n; i && !e && !r->err; i--)
			e = copy(r, w, depth + 1);
		return e;
	case MP_BAD:
		return 1;
	}
	return 0;
}

int main(void)
{
	static uint8_t in[1 << 22], out[1 << 23];
	struct mp_reader r;
	struct mp_writer w;

	/* Many values in one run: each with a 32-bit length in front, in the machine's order; the answers likewise, with the
	 * exit status as a byte before the value. */
	uint32_t n;
	while (fread(&n, sizeof n, 1, stdin) == 1) {
		if (n > sizeof in || fread(in, 1, n, stdin) != n)
			return 3;
		mp_reader_init(&r, in, n);
		mp_writer_init(&w, out, sizeof out);
		int e = copy(&r, &w, 0);
		if (!e)
			e = r.err || w.overflow ? 1 : r.p != r.end ? 2 : 0;
		n = e ? 0 : (uint32_t)w.len;
		putchar(e);
		fwrite(&n, sizeof n, 1, stdout);
		fwrite(out, 1, n, stdout);
		fflush(stdout);
	}
	return 0;
}
