/* treepolicy.c — did anything write to the policy file between its arrival and its protection? */
#define _GNU_SOURCE 1
#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include "tree.h"

/* Has somebody the policy file open for writing? A read lease is given only when nobody has, fcntl(2). */
static bool policy_has_writer(const struct vj_tree *t)
{
	char path[TREE_PATH_MAX];
	if (tree_join(path, sizeof path, t->workspace, "vectora.toml") < 0)
		return false;
	int fd = open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
	if (fd < 0)
		return false;
	bool writer = fcntl(fd, F_SETLEASE, F_RDLCK) != 0 && errno == EAGAIN;
	fcntl(fd, F_SETLEASE, F_UNLCK);
	close(fd);
	return writer;
}

/* The protection stands: look once more for writes that came before it. */
void tree_policy_settle(struct vj_tree *t)
{
	tree_watch_lock();
	bool arrived = t->policy_arrived;
	if (arrived)
		tree_watch_drain();
	tree_watch_unlock();
	if (!arrived)
		return;
	bool writer = policy_has_writer(t);
	tree_watch_lock();
	t->policy_arrived = false;
	t->policy_raced = t->policy_raced || writer;
	tree_watch_unlock();
}
