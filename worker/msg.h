/* msg.h — bounded reader and writer for the msgpack subset that host and worker speak.
 *
 * The reader never allocates, never recurses without a bound and never looks past `end`: after the first malformed
 * or unexpected byte `err` is set (EBADMSG) and every further read returns an empty value, so a caller may read a
 * whole message and test `err` once. Source of the format: the msgpack specification (github.com/msgpack/msgpack).
 */
#ifndef VJ_MSG_H
#define VJ_MSG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define VJ_MESSAGE_MAX (64u * 1024)        /* one local message; larger bodies travel in a memfd */
#define VJ_FRAME_MAX (16u * 1024 * 1024)   /* one frame of a stream */
#define VJ_DEPTH_MAX 16                    /* nesting that mp_skip follows */
#define VJ_STREAM_MAGIC "VJWORK1\n"

enum mp_type { MP_NIL, MP_BOOL, MP_INT, MP_FLOAT, MP_STR, MP_BIN, MP_ARRAY, MP_MAP, MP_BAD };

struct mp_reader {
	const uint8_t *p, *end;
	int err; /* 0 or EBADMSG; sticky */
};

/* A string or binary that lies inside the message: not NUL-terminated, valid as long as the buffer. */
struct mp_bytes {
	const uint8_t *ptr;
	uint32_t len;
};

void mp_reader_init(struct mp_reader *r, const void *buf, size_t len);
enum mp_type mp_peek(const struct mp_reader *r);
uint32_t mp_read_map(struct mp_reader *r);   /* number of pairs; never more than bytes left / 2 */
uint32_t mp_read_array(struct mp_reader *r); /* number of elements; never more than bytes left */
struct mp_bytes mp_read_bytes(struct mp_reader *r); /* str or bin */
uint64_t mp_read_uint(struct mp_reader *r);  /* a negative number is an error */
int64_t mp_read_int(struct mp_reader *r);
bool mp_read_bool(struct mp_reader *r);
void mp_skip(struct mp_reader *r);           /* one value of any type */
double mp_read_float(struct mp_reader *r);   /* a float; an integer is an error */
bool mp_is(struct mp_bytes b, const char *text); /* equal to a C string? */
int mp_cstr(struct mp_bytes b, char *out, size_t cap); /* copy with a NUL: 0, -EINVAL (a NUL inside), -ENAMETOOLONG */

struct mp_writer {
	uint8_t *buf;
	size_t cap, len;
	bool overflow; /* sticky: what did not fit was not written */
};

void mp_writer_init(struct mp_writer *w, void *buf, size_t cap);
void mp_write_nil(struct mp_writer *w);
void mp_write_bool(struct mp_writer *w, bool v);
void mp_write_int(struct mp_writer *w, int64_t v);
void mp_write_uint(struct mp_writer *w, uint64_t v);
void mp_write_float(struct mp_writer *w, double v);
void mp_write_str(struct mp_writer *w, const char *text);
void mp_write_strn(struct mp_writer *w, const char *text, size_t len);
void mp_write_bin(struct mp_writer *w, const void *p, size_t len);
void mp_write_array(struct mp_writer *w, uint32_t n);
void mp_write_map(struct mp_writer *w, uint32_t n);
void mp_put(struct mp_writer *w, const void *p, size_t n); /* bytes as they are: values written before, or text */
/* Room for a bin of at most `max` ≤ 65535 bytes that the caller fills in place (NULL when it does not fit), and the
 * call that says how many bytes it became; nothing else may be written between the two. */
uint8_t *mp_bin_begin(struct mp_writer *w, size_t max);
void mp_bin_end(struct mp_writer *w, size_t len);

#endif
