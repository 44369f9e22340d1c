/* json.c — JSON to msgpack: one pass that stops at the first error and recurses at most VJ_DEPTH_MAX deep. */
#include "json.h"

#include <errno.h>
#include <float.h>
#include <string.h>

#define SUFFIX "_b64"
#define SUFFIX_LEN (sizeof SUFFIX - 1)
#define HEADER 5u /* str, bin and array headers are written before their size is known: a tag and 32 bits */

static const char digits64[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

static void put_byte(struct mp_writer *w, unsigned c)
{
	uint8_t b = (uint8_t)c;
	mp_put(w, &b, 1);
}

struct json {
	const uint8_t *p, *end;
	struct mp_writer *w;
	bool bad; /* sticky; nothing is left to read then */
};

static void bad(struct json *j)
{
	j->bad = true;
	j->p = j->end;
}

/* The next byte without taking it; 0, which is never part of JSON, at the end. */
static uint8_t look(const struct json *j)
{
	return j->p < j->end ? *j->p : 0;
}

static bool take(struct json *j, uint8_t c)
{
	if (look(j) != c || j->p == j->end)
		return false;
	j->p++;
	return true;
}

static void spaces(struct json *j)
{
	while (j->p < j->end && (*j->p == ' ' || *j->p == '\t' || *j->p == '\n' || *j->p == '\r'))
		j->p++;
}

static void word(struct json *j, const char *text)
{
	size_t n = strlen(text);
	if (n > (size_t)(j->end - j->p) || memcmp(j->p, text, n) != 0)
		bad(j);
	else
		j->p += n;
}

/* Room for a header at the end of the output; the value is there only if the output did not overflow. */
static size_t begin(struct mp_writer *w)
{
	size_t at = w->len;
	mp_put(w, "\0\0\0\0", HEADER);
	return at;
}

static void finish(struct mp_writer *w, size_t at, unsigned tag, size_t n)
{
	if (w->overflow)
		return;
	w->buf[at] = (uint8_t)tag;
	for (unsigned i = HEADER - 1; i > 0; i--, n >>= 8)
		w->buf[at + i] = (uint8_t)n;
}

static unsigned hex4(struct json *j)
{
	unsigned v = 0;
	for (int i = 0; i < 4; i++) {
		unsigned c = look(j);
		unsigned d = c >= '0' && c <= '9' ? c - '0' : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10 : 16;
		if (d > 15) {
			bad(j);
			return 0;
		}
		v = v << 4 | d;
		j->p++;
	}
	return v;
}

static void escape(struct json *j)
{
	static const char names[] = "\"\\/bfnrt", values[] = "\"\\/\b\f\n\r\t";
	const char *at = look(j) ? strchr(names, look(j)) : NULL;
	if (at) {
		j->p++;
		put_byte(j->w, (uint8_t)values[at - names]);
		return;
	}
	if (!take(j, 'u')) {
		bad(j);
		return;
	}
	uint32_t c = hex4(j);
	if (c >= 0xd800 && c < 0xdc00) { /* the first half of a pair */
		uint32_t low = take(j, '\\') && take(j, 'u') ? hex4(j) : 0;
		c = low >= 0xdc00 && low < 0xe000 ? 0x10000 + ((c - 0xd800) << 10) + (low - 0xdc00) : 0xdc00;
	}
	if (c >= 0xdc00 && c < 0xe000) {
		bad(j);
	} else if (c < 0x80) {
		put_byte(j->w, c);
	} else {
		unsigned n = c < 0x800 ? 1 : c < 0x10000 ? 2 : 3; /* continuation bytes */
		put_byte(j->w, (0xff80u >> n & 0xff) | c >> (6 * n));
		while (n--)
			put_byte(j->w, 0x80 | (c >> (6 * n) & 0x3f));
	}
}

/* The string at the next byte, appended to the output: its length. */
static size_t string(struct json *j)
{
	size_t start = j->w->len;
	if (!take(j, '"'))
		bad(j);
	while (!j->bad && !take(j, '"')) {
		const uint8_t *run = j->p;
		while (j->p < j->end && *j->p >= 0x20 && *j->p < 0x80 && *j->p != '"' && *j->p != '\\')
			j->p++;
		mp_put(j->w, run, (size_t)(j->p - run));
		if (j->p == j->end || *j->p < 0x20) {
			bad(j);
		} else if (*j->p >= 0x80) {
			unsigned n = json_utf8(j->p, j->end);
			if (!n) {
				bad(j);
				break;
			}
			mp_put(j->w, j->p, n);
			j->p += n;
		} else if (take(j, '\\')) {
			escape(j);
		}
	}
	return j->w->len - start;
}

/* Decode n base64 digits where they are; the number of bytes, or SIZE_MAX. */
static size_t decode64(uint8_t *s, size_t n)
{
	uint8_t *out = s;
	if (n % 4)
		return SIZE_MAX;
	for (const uint8_t *p = s, *end = s + n; p < end; p += 4) {
		uint32_t v = 0;
		int pad = p + 4 < end || p[3] != '=' ? 0 : p[2] != '=' ? 1 : 2;
		for (int i = 0; i < 4; i++) {
			const char *d = i >= 4 - pad ? digits64 : p[i] ? strchr(digits64, p[i]) : NULL;
			if (!d)
				return SIZE_MAX;
			v = v << 6 | (uint32_t)(d - digits64);
		}
		if (v & ((1u << 8 * pad) - 1)) /* bits that no encoder sets */
			return SIZE_MAX;
		for (int i = 0; i < 3 - pad; i++)
			*out++ = (uint8_t)(v >> (16 - 8 * i));
	}
	return (size_t)(out - s);
}

static void string_value(struct json *j, bool b64)
{
	size_t at = begin(j->w), n = string(j);
	if (b64 && !j->bad && !j->w->overflow) {
		n = decode64(j->w->buf + at + HEADER, n);
		if (n == SIZE_MAX) {
			bad(j);
			return;
		}
		j->w->len = at + HEADER + n;
	}
	finish(j->w, at, b64 ? 0xc6 : 0xdb, n);
}

/* v × 10^e; exact powers up to 10^22 keep short decimals correctly rounded. */
static double scale(double v, int e)
{
	int step = e < 0 ? 1 : -1;
	while (e && v > 0 && v <= DBL_MAX) {
		double ten = 1;
		for (int i = 0; e && i < 22; i++, e += step)
			ten *= 10;
		v = step > 0 ? v / ten : v * ten;
	}
	return v;
}

/* The number from `p` to the next byte, which has a fraction or an exponent: near the value that was written. */
static void fraction(struct json *j, const uint8_t *p, bool negative)
{
	bool point = false, down = false;
	uint64_t m = 0;
	int e = 0, shift = 0;

	for (; p < j->p && (*p | 32) != 'e'; p++) {
		if (*p == '.')
			point = true;
		else if (m >= 100000000000000000u) /* 18 digits are more than a double has */
			shift += !point;
		else {
			m = m * 10 + (*p - '0');
			shift -= point;
		}
	}
	for (; p < j->p; p++)
		if (*p == '-')
			down = true;
		else if (*p >= '0' && *p <= '9' && e < 100000)
			e = e * 10 + (*p - '0');
	double v = scale((double)m, shift + (down ? -e : e));
	if (v > DBL_MAX)
		bad(j);
	else if (v >= 9007199254740992.0 || v != (double)(uint64_t)v) /* 2^53 */
		mp_write_float(j->w, negative ? -v : v);
	else
		mp_write_int(j->w, negative ? -(int64_t)v : (int64_t)v);
}

/* The whole number from `p` to the next byte: exact or an error. */
static void whole(struct json *j, const uint8_t *p, bool negative)
{
	uint64_t m = 0;
	for (; p < j->p; p++) {
		unsigned d = *p - (unsigned)'0';
		if (m > (UINT64_MAX - d) / 10) {
			bad(j);
			return;
		}
		m = m * 10 + d;
	}
	if (!negative)
		mp_write_uint(j->w, m);
	else if (m <= (uint64_t)INT64_MAX + 1)
		mp_write_int(j->w, (int64_t)(0 - m));
	else
		bad(j);
}

static size_t digits(struct json *j)
{
	const uint8_t *start = j->p;
	while (look(j) >= '0' && look(j) <= '9')
		j->p++;
	return (size_t)(j->p - start);
}

static void number(struct json *j)
{
	bool negative = take(j, '-'), is_whole = true;
	const uint8_t *start = j->p;
	size_t n = digits(j);
	bool ok = n == 1 || (n && *start != '0');

	if (take(j, '.')) {
		is_whole = false;
		ok = ok && digits(j);
	}
	if (take(j, 'e') || take(j, 'E')) {
		is_whole = false;
		if (!take(j, '-'))
			take(j, '+');
		ok = ok && digits(j);
	}
	if (!ok)
		bad(j);
	else if (is_whole)
		whole(j, start, negative);
	else
		fraction(j, start, negative);
}

static void value(struct json *j, int depth, bool b64);

static void array(struct json *j, int depth, bool b64)
{
	size_t at = begin(j->w), n = 0;
	spaces(j);
	if (!take(j, ']')) {
		do {
			value(j, depth, b64);
			n++;
		} while (!j->bad && take(j, ','));
		if (!take(j, ']'))
			bad(j);
	}
	finish(j->w, at, 0xdd, n);
}

/* The key that was written at `at`, compared with the n before it. */
static bool known(const struct mp_writer *w, const size_t *starts, const size_t *lengths, unsigned n)
{
	for (unsigned i = 0; i < n; i++)
		if (lengths[i] == lengths[n] && memcmp(w->buf + starts[i], w->buf + starts[n], lengths[n]) == 0)
			return true;
	return false;
}

static void object(struct json *j, int depth)
{
	struct mp_writer *w = j->w;
	size_t starts[JSON_KEYS_MAX], lengths[JSON_KEYS_MAX], at = w->len;
	unsigned n = 0;

	mp_put(w, "\xde\0", 3); /* a map with a 16-bit count */
	spaces(j);
	if (!take(j, '}')) {
		do {
			if (n == JSON_KEYS_MAX) {
				bad(j);
				break;
			}
			spaces(j);
			size_t key = begin(w), len = string(j);
			if (j->bad || w->overflow)
				break;
			starts[n] = key + HEADER;
			bool b64 = len > SUFFIX_LEN && !memcmp(w->buf + w->len - SUFFIX_LEN, SUFFIX, SUFFIX_LEN);
			if (b64) {
				len -= SUFFIX_LEN;
				w->len -= SUFFIX_LEN;
			}
			lengths[n] = len;
			finish(w, key, 0xdb, len);
			spaces(j);
			if (known(w, starts, lengths, n) || !take(j, ':'))
				bad(j);
			value(j, depth, b64);
			n++;
		} while (!j->bad && !w->overflow && take(j, ','));
		if (!take(j, '}'))
			bad(j);
	}
	if (!w->overflow)
		w->buf[at + 2] = (uint8_t)n;
}

static void value(struct json *j, int depth, bool b64)
{
	spaces(j);
	uint8_t c = look(j);
	if (j->w->overflow || ((c == '{' || c == '[') && depth == VJ_DEPTH_MAX)) {
		bad(j);
	} else if (c == '"') {
		string_value(j, b64);
	} else if (take(j, '[')) {
		array(j, depth + 1, b64);
	} else if (c == 'n') {
		word(j, "null");
		mp_write_nil(j->w);
	} else if (take(j, '{')) {
		object(j, depth + 1);
	} else if (b64) {
		bad(j); /* base64 of something that is no string */
	} else if (c == 't' || c == 'f') {
		word(j, c == 't' ? "true" : "false");
		mp_write_bool(j->w, c == 't');
	} else {
		number(j);
	}
	spaces(j);
}

int json_to_msgpack(const char *text, size_t len, struct mp_writer *w)
{
	struct json j = {.p = (const uint8_t *)text, .end = (const uint8_t *)text + len, .w = w};
	size_t start = w->len;

	spaces(&j);
	if (look(&j) != '{')
		bad(&j);
	else
		value(&j, 0, false);
	if (!w->overflow && !j.bad && j.p == j.end)
		return 0;
	int e = w->overflow ? -EMSGSIZE : -EBADMSG;
	w->len = start;
	w->overflow = false;
	return e;
}
