/* seen.c — see seen.h for the contract. Sources: poll(2), stat(2). */
#define _GNU_SOURCE
#include "seen.h"

#include <errno.h>
#include <poll.h>
#include <stddef.h>
#include <sys/stat.h>
#include <time.h>

int vj_hung_up(int fd)
{
	struct pollfd set = { .fd = fd }; /* POLLHUP is reported without asking */
	return poll(&set, 1, 0) == 1;
}

static int64_t stamp(const struct timespec *t)
{
	return (int64_t)t->tv_sec * 1000000000 + t->tv_nsec;
}

int vj_look(const struct vj_seen *seen)
{
	struct stat st;
	int what = vj_hung_up(seen->channel) ? VJ_GONE : 0;

	if (stat(seen->dir, &st) < 0 || st.st_dev != seen->dir_dev || st.st_ino != seen->dir_ino)
		what |= VJ_MOVED;
	if (seen->file) {
		int there = stat(seen->file, &st) == 0;
		if (there != seen->file_there || (!there && errno != ENOENT))
			what |= VJ_SAVED;
		else if (there && (st.st_dev != seen->file_dev || st.st_ino != seen->file_ino ||
		                   st.st_size != seen->file_size || stamp(&st.st_mtim) != seen->file_mtime_ns ||
		                   stamp(&st.st_ctim) != seen->file_ctime_ns))
			what |= VJ_SAVED;
	}
	return what;
}
