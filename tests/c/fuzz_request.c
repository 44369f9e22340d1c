/* fuzz_request.c — libFuzzer: any bytes as a request; every string that comes out ends inside the message. */
#include "worker.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define REQUIRE(x) ((x) ? (void)0 : abort())
#define POINTERS 64

static void strings(char **list, char **from, const char *buf, size_t size)
{
	if (!list)
		return;
	REQUIRE(list >= from && list < from + POINTERS);
	for (; *list; list++) {
		REQUIRE(*list >= buf && *list <= buf + size);
		REQUIRE(*list + strlen(*list) <= buf + size);
	}
	REQUIRE(list < from + POINTERS);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct request q;
	char *pointers[POINTERS];
	char *buf = malloc(size + 1); /* exactly the room that a message has */

	REQUIRE(buf);
	memcpy(buf, data, size);
	if (request_parse(&q, buf, size, pointers, POINTERS) == 0) {
		strings(q.argv, pointers, buf, size);
		strings(q.envp, pointers, buf, size);
		if (q.cwd)
			REQUIRE(q.cwd >= buf && q.cwd + strlen(q.cwd) <= buf + size);
		REQUIRE(!q.data.len || ((const char *)q.data.ptr >= buf && (const char *)q.data.ptr + q.data.len <= buf + size));
		REQUIRE(q.end == (const uint8_t *)buf + size);
		REQUIRE(!q.landlock || (q.landlock >= (const uint8_t *)buf && q.landlock < q.end));
	}
	free(buf);
	return 0;
}
