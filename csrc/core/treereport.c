/* treereport.c — what is covered and protected now, and what the walk and the watch could not do. */
#define _GNU_SOURCE 1
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "msg.h"
#include "tree.h"

static size_t list_size(const struct tree_list *l)
{
	size_t n = 32;
	for (size_t i = 0; i < l->n; i++)
		n += strlen(l->at[i]) + 32;
	return n;
}

static void write_list(struct mp_writer *w, const char *key, const struct tree_list *l)
{
	mp_write_str(w, key);
	mp_write_array(w, (uint32_t)l->n);
	for (size_t i = 0; i < l->n; i++)
		mp_write_bin(w, l->at[i], strlen(l->at[i]));
}

static int item_path(const void *a, const void *b)
{
	return strcmp((*(struct vj_item *const *)a)->path, (*(struct vj_item *const *)b)->path);
}

static bool is_wanted(const struct vj_item *it, enum item_what what, unsigned flags)
{
	return it->what == what && (it->flags & flags) == flags && !(it->flags & ITEM_INNER);
}

static void write_items(struct mp_writer *w, const char *key, struct vj_item *const *all, size_t n, enum item_what what,
			unsigned flags)
{
	uint32_t count = 0;
	for (size_t i = 0; i < n; i++)
		count += is_wanted(all[i], what, flags);
	mp_write_str(w, key);
	mp_write_array(w, count);
	for (size_t i = 0; i < n; i++)
		if (is_wanted(all[i], what, flags))
			mp_write_bin(w, all[i]->path, all[i]->len);
}

static void write_object(struct mp_writer *w, const struct tree_object *o)
{
	mp_write_array(w, 3);
	mp_write_uint(w, o->dev);
	mp_write_uint(w, o->ino);
	mp_write_int(w, o->btime);
}

static void write_known(struct mp_writer *w, const struct vj_tree *t, struct vj_item *const *all, size_t n)
{
	mp_write_str(w, "known");
	mp_write_array(w, (uint32_t)(t->ncovers + t->nknown));
	for (size_t i = 0; i < n; i++)
		if (all[i]->what == ITEM_COVER)
			write_object(w, &all[i]->object);
	for (size_t i = 0; i < t->nknown; i++)
		write_object(w, &t->known[i]);
}

static void write_number(struct mp_writer *w, const char *key, uint64_t v)
{
	mp_write_str(w, key);
	mp_write_uint(w, v);
}

static void write_hazards(struct mp_writer *w, const struct tree_list *l, const char *kind)
{
	for (size_t i = 0; i < l->n; i++) {
		mp_write_array(w, 2);
		mp_write_bin(w, l->at[i], strlen(l->at[i]));
		mp_write_str(w, kind);
	}
}

static void write_report(struct mp_writer *w, const struct vj_tree *t, struct vj_item *const *all, size_t n, bool raced)
{
	mp_write_map(w, 19);
	write_items(w, "masks", all, n, ITEM_COVER, 0);
	write_items(w, "history", all, n, ITEM_COVER, ITEM_HISTORY);
	write_items(w, "protected", all, n, ITEM_RO, 0);
	write_items(w, "pins", all, n, ITEM_PIN, 0);
	mp_write_str(w, "gits");
	mp_write_array(w, (uint32_t)t->ngits);
	for (size_t i = 0; i < t->ngits; i++)
		mp_write_bin(w, t->gits[i].path, strlen(t->gits[i].path));
	write_list(w, "planted", &t->planted);
	write_list(w, "appeared", &t->appeared);
	mp_write_str(w, "hazards");
	mp_write_array(w, (uint32_t)(t->unreadable.n + t->host_runs.n));
	write_hazards(w, &t->unreadable, "unreadable_directory");
	write_hazards(w, &t->host_runs, "host_runs");
	mp_write_str(w, "policy_raced");
	mp_write_bool(w, raced);
	mp_write_str(w, "complete");
	mp_write_bool(w, t->complete && t->scanned);
	mp_write_str(w, "reason");
	char reason[2 * TREE_REASON_MAX + 2];
	snprintf(reason, sizeof reason, "%s%s%s", t->reason, t->reason[0] && t->no_watch[0] ? "; " : "", t->no_watch);
	mp_write_str(w, reason);
	write_number(w, "entries", t->entries);
	write_number(w, "dirs", t->ndirs_seen);
	write_number(w, "watches", t->watches);
	write_number(w, "us", (uint64_t)(t->ms * 1000));
	write_number(w, "ms", (uint64_t)t->ms);
	mp_write_str(w, "watch");
	mp_write_str(w, !t->scanned ? "off" : t->rescan_mode ? "rescan" : "inotify");
	write_number(w, "rescans", t->rescans);
	write_known(w, t, all, n);
}

static void note_planted(struct vj_tree *t)
{
	char path[TREE_PATH_MAX];
	int n = tree_join(path, sizeof path, t->workspace, "vectora.toml");
	tree_watch_lock();
	bool planted = t->policy_planted;
	tree_watch_unlock();
	if (planted && n > 0)
		tree_list_add(&t->planted, path, (size_t)n);
}

int vj_tree_report(struct vj_tree *t, uint8_t **buf, size_t *len)
{
	pthread_mutex_lock(&t->lock);
	size_t n = 0, size = 2048;
	struct vj_item **all = malloc((t->nitems + 1) * sizeof(struct vj_item *));
	for (size_t i = 0; all && i < t->items_size; i++)
		for (struct vj_item *it = t->by_path[i]; it; it = it->same_path) {
			all[n++] = it;
			size += 2u * it->len + 64;
		}
	note_planted(t);
	for (size_t i = 0; i < t->ngits; i++)
		size += strlen(t->gits[i].path) + 16;
	size += list_size(&t->planted) + list_size(&t->appeared) + list_size(&t->unreadable) + list_size(&t->host_runs) + 32 * t->nknown;
	*buf = all ? malloc(size) : NULL;
	struct mp_writer w;
	if (*buf) {
		qsort(all, n, sizeof(struct vj_item *), item_path);
		mp_writer_init(&w, *buf, size);
		tree_watch_lock();
		bool raced = t->policy_raced;
		tree_watch_unlock();
		write_report(&w, t, all, n, raced);
		*len = w.len;
	}
	free(all);
	pthread_mutex_unlock(&t->lock);
	return !*buf ? -ENOMEM : w.overflow ? -E2BIG : 0;
}
