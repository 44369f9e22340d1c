/* fileops.h — what the files of the file calls share among each other. */
#ifndef VJ_FILEOPS_H
#define VJ_FILEOPS_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include "files.h"

#include <sys/stat.h>
#include <sys/syscall.h>

#ifndef SYS_openat2
#define SYS_openat2 437 /* 5.6 */
#endif

#define VJ_PATH_MAX 4096 /* PATH_MAX of the kernel, with the NUL */
#define E_NOT_REGULAR 4000 /* inside the file calls only: EINVAL with a better text */

/* openat(2) with O_CLOEXEC, without magic links where the kernel has openat2. A descriptor or -errno. */
int file_open(int dir, const char *path, int flags);

/* A directory and a name in it, as the calls that create, remove and rename want it. */
struct place {
	int dir;    /* AT_FDCWD or a descriptor of its own */
	char *name; /* the last component, not resolved; inside buf */
	bool slash; /* the path ended in a slash: only a directory is meant */
	char buf[VJ_PATH_MAX];
};

/* 0 or -errno; place_free in both cases. With `make`, missing directories before the name are made. */
int place_find(struct place *p, struct mp_bytes path, bool make);
int place_follow(struct place *p, bool make); /* p names a symlink: now it names what the link says */
void place_free(struct place *p);

/* The entries of a directory, without `.` and `..`. */
struct dirent_reader {
	int fd, err, at, len;
	void *buf; /* aligned to 8 */
	unsigned size;
};
/* d_type and d_ino are hints; the name is valid until the next call. NULL: the end, or err < 0. */
const char *dirent_next(struct dirent_reader *d, uint8_t *type);

int may_have_size(uint64_t size); /* -EFBIG past RLIMIT_FSIZE, where a write sends SIGXFSZ */
int write_all(int fd, const void *p, size_t n); /* 0 or -errno */
int64_t stat_mtime_ns(const struct stat *st); /* saturates: a file can have any time */
const char *type_name(mode_t mode);

/* Each appends its reply after this many pairs' header was begun by reply_begin. */
void reply_begin(struct mp_writer *w, const struct file_request *rq, uint32_t pairs);
void reply_stat(struct mp_writer *w, const struct stat *st); /* 4 pairs: size, mtime_ns, ino, mode */

/* One function a call: 0 or -errno; what it wrote before an error is dropped. */
int file_write(const struct file_request *rq, struct mp_writer *w);
int file_list(const struct file_request *rq, struct mp_writer *w, int *out_fd);
int file_make_dir(const struct file_request *rq, struct mp_writer *w);
int file_remove(const struct file_request *rq, struct mp_writer *w);
int file_rename(const struct file_request *rq, struct mp_writer *w);

#endif
