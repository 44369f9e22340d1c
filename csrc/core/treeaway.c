/* treeaway.c — take a file out of the tree into the audit store, without being led astray by symlinks. */
#define _GNU_SOURCE 1
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "kernel.h"
#include "tree.h"

#define COPY_MAX (4 * 1024 * 1024)

int tree_open_plain(const char *path, uint64_t flags)
{
	uint64_t more = flags & O_PATH ? 0 : O_NONBLOCK | O_NOCTTY; /* openat2(2) takes nothing senseless */
	struct vj_open_how how = {.flags = flags | more | O_CLOEXEC | O_NOFOLLOW,
				  .resolve = VJ_RESOLVE_NO_SYMLINKS | VJ_RESOLVE_NO_MAGICLINKS};
	int fd = (int)syscall(VJ_SYS_openat2, AT_FDCWD, path, &how, sizeof how);
	return fd < 0 ? -errno : fd;
}

/* Copy and unlink, where the audit store is another file system. */
static int copy_away(int from, const char *name, int to, const char *new_name)
{
	char buffer[8192];
	struct stat st;
	int in = openat(from, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
	if (in < 0 || fstat(in, &st) != 0 || !S_ISREG(st.st_mode)) {
		if (in >= 0)
			close(in);
		return unlinkat(from, name, 0) == 0 ? 0 : -errno; /* a symlink or worse: its text is in the report */
	}
	int out = openat(to, new_name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	int err = out < 0 ? -errno : 0;
	for (size_t total = 0; !err && total < COPY_MAX;) {
		ssize_t n = read(in, buffer, sizeof buffer);
		if (n <= 0)
			break;
		if (write(out, buffer, (size_t)n) != n)
			err = -EIO;
		total += (size_t)n;
	}
	close(in);
	if (out >= 0)
		close(out);
	if (!err && unlinkat(from, name, 0) != 0)
		err = -errno;
	return err;
}

int tree_move_away(const struct vj_tree *t, const char *path, const char *kind, char **moved_to)
{
	static unsigned counter;
	char parent[TREE_PATH_MAX], new_name[96], moved[TREE_PATH_MAX];
	const char *slash = strrchr(path, '/');
	struct timespec now;
	if (!t->audit)
		return -ENOTDIR;
	snprintf(parent, sizeof parent, "%.*s", (int)(slash - path), path);
	clock_gettime(CLOCK_REALTIME, &now);
	snprintf(new_name, sizeof new_name, "%lld%09ld-%u-%s", (long long)now.tv_sec, now.tv_nsec,
		 __atomic_add_fetch(&counter, 1, __ATOMIC_RELAXED), kind);
	/* no symlink that the agent put above the name may lead this rename out of the tree */
	int from = tree_open_plain(parent, O_PATH | O_DIRECTORY), to = tree_open_plain(t->audit, O_PATH | O_DIRECTORY);
	int err = from < 0 ? from : to < 0 ? to : 0;
	if (!err && renameat(from, slash + 1, to, new_name) != 0)
		err = errno == EXDEV ? copy_away(from, slash + 1, to, new_name) : -errno;
	if (!err && tree_join(moved, sizeof moved, t->audit, new_name) > 0)
		*moved_to = strdup(moved);
	if (from >= 0)
		close(from);
	if (to >= 0)
		close(to);
	return err;
}

