/* treecall.h — the tree at the two ends of a call, each in one step. */
#ifndef VJ_TREECALL_H
#define VJ_TREECALL_H

#include <stddef.h>
#include <stdint.h>

#include "treewatch.h"

/* vj_tree_sync, and how many covers have been made after the scan until now. */
int vj_tree_begin(struct vj_tree *t, uint64_t *appeared);

/* What a call left: vj_tree_sync and vj_tree_git_audit (its `idle` and *buf). *fresh: covers made since `appeared`.
 * Returns how many redirects were found, or −errno; *buf is NULL when there is none. */
int vj_tree_end(struct vj_tree *t, int idle, uint64_t appeared, uint64_t *fresh, uint8_t **buf, size_t *len);

#endif
