/* plain.c — see plain.h for the contract. */
#include "plain.h"

#include "msg.h"

#define SEEN_ERRNO (1u << VJ_PLAIN_N)
#define SEEN_STAGE (2u << VJ_PLAIN_N)
#define SEEN_USAGE (4u << VJ_PLAIN_N)
#define SEEN_ALL ((8u << VJ_PLAIN_N) - 1)

static const struct {
	const char *name;
	uint8_t at;
	int64_t max;
} outer[] = {
	{ "id", VJ_P_ID, INT64_MAX },
	{ "exit_code", VJ_P_EXIT_CODE, 255 },
	{ "signal", VJ_P_SIGNAL, 64 },
	{ "leftovers", VJ_P_LEFTOVERS, INT64_MAX },
}, inner[] = {
	{ "wall_us", VJ_P_WALL_US, INT64_MAX },
	{ "user_us", VJ_P_USER_US, INT64_MAX },
	{ "sys_us", VJ_P_SYS_US, INT64_MAX },
	{ "max_rss", VJ_P_MAX_RSS, INT64_MAX },
	{ "read", VJ_P_READ, INT64_MAX },
	{ "written", VJ_P_WRITTEN, INT64_MAX },
	{ "procs", VJ_P_PROCS, INT64_MAX },
};

/* Read one number in 0…max; the bit of what was seen, 0 when it is no such number. */
static unsigned number(struct mp_reader *r, uint8_t at, int64_t max, int64_t *out)
{
	if (mp_peek(r) != MP_INT)
		return 0;
	uint64_t v = mp_read_uint(r);
	if (r->err || v > (uint64_t)max)
		return 0;
	out[at] = (int64_t)v;
	return 1u << at;
}

static unsigned read_usage(struct mp_reader *r, int64_t *out)
{
	unsigned seen = SEEN_USAGE;
	if (mp_peek(r) != MP_MAP)
		return 0;
	for (uint32_t n = mp_read_map(r); n; n--) {
		struct mp_bytes key = mp_read_bytes(r);
		unsigned bit = 0;
		for (size_t i = 0; i < sizeof inner / sizeof *inner && !bit; i++)
			if (mp_is(key, inner[i].name))
				bit = number(r, inner[i].at, inner[i].max, out);
		if (!bit || (seen & bit))
			return 0;
		seen |= bit;
	}
	return seen;
}

static unsigned read_pair(struct mp_reader *r, int64_t *out)
{
	int64_t ignored[1];
	if (mp_peek(r) != MP_STR)
		return 0;
	struct mp_bytes key = mp_read_bytes(r);
	for (size_t i = 0; i < sizeof outer / sizeof *outer; i++)
		if (mp_is(key, outer[i].name))
			return number(r, outer[i].at, outer[i].max, out);
	if (mp_is(key, "timed_out")) {
		if (mp_peek(r) != MP_BOOL)
			return 0;
		out[VJ_P_TIMED_OUT] = mp_read_bool(r);
		return 1u << VJ_P_TIMED_OUT;
	}
	if (mp_is(key, "exec_errno"))
		return number(r, 0, 0, ignored) ? SEEN_ERRNO : 0;
	if (mp_is(key, "stage"))
		return mp_peek(r) == MP_STR && mp_read_bytes(r).len == 0 ? SEEN_STAGE : 0;
	return mp_is(key, "usage") ? read_usage(r, out) : 0;
}

int vj_plain_read(const uint8_t *reply, size_t len, int64_t out[VJ_PLAIN_N])
{
	struct mp_reader r;
	unsigned seen = 0;

	mp_reader_init(&r, reply, len);
	if (mp_peek(&r) != MP_MAP)
		return 0;
	for (uint32_t n = mp_read_map(&r); n; n--) {
		unsigned bits = read_pair(&r, out);
		if (!bits || (seen & bits))
			return 0;
		seen |= bits;
	}
	return seen == SEEN_ALL && !r.err && r.p == r.end;
}
