/* seen.h — what the host looks at before each call, in one function that never blocks. */
#ifndef VJ_SEEN_H
#define VJ_SEEN_H

#include <stdint.h>

/* What a caller trusts without looking again: a worker's socket and the files it was started for. The strings are the
 * caller's and live as long as the structure. */
struct vj_seen {
	int channel;
	const char *dir;      /* this directory is still the one with … */
	uint64_t dir_dev, dir_ino;
	const char *file;     /* NULL: no file. This file is still … */
	int file_there;       /* 0: it did not exist */
	uint64_t file_dev, file_ino;
	int64_t file_size, file_mtime_ns, file_ctime_ns;
};
#define VJ_GONE 1  /* the worker closed its end */
#define VJ_MOVED 2 /* the directory is another one, or cannot be looked at */
#define VJ_SAVED 4 /* the file is another one, changed, came or went */
/* 0 while all of it holds, else VJ_GONE | VJ_MOVED | VJ_SAVED. Never blocks. */
int vj_look(const struct vj_seen *seen);

/* 1 when the other end is closed, 0 when not. */
int vj_hung_up(int fd);

#endif
