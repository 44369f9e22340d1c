/* treecall.c — the tree at the two ends of a call, each in one step. */
#define _GNU_SOURCE 1
#include "treecall.h"

#include <stdlib.h>

#include "tree.h"

static uint64_t covers_made(struct vj_tree *t)
{
	pthread_mutex_lock(&t->lock);
	uint64_t n = t->appeared.n;
	pthread_mutex_unlock(&t->lock);
	return n;
}

int vj_tree_begin(struct vj_tree *t, uint64_t *appeared)
{
	int rc = vj_tree_sync(t);
	*appeared = covers_made(t);
	return rc;
}

int vj_tree_end(struct vj_tree *t, int idle, uint64_t appeared, uint64_t *fresh, uint8_t **buf, size_t *len)
{
	*buf = NULL;
	*len = 0;
	int rc = vj_tree_sync(t);
	uint64_t now = covers_made(t);
	*fresh = now > appeared ? now - appeared : 0;
	if (rc < 0)
		return rc; /* the next call finds that again and is refused */
	rc = vj_tree_git_audit(t, idle, buf, len);
	if (rc <= 0) {
		free(*buf);
		*buf = NULL;
	}
	return rc;
}
