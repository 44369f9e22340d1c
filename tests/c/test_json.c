/* test_json.c — json.h: lines to messages and back. */
#include "json.h"

#include "check.h"

#include <errno.h>
#include <string.h>

/* Through msgpack and back; the text that came out, or NULL and *err. */
static const char *turn(const char *text, size_t n, int *err)
{
	static uint8_t msg[1 << 16];
	static char out[1 << 16];
	struct mp_writer w;
	mp_writer_init(&w, msg, sizeof msg);
	*err = json_to_msgpack(text, n, &w);
	if (*err)
		return NULL;
	struct mp_writer o;
	mp_writer_init(&o, out, sizeof out - 1);
	*err = msgpack_to_json(msg, w.len, &o);
	if (*err)
		return NULL;
	out[o.len] = 0;
	return out;
}

static void same(const char *text, const char *want)
{
	int err;
	const char *got = turn(text, strlen(text), &err);
	char line[1024];
	snprintf(line, sizeof line, "%s\n", want);
	CHECK_EQ(err, 0);
	CHECK(got && !strcmp(got, line));
	if (!got || strcmp(got, line))
		fprintf(stderr, "  %s -> %s", text, got ? got : "(none)\n");
}

static void refused(const char *text)
{
	int err;
	CHECK(!turn(text, strlen(text), &err));
	if (err != -EBADMSG)
		fprintf(stderr, "  accepted: %s\n", text);
	CHECK_EQ(err, -EBADMSG);
}

static void test_accepted(void)
{
	same("{}", "{}");
	same(" \t\r\n{ \"a\" : [ 1 , -2 ] , \"b\" : { } }\n", "{\"a\":[1,-2],\"b\":{}}");
	same("{\"t\":true,\"f\":false,\"n\":null}", "{\"t\":true,\"f\":false,\"n\":null}");
	same("{\"u\":18446744073709551615,\"i\":-9223372036854775808}",
	     "{\"u\":18446744073709551615,\"i\":-9223372036854775808}");
	same("{\"a\":1500.0,\"b\":1e3,\"c\":-2.5e1,\"d\":-0.0,\"e\":100e-2,\"f\":0e9999999999}",
	     "{\"a\":1500,\"b\":1000,\"c\":-25,\"d\":0,\"e\":1,\"f\":0}");
	same("{\"s\":\"\\\"\\\\\\/\\b\\f\\n\\r\\t\\u0000\\u001f\\u007f\"}",
	     "{\"s\":\"\\\"\\\\/\\b\\f\\n\\r\\t\\u0000\\u001f\x7f\"}");
	same("{\"s\":\"\\u00e9\\u20ac\\ud83d\\ude00\"}", "{\"s\":\"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\"}");
	same("{\"\xc3\xa9\":\"\xf4\x8f\xbf\xbf\"}", "{\"\xc3\xa9\":\"\xf4\x8f\xbf\xbf\"}");
	same("{\"x_b64\":\"/w==\",\"y_b64\":\"YWI=\"}", "{\"x_b64\":\"/w==\",\"y\":\"ab\"}");
	same("{\"x_b64\":\"\\/w==\",\"e_b64\":\"\"}", "{\"x_b64\":\"/w==\",\"e\":\"\"}");
	same("{\"v_b64\":[\"YQ==\",[\"gA==\"]],\"m_b64\":[{\"k\":\"v\"}],\"n_b64\":null}",
	     "{\"v_b64\":[\"YQ==\",[\"gA==\"]],\"m\":[{\"k\":\"v\"}],\"n\":null}");
	same("{\"_b64\":\"a\"}", "{\"_b64\":\"a\"}");
	same("{\"d\":[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]}", "{\"d\":[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]}");
}

static void test_refused(void)
{
	static const char *const texts[] = {
		"", " ", "[]", "1", "null", "{", "}", "{}{}", "{} x", "{,}", "{\"a\"}", "{\"a\":}", "{\"a\":1,}",
		"{a:1}", "{'a':1}", "{\"a\":1 \"b\":2}", "{\"a\":[1,]}", "{\"a\":[1 2]}", "{\"a\":[}", "{\"a\":tru}",
		"{\"a\":truee}", "{\"a\":nul", "{\"a\":NaN}", "{\"a\":+1}", "{\"a\":01}", "{\"a\":-}", "{\"a\":.5}",
		"{\"a\":1.}", "{\"a\":1e}", "{\"a\":1e+}", "{\"a\":0x1}", "{\"a\":1e400}", "{\"a\":18446744073709551616}",
		"{\"a\":-9223372036854775809}", "{\"a\":\"", "{\"a\":\"\\", "{\"a\":\"\\x\"}", "{\"a\":\"\\u12\"}",
		"{\"a\":\"\\u12g4\"}", "{\"a\":\"\\ud800\"}", "{\"a\":\"\\ud800\\u0041\"}", "{\"a\":\"\\udc00\"}",
		"{\"a\":\"\n\"}", "{\"a\":\"\x80\"}", "{\"a\":\"\xc0\x80\"}", "{\"a\":\"\xe0\x80\x80\"}",
		"{\"a\":\"\xed\xa0\x80\"}", "{\"a\":\"\xf4\x90\x80\x80\"}", "{\"a\":\"\xf8\x88\x80\x80\x80\"}",
		"{\"a\":\"\xe2\x82\"}", "{\"a\":1,\"a\":2}", "{\"a\":1,\"a_b64\":\"YQ==\"}", "{\"a\":1,\"\\u0061\":2}",
		"{\"x_b64\":\"YQ=\"}", "{\"x_b64\":\"YR==\"}", "{\"x_b64\":\"Y Q=\"}", "{\"x_b64\":\"=QQQ\"}",
		"{\"x_b64\":\"YQ==YQ==\"}", "{\"x_b64\":1}", "{\"x_b64\":[true]}",
		"{\"d\":[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]}", "{\"a\":1}\v", "\xef\xbb\xbf{}",
	};
	int err;
	for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
		refused(texts[i]);
	CHECK(!turn("{}\0", 3, &err) && err == -EBADMSG);
	CHECK(!turn("{\"a\":\"\0\"}", 9, &err) && err == -EBADMSG);
	CHECK(!turn("{\"a\":\0}", 7, &err) && err == -EBADMSG);
}

static void test_bounds(void)
{
	static const char text[] = "{\"key\":[1,2,300,\"text\",{\"a_b64\":\"/w==\"}],\"n\":-7}";
	uint8_t msg[256];
	char line[256];
	struct mp_writer w, o;
	mp_writer_init(&w, msg, sizeof msg);
	CHECK_EQ(json_to_msgpack(text, sizeof text - 1, &w), 0);
	size_t need = w.len;
	for (size_t cap = 0; cap < need; cap++) {
		mp_writer_init(&w, msg, cap);
		CHECK_EQ(json_to_msgpack(text, sizeof text - 1, &w), -EMSGSIZE);
		CHECK(w.len == 0 && !w.overflow);
	}
	for (size_t cut = 0; cut < sizeof text - 1; cut++) {
		mp_writer_init(&w, msg, sizeof msg);
		CHECK_EQ(json_to_msgpack(text, cut, &w), -EBADMSG);
	}
	mp_writer_init(&w, msg, sizeof msg);
	CHECK_EQ(json_to_msgpack(text, sizeof text - 1, &w), 0);
	for (size_t cap = 0; cap <= sizeof text; cap++) {
		mp_writer_init(&o, line, cap);
		CHECK_EQ(msgpack_to_json(msg, need, &o), cap < sizeof text ? -EMSGSIZE : 0);
		CHECK_EQ(o.len, cap < sizeof text ? 0 : sizeof text);
	}
	for (size_t cut = 0; cut < need; cut++) {
		mp_writer_init(&o, line, sizeof line);
		CHECK_EQ(msgpack_to_json(msg, cut, &o), -EBADMSG);
	}
	CHECK_EQ(msgpack_to_json("\x81\xa1\x61\xca\0\0\0\0", 8, &o), -EBADMSG); /* a float */
	CHECK_EQ(msgpack_to_json("\x81\xa1\xff\x01", 4, &o), -EBADMSG);	      /* a key that is no text */
	CHECK_EQ(msgpack_to_json("\x81\x01\x01", 3, &o), -EBADMSG);
	CHECK_EQ(msgpack_to_json("\x80\x80", 2, &o), -EBADMSG);
	CHECK_EQ(msgpack_to_json("\x90", 1, &o), -EBADMSG);
}

static void test_many_keys(void)
{
	char text[8192] = "{";
	uint8_t msg[8192];
	struct mp_writer w;
	size_t n = 1;
	for (int i = 0; i <= JSON_KEYS_MAX; i++) {
		n += (size_t)snprintf(text + n, sizeof text - n, "%s\"k%d\":1", i ? "," : "", i);
		char last = text[n];
		text[n] = '}';
		mp_writer_init(&w, msg, sizeof msg);
		CHECK_EQ(json_to_msgpack(text, n + 1, &w), i < JSON_KEYS_MAX ? 0 : -EBADMSG);
		text[n] = last;
	}
}

int main(void)
{
	test_accepted();
	test_refused();
	test_bounds();
	test_many_keys();
	return check_report();
}
