/* test_msg.c — msg.h: what is written is read again, and nothing malformed is. */
#include "msg.h"

#include "check.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static const int64_t ints[] = {0, 1, -1, 127, 128, -32, -33, 255, 256, -128, -129, 65535, 65536, -32768, -32769,
			       INT32_MAX, INT32_MIN, UINT32_MAX, (int64_t)UINT32_MAX + 1, INT64_MAX, INT64_MIN};
static const uint8_t widths[] = {1, 1, 1, 1, 2, 1, 2, 2, 3, 2, 3, 3, 5, 3, 5, 5, 5, 5, 9, 9, 9};

static struct mp_reader reader(const void *p, size_t n)
{
	struct mp_reader r;
	mp_reader_init(&r, p, n);
	return r;
}

static void test_integers(void)
{
	uint8_t buf[16];
	struct mp_writer w;
	for (size_t i = 0; i < sizeof ints / sizeof *ints; i++) {
		mp_writer_init(&w, buf, sizeof buf);
		mp_write_int(&w, ints[i]);
		CHECK_EQ(w.len, widths[i]);
		struct mp_reader r = reader(buf, w.len);
		CHECK(mp_peek(&r) == MP_INT);
		CHECK_EQ(mp_read_int(&r), ints[i]);
		CHECK(!r.err && r.p == r.end);
		r = reader(buf, w.len);
		uint64_t u = mp_read_uint(&r);
		CHECK(ints[i] < 0 ? r.err == EBADMSG && !u : u == (uint64_t)ints[i]);
		for (size_t cut = 0; cut < w.len; cut++) {
			r = reader(buf, cut);
			CHECK(mp_read_int(&r) == 0 && r.err == EBADMSG);
		}
	}
	mp_writer_init(&w, buf, sizeof buf);
	mp_write_uint(&w, UINT64_MAX);
	struct mp_reader r = reader(buf, w.len);
	CHECK(mp_read_uint(&r) == UINT64_MAX && !r.err);
	r = reader(buf, w.len);
	CHECK(mp_read_int(&r) == 0 && r.err == EBADMSG);
}

static void test_bytes(void)
{
	static uint8_t data[70000], buf[70016];
	static const size_t sizes[] = {0, 1, 31, 32, 255, 256, 65535, 65536, 70000};
	memset(data, 'x', sizeof data);
	for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
		for (int bin = 0; bin < 2; bin++) {
			size_t n = sizes[i];
			struct mp_writer w;
			mp_writer_init(&w, buf, sizeof buf);
			if (bin)
				mp_write_bin(&w, data, n);
			else
				mp_write_strn(&w, (const char *)data, n);
			CHECK_EQ(w.len - n, n < 32 && !bin ? 1 : n < 256 ? 2 : n < 65536 ? 3 : 5);
			struct mp_reader r = reader(buf, w.len);
			CHECK(mp_peek(&r) == (bin ? MP_BIN : MP_STR));
			struct mp_bytes b = mp_read_bytes(&r);
			CHECK(b.len == n && !memcmp(b.ptr, data, n) && !r.err && r.p == r.end);
			r = reader(buf, w.len - 1);
			b = mp_read_bytes(&r);
			CHECK(r.err == EBADMSG && b.len == 0 && b.ptr);
			size_t need = w.len;
			mp_writer_init(&w, buf, need - 1);
			mp_write_bin(&w, data, n);
			mp_writer_init(&w, buf, need - 1);
			mp_write_strn(&w, (const char *)data, n);
			CHECK(bin || (w.overflow && w.len == 0));
		}
}

static void test_containers(void)
{
	uint8_t buf[64];
	struct mp_writer w;
	static const uint32_t counts[] = {0, 15, 16, 65535, 65536, UINT32_MAX};
	for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
		mp_writer_init(&w, buf, sizeof buf);
		mp_write_array(&w, counts[i]);
		CHECK_EQ(w.len, counts[i] < 16 ? 1 : counts[i] < 65536 ? 3 : 5);
		struct mp_reader r = reader(buf, w.len);
		CHECK(mp_peek(&r) == MP_ARRAY);
		CHECK(mp_read_array(&r) == 0 && (r.err == EBADMSG) == (counts[i] > 0)); /* no bytes for elements */
		mp_writer_init(&w, buf, sizeof buf);
		mp_write_map(&w, counts[i]);
		r = reader(buf, w.len);
		CHECK(mp_peek(&r) == MP_MAP);
		CHECK(mp_read_map(&r) == 0 && (r.err == EBADMSG) == (counts[i] > 0));
	}
	static const uint8_t two[] = {0x92, 0xc0, 0xc0}, half[] = {0x81, 0xc0};
	struct mp_reader r = reader(two, 3);
	CHECK_EQ(mp_read_array(&r), 2);
	r = reader(half, 2);
	CHECK(mp_read_map(&r) == 0 && r.err);
}

static void test_skip(void)
{
	uint8_t deep[VJ_DEPTH_MAX + 8];
	memset(deep, 0x91, sizeof deep);
	deep[VJ_DEPTH_MAX] = 0xc0;
	struct mp_reader r = reader(deep, sizeof deep);
	mp_skip(&r);
	CHECK(!r.err && r.p == deep + VJ_DEPTH_MAX + 1);
	deep[VJ_DEPTH_MAX] = 0x90;
	r = reader(deep, sizeof deep);
	mp_skip(&r);
	CHECK_EQ(r.err, EBADMSG);

	static const uint8_t every[] = {0x99, 0xc0, 0xc2, 0x05, 0xca, 0, 0, 0, 0, 0xcb, 0, 0, 0, 0, 0, 0, 0, 0,
					0xa1, 'a', 0xc4, 1, 0, 0x91, 1, 0x81, 0xa1, 'k', 0x90, 0xc3};
	r = reader(every, sizeof every);
	mp_skip(&r);
	CHECK(!r.err && r.end - r.p == 1 && mp_read_bool(&r) && !r.err);
	for (size_t cut = 0; cut < sizeof every - 1; cut++) {
		r = reader(every, cut);
		mp_skip(&r);
		CHECK_EQ(r.err, EBADMSG);
	}
	static const uint8_t never[] = {0xc1, 0xc7, 0xc8, 0xc9, 0xd4, 0xd5, 0xd6, 0xd7, 0xd8};
	for (size_t i = 0; i < sizeof never; i++) {
		uint8_t ext[24] = {never[i]};
		r = reader(ext, sizeof ext);
		CHECK(mp_peek(&r) == MP_BAD);
		mp_skip(&r);
		CHECK_EQ(r.err, EBADMSG);
	}
}

static void test_sticky(void)
{
	static const uint8_t msg[] = {0x01, 0xa1, 'a', 0x02};
	struct mp_reader r = reader(msg, sizeof msg);
	CHECK(!mp_read_bool(&r) && r.err == EBADMSG);
	CHECK(mp_read_int(&r) == 0 && mp_read_uint(&r) == 0 && mp_read_array(&r) == 0 && mp_read_map(&r) == 0);
	CHECK(mp_read_bytes(&r).len == 0 && mp_peek(&r) == MP_BAD && mp_read_float(&r) == 0 && r.err == EBADMSG);

	uint8_t buf[4];
	struct mp_writer w;
	mp_writer_init(&w, buf, sizeof buf);
	mp_write_uint(&w, 1);
	mp_write_bin(&w, "toolong", 7);
	mp_write_nil(&w);
	CHECK(w.overflow && w.len == 1);
	mp_writer_init(&w, NULL, 0);
	mp_write_nil(&w);
	mp_put(&w, "x", 1);
	CHECK(w.overflow && w.len == 0);
}

static void test_helpers(void)
{
	char out[4];
	struct mp_bytes b = {(const uint8_t *)"abc", 3};
	CHECK(mp_is(b, "abc") && !mp_is(b, "ab") && !mp_is(b, "abcd") && !mp_is(b, ""));
	CHECK(mp_cstr(b, out, 4) == 0 && !strcmp(out, "abc"));
	CHECK_EQ(mp_cstr(b, out, 3), -ENAMETOOLONG);
	b.ptr = (const uint8_t *)"a\0c";
	CHECK_EQ(mp_cstr(b, out, 4), -EINVAL);

	uint8_t buf[16];
	struct mp_writer w;
	mp_writer_init(&w, buf, sizeof buf);
	uint8_t *p = mp_bin_begin(&w, 13);
	CHECK(p && w.len == 0);
	memcpy(p, "hello", 5);
	mp_bin_end(&w, 5);
	struct mp_reader r = reader(buf, w.len);
	CHECK(mp_is(mp_read_bytes(&r), "hello") && r.p == r.end && !r.err);
	mp_writer_init(&w, buf, sizeof buf);
	CHECK(!mp_bin_begin(&w, 14) && w.overflow);

	mp_writer_init(&w, buf, sizeof buf);
	mp_write_float(&w, -2.5);
	r = reader(buf, w.len);
	CHECK(mp_peek(&r) == MP_FLOAT && mp_read_float(&r) == -2.5 && !r.err);
	static const uint8_t single[] = {0xca, 0x3f, 0xc0, 0, 0};
	r = reader(single, 5);
	CHECK(mp_read_float(&r) == 1.5 && !r.err);
}

int main(void)
{
	test_integers();
	test_bytes();
	test_containers();
	test_skip();
	test_sticky();
	test_helpers();
	return check_report();
}
