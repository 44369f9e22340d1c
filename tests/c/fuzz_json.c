/* fuzz_json.c — libFuzzer: any bytes as a line and as a message; a line that was accepted turns into a message, a line
 * and the same message again; file_request_parse takes anything. */
#include "files.h"
#include "json.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define REQUIRE(x) ((x) ? (void)0 : abort())

static uint8_t first[1 << 18], line[1 << 19], second[1 << 20], again[1 << 19];

/* A key whose own name ends in _b64 is not told from an encoded one. */
static bool ambiguous(const uint8_t *p, size_t n)
{
	return n >= 4 && memmem(p, n, "_b64", 4);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct mp_writer w, o, v, p;
	struct file_request rq;

	if (size > 1 << 14)
		return 0;
	file_request_parse(&rq, data, size);
	mp_writer_init(&o, line, sizeof line);
	int e = msgpack_to_json(data, size, &o);
	REQUIRE(e == 0 || e == -EBADMSG);
	if (!e) {
		mp_writer_init(&v, second, sizeof second);
		e = json_to_msgpack((const char *)line, o.len, &v);
		REQUIRE(e == 0 || e == -EBADMSG); /* a key twice, or more keys than an object may have */
	}
	mp_writer_init(&w, first, JSON_TO_MSGPACK_MAX(size));
	e = json_to_msgpack((const char *)data, size, &w);
	REQUIRE(e == 0 || e == -EBADMSG);
	if (e)
		return 0;
	file_request_parse(&rq, first, w.len);
	mp_writer_init(&o, line, sizeof line);
	e = msgpack_to_json(first, w.len, &o);
	REQUIRE(e == 0 || e == -EBADMSG); /* a float */
	if (e || ambiguous(first, w.len))
		return 0;
	mp_writer_init(&v, second, sizeof second);
	REQUIRE(json_to_msgpack((const char *)line, o.len, &v) == 0);
	mp_writer_init(&p, again, sizeof again);
	REQUIRE(msgpack_to_json(second, v.len, &p) == 0 && p.len == o.len && !memcmp(line, again, o.len));
	return 0;
}
