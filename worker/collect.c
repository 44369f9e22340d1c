/* collect.c — output that goes into the reply: the first and the last bytes of a stream, the middle only counted. */
#include "worker.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#define CAP_DEFAULT (1024u * 1024)
#define CAP_MAX (4u * 1024 * 1024)

int kept_open(struct kept *k, int streams, uint64_t cap)
{
	k->streams = streams;
	k->cap = cap && cap < CAP_MAX ? (size_t)cap : cap ? CAP_MAX : CAP_DEFAULT;
	for (int i = 0; i < streams; i++) {
		void *p = mmap(NULL, CAP_MAX, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1,
			       0);
		if (p == MAP_FAILED)
			return -ENOMEM;
		k->buf[i] = p;
	}
	return 0;
}

void kept_close(struct kept *k)
{
	for (int i = 0; i < 2; i++)
		if (k->buf[i])
			munmap(k->buf[i], CAP_MAX);
	k->buf[0] = k->buf[1] = NULL;
}

/* The first half of the room holds the head; the second is a ring for the tail once the whole was full. */
void kept_add(struct kept *k, int i, const uint8_t *p, size_t n)
{
	const size_t head = k->cap / 2, tail = k->cap - head;

	while (n) {
		size_t at = k->total[i] < k->cap ? (size_t)k->total[i] : head + (size_t)((k->total[i] - head) % tail);
		size_t room = k->cap - at < n ? k->cap - at : n;
		memcpy(k->buf[i] + at, p, room);
		k->total[i] += room;
		p += room;
		n -= room;
	}
}

static void reverse(uint8_t *p, size_t n)
{
	for (size_t i = 0; i < n / 2; i++) {
		uint8_t t = p[i];
		p[i] = p[n - 1 - i];
		p[n - 1 - i] = t;
	}
}

void kept_write(struct kept *k, struct mp_writer *w)
{
	static const char *const names[] = {"stdout", "stderr"}, *const dropped[] = {"dropped_stdout", "dropped_stderr"};
	const size_t head = k->cap / 2, tail = k->cap - head;

	for (int i = 0; i < k->streams; i++) {
		size_t n = k->total[i] < k->cap ? (size_t)k->total[i] : k->cap;
		if (k->total[i] > k->cap) { /* turn the ring so that the tail reads forwards */
			size_t at = (size_t)((k->total[i] - head) % tail);
			reverse(k->buf[i] + head, at);
			reverse(k->buf[i] + head + at, tail - at);
			reverse(k->buf[i] + head, tail);
		}
		mp_write_str(w, names[i]);
		mp_write_bin(w, k->buf[i], n);
		mp_write_str(w, dropped[i]);
		mp_write_uint(w, k->total[i] - n);
	}
}
