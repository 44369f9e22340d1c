/* json.h — the same messages as JSON, one object a line, for people and for hosts without msgpack.
 *
 * A string is a msgpack str. Bytes that are not UTF-8 travel as base64 under the key with `_b64` behind it: for a key
 * `x`, `"x_b64": "/w=="` is the bin ff; when x is an array, all strings in the array are base64. Source: RFC 8259,
 * RFC 3629 (no overlong forms, no surrogates), RFC 4648 section 4 (padded, no white space).
 */
#ifndef VJ_JSON_H
#define VJ_JSON_H

#include "msg.h"

#define JSON_KEYS_MAX 64 /* keys of one object */

/* An output of this size never overflows: the worst input is an array of short fractions; what is open counts for itself. */
#define JSON_TO_MSGPACK_MAX(len) ((len) / 4 * 9 + 128)

/* One JSON object, white space around it allowed, to a msgpack map. A number with a fraction or an exponent becomes an
 * integer where it is one, else a float near it. Appends to `w`; on an error nothing is appended.
 * Returns 0, -EBADMSG (not one object, a key twice, too deep, not UTF-8) or -EMSGSIZE (does not fit). */
int json_to_msgpack(const char *text, size_t len, struct mp_writer *w);

/* One msgpack map to a JSON object and a newline, appended to `w` (plain text, not a msgpack value).
 * Returns 0, -EBADMSG (not one map, a float, a key that is not text, too deep) or -EMSGSIZE; then nothing is appended. */
int msgpack_to_json(const void *msg, size_t len, struct mp_writer *w);

/* The length of the UTF-8 sequence at p < end, 0 when it is not one. */
unsigned json_utf8(const uint8_t *p, const uint8_t *end);

#endif
