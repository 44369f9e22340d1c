/* treespec.c — a tree from its description, and its end. */
#define _GNU_SOURCE 1
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "msg.h"
#include "tree.h"

#define ENTRIES_DEFAULT 5000000u
#define MS_DEFAULT 30000u
#define WATCHES_DEFAULT (1u << 20)
#define ROOTS_MAX 4096
#define NAMES_MAX 65536

void vj_free(void *p)
{
	free(p);
}

/* An absolute path without a slash at its end, NUL-terminated. NULL: malformed (err is set) or no memory. */
static char *take_path(struct mp_reader *r, int *err)
{
	struct mp_bytes b = mp_read_bytes(r);
	size_t len = b.len;
	if (r->err || len == 0 || len >= TREE_PATH_MAX || b.ptr[0] != '/' || memchr(b.ptr, 0, len)) {
		*err = r->err ? -EBADMSG : -EINVAL;
		return NULL;
	}
	while (len > 1 && b.ptr[len - 1] == '/')
		len--;
	char *copy = malloc(len + 1);
	if (!copy) {
		*err = -ENOMEM;
		return NULL;
	}
	memcpy(copy, b.ptr, len);
	copy[len] = 0;
	return copy;
}

static int take_roots(struct vj_tree *t, struct mp_reader *r)
{
	uint32_t n = mp_read_array(r);
	int err = 0;
	if (r->err || n > ROOTS_MAX)
		return -EBADMSG;
	t->roots = calloc(n + 1u, sizeof *t->roots);
	if (!t->roots)
		return -ENOMEM;
	for (uint32_t i = 0; i < n && !err; i++) {
		if (mp_read_array(r) != 2)
			return -EBADMSG;
		struct tree_root *root = &t->roots[t->nroots];
		root->path = take_path(r, &err);
		if (err)
			return err;
		root->len = strlen(root->path);
		root->writable = mp_read_bool(r);
		root->top = true;
		t->nroots++;
	}
	return 0;
}

static int take_names(struct vj_tree *t, struct mp_reader *r, enum name_kind kind)
{
	uint32_t n = mp_read_array(r);
	int err = 0;
	if (r->err || n > NAMES_MAX || t->nnames > NAMES_MAX)
		return -EBADMSG;
	struct tree_name *more = realloc(t->names, (t->nnames + n + 1u) * sizeof *more);
	if (!more)
		return -ENOMEM;
	t->names = more;
	for (uint32_t i = 0; i < n; i++) {
		struct tree_name *name = &t->names[t->nnames];
		name->path = take_path(r, &err);
		if (err)
			return err;
		name->len = strlen(name->path);
		name->kind = kind;
		size_t parent = (size_t)(strrchr(name->path, '/') - name->path);
		name->parent_len = parent ? parent : 1;
		t->nnames++;
	}
	return 0;
}

static int take_masks(struct vj_tree *t, struct mp_reader *r)
{
	uint32_t n = mp_read_array(r);
	for (uint32_t i = 0; i < n; i++) {
		if (mp_read_array(r) != 3)
			return -EBADMSG;
		struct mp_bytes pattern = mp_read_bytes(r);
		bool negate = mp_read_bool(r), floor = mp_read_bool(r);
		if (r->err)
			return -EBADMSG;
		int err = gi_add(t->rules, pattern.ptr, pattern.len, negate, floor);
		if (err)
			return err;
	}
	return r->err ? -EBADMSG : 0;
}

static int take_known(struct vj_tree *t, struct mp_reader *r)
{
	uint32_t n = mp_read_array(r);
	for (uint32_t i = 0; i < n; i++) {
		struct tree_object o = {0};
		if (mp_read_array(r) != 3)
			return -EBADMSG;
		o.dev = mp_read_uint(r);
		o.ino = mp_read_uint(r);
		o.btime = mp_read_int(r);
		int err = r->err ? -EBADMSG : tree_known_add(t, &o);
		if (err)
			return err;
	}
	return r->err ? -EBADMSG : 0;
}

static int take_field(struct vj_tree *t, struct mp_bytes key, struct mp_reader *r)
{
	int err = 0;
	if (mp_is(key, "roots"))
		return take_roots(t, r);
	if (mp_is(key, "masks"))
		return take_masks(t, r);
	if (mp_is(key, "mask_paths"))
		return take_names(t, r, NAME_MASK);
	if (mp_is(key, "protect"))
		return take_names(t, r, NAME_PROTECT);
	if (mp_is(key, "known"))
		return take_known(t, r);
	if (mp_is(key, "workspace")) {
		free(t->workspace);
		t->workspace = take_path(r, &err);
		return err;
	}
	if (mp_is(key, "audit") && mp_peek(r) != MP_NIL) {
		free(t->audit);
		t->audit = take_path(r, &err);
		return err;
	}
	if (mp_is(key, "git"))
		t->git = (int)mp_read_uint(r);
	else if (mp_is(key, "max_entries"))
		t->max_entries = mp_read_uint(r);
	else if (mp_is(key, "max_ms"))
		t->max_ms = mp_read_uint(r);
	else if (mp_is(key, "max_watches"))
		t->max_watches = mp_read_uint(r);
	else if (mp_is(key, "uid0"))
		t->uid0 = mp_read_uint(r) != 0;
	else
		mp_skip(r);
	return r->err ? -EBADMSG : 0;
}

/* Which roots are walked by themselves; the policy file is protected whatever the description says. */
static int finish(struct vj_tree *t)
{
	if (!t->workspace || t->git < 0 || t->git > VJ_GIT_READ_ONLY)
		return -EINVAL;
	t->workspace_len = strlen(t->workspace);
	t->max_entries = t->max_entries ? t->max_entries : ENTRIES_DEFAULT;
	t->max_ms = t->max_ms ? t->max_ms : MS_DEFAULT;
	t->max_watches = t->max_watches ? t->max_watches : WATCHES_DEFAULT;
	for (size_t i = 0; i < t->nroots; i++)
		for (size_t k = 0; k < t->nroots; k++) {
			const struct tree_root *a = &t->roots[i], *b = &t->roots[k];
			bool in = a->len >= b->len && memcmp(a->path, b->path, b->len) == 0 &&
				  (a->len == b->len || a->path[b->len] == '/' || b->len == 1);
			if (i != k && in && (a->len > b->len || i > k))
				t->roots[i].top = false;
		}
	if (t->audit && tree_root_of(t, t->audit, strlen(t->audit)))
		return -EINVAL; /* the agent could take back what was moved there */
	struct tree_name *more = realloc(t->names, (t->nnames + 1) * sizeof *more);
	if (!more)
		return -ENOMEM;
	t->names = more;
	size_t at = t->workspace_len == 1 ? 0 : t->workspace_len;
	char *policy = malloc(at + sizeof "/vectora.toml");
	if (!policy)
		return -ENOMEM;
	memcpy(policy, t->workspace, at);
	memcpy(policy + at, "/vectora.toml", sizeof "/vectora.toml");
	t->names[t->nnames++] = (struct tree_name){policy, strlen(policy), at ? at : 1, NAME_PROTECT};
	return gi_compile(t->rules, true);
}

int vj_tree_new(const uint8_t *spec, size_t len, struct vj_tree **out)
{
	struct mp_reader r;
	struct vj_tree *t = calloc(1, sizeof *t);
	*out = NULL;
	if (!t)
		return -ENOMEM;
	pthread_mutex_init(&t->lock, NULL);
	t->mntns_fd = t->userns_fd = -1;
	int err = gi_new(&t->rules);
	mp_reader_init(&r, spec, len);
	uint32_t n = mp_read_map(&r);
	for (uint32_t i = 0; i < n && !err && !r.err; i++) {
		struct mp_bytes key = mp_read_bytes(&r);
		err = take_field(t, key, &r);
	}
	if (!err)
		err = r.err ? -EBADMSG : finish(t);
	tree_watch_join(t);
	if (err) {
		vj_tree_free(t);
		return err;
	}
	*out = t;
	return 0;
}

void vj_tree_free(struct vj_tree *t)
{
	if (!t || t->forks != tree_watch.forks)
		return; /* the parent's: not ours to free */
	tree_watch_leave(t);
	while (t->tops)
		tree_dir_free(t, t->tops);
	for (size_t i = 0; i < t->nqueue; i++)
		free(t->queue[i].name);
	free(t->queue);
	free(t->lost);
	t->nlost = 0;
	tree_dirs_bury(t);
	free(t->dirs);
	tree_items_free(t);
	for (size_t i = 0; i < t->nroots; i++)
		free(t->roots[i].path);
	for (size_t i = 0; i < t->nnames; i++)
		free(t->names[i].path);
	free(t->roots);
	free(t->names);
	free(t->workspace);
	free(t->audit);
	tree_list_free(&t->links);
	tree_list_free(&t->planted);
	tree_list_free(&t->pinned);
	tree_list_free(&t->appeared);
	tree_list_free(&t->unreadable);
	tree_list_free(&t->host_runs);
	tree_git_free(t);
	tree_list_free(&t->baseline);
	gi_free(t->rules);
	if (t->mntns_fd >= 0)
		close(t->mntns_fd);
	if (t->userns_fd >= 0)
		close(t->userns_fd);
	pthread_mutex_destroy(&t->lock);
	free(t);
}

int vj_tree_scan(struct vj_tree *t)
{
	pthread_mutex_lock(&t->lock);
	int err = tree_scan_all(t);
	pthread_mutex_unlock(&t->lock);
	return err;
}

int vj_tree_ops(struct vj_tree *t, uint8_t **buf, size_t *len)
{
	pthread_mutex_lock(&t->lock);
	int err = tree_ops_encode(t, true, buf, len);
	pthread_mutex_unlock(&t->lock);
	return err;
}

int vj_tree_applied(struct vj_tree *t, const int32_t *results, size_t count)
{
	size_t retry;
	pthread_mutex_lock(&t->lock);
	int err = tree_ops_answer(t, results, count, true, &retry);
	pthread_mutex_unlock(&t->lock);
	return retry ? 0 : err; /* the first sync looks at those again */
}
