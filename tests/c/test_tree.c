/* test_tree.c — the walk, the watch and the audit under random edits, without a jail: the launcher is replaced by a
 * table of what is mounted, and after each sync every name that a rule masks must be covered in it. */
#define _GNU_SOURCE 1
#include <errno.h>
#include <ftw.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "check.h"
#include "msg.h"
#include "start.h"
#include "treewatch.h"

#define MOUNTS 4096

static struct {
	dev_t dev;
	ino_t ino;
} mounts[MOUNTS];
static size_t nmounts;
static pthread_mutex_t table = PTHREAD_MUTEX_INITIALIZER; /* the watch's thread calls vj_enter too */
static unsigned fail_every, calls;

/* The launcher: an object that is covered stays covered as long as it exists (inode numbers are enough for this). */
int vj_enter(int mntns_fd, int userns_fd, const uint8_t *ops, size_t len, int deadline_ms, int32_t *results,
	     size_t capacity, size_t *count)
{
	struct mp_reader r;
	(void)mntns_fd, (void)userns_fd, (void)deadline_ms;
	pthread_mutex_lock(&table);
	mp_reader_init(&r, ops, len);
	uint32_t n = mp_read_array(&r);
	if (n > capacity)
		abort();
	for (*count = 0; *count < n; (*count)++) {
		char path[4096];
		struct stat st;
		uint32_t args = mp_read_array(&r);
		struct mp_bytes op = mp_read_bytes(&r), name = mp_read_bytes(&r);
		if (name.len >= sizeof path)
			abort();
		memcpy(path, name.ptr, name.len);
		path[name.len] = 0;
		results[*count] = lstat(path, &st) ? errno : 0;
		if (mp_is(op, "cover_at")) {
			uint64_t dev = mp_read_uint(&r), ino = mp_read_uint(&r);
			if (!results[*count] && (st.st_dev != dev || st.st_ino != ino))
				results[*count] = ESTALE;
			if (!results[*count] && fail_every && ++calls % fail_every == 0)
				results[*count] = ESTALE;
			if (!results[*count]) {
				mounts[nmounts % MOUNTS].dev = st.st_dev;
				mounts[nmounts++ % MOUNTS].ino = st.st_ino;
			}
		} else if (args == 3) {
			mp_skip(&r);
		}
	}
	if (r.err || r.p != r.end)
		abort();
	pthread_mutex_unlock(&table);
	return 0;
}

static bool covered(const struct stat *st)
{
	bool found = false;
	pthread_mutex_lock(&table);
	for (size_t i = 0; i < nmounts && i < MOUNTS && !found; i++)
		found = mounts[i].dev == st->st_dev && mounts[i].ino == st->st_ino;
	pthread_mutex_unlock(&table);
	return found;
}

static char root[256];
static unsigned uncovered;

static int look(const char *path, const struct stat *st, int flag, struct FTW *ftw)
{
	const char *name = path + ftw->base;
	(void)flag;
	if (!S_ISLNK(st->st_mode) && (strcmp(name, ".env") == 0 || strcmp(name, "sec") == 0)) {
		if (!covered(st)) {
			fprintf(stderr, "uncovered: %s\n", path);
			uncovered++;
		}
		return FTW_SKIP_SUBTREE;
	}
	return FTW_CONTINUE;
}

static void put(const char *name)
{
	char path[512];
	snprintf(path, sizeof path, "%s/%s", root, name);
	FILE *f = fopen(path, "w");
	if (f) {
		fputs("secret", f);
		fclose(f);
	}
}

static void two(int (*call)(const char *, const char *), const char *a, const char *b)
{
	char from[512], to[512];
	snprintf(from, sizeof from, "%s/%s", root, a);
	snprintf(to, sizeof to, "%s/%s", root, b);
	call(from, to); /* it may fail: the other random edits decide */
}

static void one_edit(unsigned i)
{
	static const char *const dirs[] = {"a", "b", "a/c", "a/c/d", "e"};
	static const char *const files[] = {".env", "sec", "plain", ".env~", "x.tmp"};
	char name[64], other[64], path[512];
	snprintf(name, sizeof name, "%s/%s", dirs[random() % 5], files[random() % 5]);
	snprintf(other, sizeof other, "%s/%s", dirs[random() % 5], files[random() % 5]);
	snprintf(path, sizeof path, "%s/%s", root, random() % 2 ? name : dirs[random() % 5]);
	switch (random() % 8) {
	case 0:
		mkdir(path, 0700);
		break;
	case 1:
		put(name);
		break;
	case 2:
		two(rename, name, other);
		break;
	case 3:
		two(link, name, other);
		break;
	case 4:
		unlink(path);
		break;
	case 5:
		two(rename, dirs[random() % 5], dirs[random() % 5]);
		break;
	case 6:
		snprintf(other, sizeof other, "n%u", i);
		two(rename, dirs[random() % 5], other);
		break;
	default:
		two(symlink, "plain", name);
	}
}

static struct vj_tree *make(unsigned watches)
{
	uint8_t spec[2048];
	struct mp_writer w;
	struct vj_tree *t;
	mp_writer_init(&w, spec, sizeof spec);
	mp_write_map(&w, 5);
	mp_write_str(&w, "roots");
	mp_write_array(&w, 1);
	mp_write_array(&w, 2);
	mp_write_str(&w, root);
	mp_write_bool(&w, true);
	mp_write_str(&w, "workspace");
	mp_write_str(&w, root);
	mp_write_str(&w, "masks");
	mp_write_array(&w, 2);
	for (int i = 0; i < 2; i++) {
		mp_write_array(&w, 3);
		mp_write_str(&w, i ? "sec" : ".env");
		mp_write_bool(&w, false);
		mp_write_bool(&w, false);
	}
	mp_write_str(&w, "git");
	mp_write_uint(&w, 1);
	mp_write_str(&w, "max_watches");
	mp_write_uint(&w, watches);
	CHECK(!w.overflow);
	CHECK(vj_tree_new(spec, w.len, &t) == 0);
	for (size_t cut = 0; cut < w.len; cut++) { /* every shortened description is refused */
		struct vj_tree *none;
		CHECK(vj_tree_new(spec, cut, &none) < 0 && !none);
	}
	return t;
}

static void read_outputs(struct vj_tree *t)
{
	uint8_t *buf;
	size_t len;
	CHECK(vj_tree_report(t, &buf, &len) == 0);
	vj_free(buf);
	CHECK(vj_tree_ops(t, &buf, &len) == 0);
	vj_free(buf);
	CHECK(vj_tree_git_audit(t, (int)(random() % 2), &buf, &len) >= 0);
	vj_free(buf);
}

static int wipe(const char *path, const struct stat *st, int flag, struct FTW *ftw)
{
	(void)st, (void)flag, (void)ftw;
	return remove(path);
}

int main(void)
{
	const char *rounds = getenv("ROUNDS"), *seed = getenv("SEED");
	srandom(seed ? (unsigned)atoi(seed) : (unsigned)time(NULL));
	for (unsigned watches = 0; watches < 2; watches++) {
		strcpy(root, "/tmp/vj-tree-XXXXXX");
		CHECK(mkdtemp(root) != NULL);
		nmounts = 0;
		struct vj_tree *t = make(watches);
		CHECK(vj_tree_scan(t) == 0);
		CHECK(vj_tree_attach(t, 0, -1) == 0);
		for (unsigned i = 0; i < (rounds ? (unsigned)atoi(rounds) : 400u); i++) {
			for (long n = random() % 6; n >= 0; n--)
				one_edit(i);
			pthread_mutex_lock(&table);
			fail_every = i % 3 ? 0 : 5;
			pthread_mutex_unlock(&table);
			int err = vj_tree_sync(t);
			CHECK(err >= 0 || err == -EAGAIN);
			if (err >= 0)
				nftw(root, look, 16, FTW_PHYS | FTW_ACTIONRETVAL);
			CHECK(uncovered == 0);
			if (i % 16 == 0)
				read_outputs(t);
		}
		fail_every = 0;
		CHECK(vj_tree_sync(t) >= 0);
		CHECK(watches || vj_tree_sync(t) == 0);
		vj_tree_free(t);
		nftw(root, wipe, 16, FTW_PHYS | FTW_DEPTH);
	}
	return check_report();
}
