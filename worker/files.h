/* files.h — file calls: they run in the worker, which sees what a command would see.
 *
 * Relative paths start at the working directory. Paths are resolved without the kernel's magic links (/proc/…/fd/N,
 * root, cwd, exe); only regular files are read and written; nothing waits for another process.
 */
#ifndef VJ_FILES_H
#define VJ_FILES_H

#include "msg.h"

#define FILES_INLINE_MAX (48u * 1024) /* bytes of content or entries inside a reply; more goes by descriptor */

enum file_op { FILE_NONE, FILE_READ, FILE_WRITE, FILE_STAT, FILE_LIST, FILE_MAKE_DIR, FILE_REMOVE, FILE_RENAME };

/* What a request says; the strings lie in the message. Absent fields are 0, but `follow` and `replace` are true,
 * `limit` is UINT64_MAX and body_fd is -1: the caller puts the descriptor there that came with the message. */
struct file_request {
	enum file_op op;
	int64_t id;
	struct mp_bytes path, to, content;
	uint64_t offset, limit;
	uint32_t mode;
	int body_fd; /* stays the caller's */
	bool has_id, has_mode, has_content, body, parents, exist_ok, exclusive, fsync, follow, recursive, replace;
	bool if_unchanged; /* write only when the file still has this size, mtime and inode */
	int64_t old_size, old_mtime_ns;
	uint64_t old_ino;
};

/* Reads all fields of a request map. False: not one well-formed map of the right types. An op that is not about files
 * is FILE_NONE. */
bool file_request_parse(struct file_request *rq, const void *msg, size_t len);

/* May this call take longer than a few milliseconds (a whole tree, much data, a disk's fsync)? */
bool files_slow(const struct file_request *rq);

/* Does it and appends the whole reply, an error's as well (`reply` needs FILES_INLINE_MAX + 8 KiB). Returns 0 or the
 * -errno that the reply tells; *out_fd is a descriptor to send along and then to close, or -1. */
int files_handle(const struct file_request *rq, struct mp_writer *reply, int *out_fd);

#endif
