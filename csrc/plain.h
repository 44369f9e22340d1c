/* plain.h — the reply of a command that started and broke no limit, read without building any object. */
#ifndef VJ_PLAIN_H
#define VJ_PLAIN_H

#include <stddef.h>
#include <stdint.h>

/* Where each number stands. */
enum vj_plain {
	VJ_P_ID,
	VJ_P_EXIT_CODE,
	VJ_P_SIGNAL,
	VJ_P_TIMED_OUT,
	VJ_P_LEFTOVERS,
	VJ_P_WALL_US,
	VJ_P_USER_US,
	VJ_P_SYS_US,
	VJ_P_MAX_RSS,
	VJ_P_READ,
	VJ_P_WRITTEN,
	VJ_P_PROCS,
	VJ_PLAIN_N
};

/* 1 when the message is exactly such a reply: a map with each expected key once, every value of its type and in its
 * range, and nothing behind it. 0 for anything else (an exec that failed, violations, a wrong message): that is read
 * by the general decoder, which also says what is wrong. The sender is not trusted. */
int vj_plain_read(const uint8_t *reply, size_t len, int64_t out[VJ_PLAIN_N]);

#endif
