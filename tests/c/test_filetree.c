/* test_filetree.c — files.h: directories, remove, rename; and what mounts change.
 *
 * Where a mount is needed, a user namespace makes it; where there is none, that part is skipped and says so. */
#include "ask.h"

#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>

/* ---- directories ---- */

static void test_list(void)
{
	CHECK_EQ(ask("\"op\":\"list_dir\",\"path\":\".\""), 0);
	CHECK(got.fd < 0 && got.entries == 4 && count(".") == 4);
	CHECK_EQ(ask("\"op\":\"list_dir\",\"path\":\"r\""), ENOTDIR);
	CHECK_EQ(ask("\"op\":\"list_dir\",\"path\":\"none\""), ENOENT);
	mkdir("many", 0755);
	int dir = open("many", O_DIRECTORY);
	char name[300];
	for (int i = 0; i < 5000; i++) {
		snprintf(name, sizeof name, "file-%0*d", i % 200 + 5, i);
		CHECK_EQ(mknodat(dir, name, S_IFREG | 0600, 0), 0);
		if (i == 0) {
			CHECK_EQ(ask("\"op\":\"list_dir\",\"path\":\"many\""), 0);
			CHECK(got.fd < 0 && got.entries == 1);
		}
	}
	close(dir);
	CHECK_EQ(ask("\"op\":\"list_dir\",\"path\":\"many\""), 0);
	CHECK(got.fd >= 0);
	struct stat st;
	CHECK(fstat(got.fd, &st) == 0 && st.st_size > 500000);
	CHECK_EQ(fcntl(got.fd, 1034 /* F_GET_SEALS */) & 15, 15);
	uint8_t *p = malloc((size_t)st.st_size);
	CHECK(pread(got.fd, p, (size_t)st.st_size, 0) == st.st_size);
	struct mp_reader r;
	mp_reader_init(&r, p, (size_t)st.st_size);
	CHECK(mp_read_map(&r) == 2 && mp_is(mp_read_bytes(&r), "id") && mp_read_int(&r) == 7);
	CHECK(mp_is(mp_read_bytes(&r), "entries") && mp_read_array(&r) == 5000);
	for (int i = 0; i < 5000; i++) {
		CHECK(mp_read_array(&r) == 2 && mp_peek(&r) == MP_BIN && mp_read_bytes(&r).len >= 10);
		CHECK(mp_is(mp_read_bytes(&r), "file"));
	}
	CHECK(!r.err && r.p == r.end);
	free(p);
	CHECK_EQ(ask("\"op\":\"remove\",\"path\":\"many\",\"recursive\":true"), 0);
	CHECK(access("many", F_OK) < 0);
}

#define MAKE(path, more) ask("\"op\":\"make_dir\",\"path\":\"%s\"%s", path, more)

static void test_make_dir(void)
{
	CHECK_EQ(MAKE("d", ""), 0);
	CHECK_EQ(look("d").st_mode, S_IFDIR | 0755);
	CHECK_EQ(MAKE("d", ""), EEXIST);
	CHECK_EQ(MAKE("d", ",\"exist_ok\":true"), 0);
	CHECK_EQ(MAKE("d/", ",\"exist_ok\":true"), 0);
	CHECK_EQ(MAKE(".", ",\"exist_ok\":true"), 0);
	CHECK_EQ(MAKE("/", ",\"exist_ok\":true"), 0);
	CHECK_EQ(MAKE("r", ",\"exist_ok\":true"), EEXIST);
	CHECK_EQ(MAKE("d/e/f", ""), ENOENT);
	CHECK_EQ(MAKE("d/e/f", ",\"parents\":true,\"mode\":448"), 0);
	CHECK(look("d/e").st_mode == (S_IFDIR | 0755) && look("d/e/f").st_mode == (S_IFDIR | 0700));
	CHECK_EQ(MAKE("d/s", ",\"mode\":3583"), 0); /* 06777 */
	CHECK_EQ(look("d/s").st_mode & 07000, 0);
	CHECK_EQ(MAKE("r/x/y", ",\"parents\":true"), ENOTDIR);
	CHECK_EQ(MAKE("", ""), ENOENT);
}

static void test_remove(void)
{
	CHECK_EQ(REMOVE("none", ""), ENOENT);
	CHECK_EQ(REMOVE("none", RECURSIVE), ENOENT);
	CHECK_EQ(REMOVE(".", RECURSIVE), EINVAL);
	CHECK_EQ(REMOVE("d/..", RECURSIVE), EINVAL);
	CHECK_EQ(REMOVE("/", RECURSIVE), EINVAL);
	CHECK_EQ(REMOVE("d", ""), ENOTEMPTY);
	CHECK_EQ(REMOVE("d/s", ""), 0);
	CHECK_EQ(REMOVE("r/", ""), ENOTDIR);
	CHECK_EQ(REMOVE("to-r", ""), 0);
	CHECK(access("r", F_OK) == 0);
	CHECK_EQ(REMOVE("fifo", RECURSIVE), 0);

	/* Links inside are removed, not followed. */
	CHECK(symlink("../../../w", "d/e/f/out") == 0 && symlink("..", "d/e/up") == 0);
	int before = count("w");
	put_file("d/e/f/g", "");
	CHECK_EQ(symlink("d", "to-d"), 0);
	CHECK_EQ(REMOVE("to-d/", RECURSIVE), ENOTDIR);
	CHECK_EQ(REMOVE("to-d", RECURSIVE), 0);
	CHECK(count("d/e/f") == 2);
	CHECK_EQ(REMOVE("d", RECURSIVE), 0);
	CHECK(access("d", F_OK) < 0 && count("w") == before);

	/* Deeper than any path is long, and than there are descriptors. */
	struct rlimit few = {64, 64}, old;
	getrlimit(RLIMIT_NOFILE, &old);
	few.rlim_max = old.rlim_max;
	CHECK_EQ(mkdir("deep", 0755), 0);
	int at = open("deep", O_DIRECTORY);
	for (int i = 0; i < 3000; i++) {
		CHECK(mkdirat(at, "down", 0755) == 0 && mknodat(at, "file", S_IFREG | 0600, 0) == 0);
		int next = openat(at, "down", O_DIRECTORY);
		close(at);
		at = next;
	}
	close(at);
	setrlimit(RLIMIT_NOFILE, &few);
	CHECK_EQ(REMOVE("deep", RECURSIVE), 0);
	setrlimit(RLIMIT_NOFILE, &old);
	CHECK(access("deep", F_OK) < 0);

	/* What cannot be removed is told. */
	mkdir("keep", 0755);
	mkdir("keep/sub", 0755);
	put_file("keep/sub/file", "");
	chmod("keep/sub", 0555);
	CHECK_EQ(REMOVE("keep", RECURSIVE), EACCES);
	chmod("keep/sub", 0755);
	CHECK_EQ(REMOVE("keep", RECURSIVE), 0);
}

/* Another process swaps a directory and a link while it is being removed: nothing behind the link is touched. */
static void test_remove_race(void)
{
	mkdir("safe", 0755);
	put_file("safe/precious", "x");
	mkdir("race", 0755);
	pid_t child = fork();
	if (!child) {
		for (;;) {
			mkdir("race/d", 0755);
			int fd = open("race/d/f", O_CREAT | O_WRONLY, 0600);
			close(fd);
			rename("race/d", "spare");
			if (symlink("../safe", "race/d") < 0)
				rmdir("race");
			unlink("race/d");
			rename("spare", "race/d");
			mkdir("race", 0755);
		}
	}
	struct timespec start, now;
	clock_gettime(CLOCK_MONOTONIC, &start);
	do {
		REMOVE("race", RECURSIVE);
		clock_gettime(CLOCK_MONOTONIC, &now);
	} while ((now.tv_sec - start.tv_sec) * 1000 + (now.tv_nsec - start.tv_nsec) / 1000000 < 300);
	kill(child, SIGKILL);
	waitpid(child, NULL, 0);
	CHECK(holds("safe/precious", "x"));
	if (access("race", F_OK) == 0)
		CHECK_EQ(REMOVE("race", RECURSIVE), 0);
}

#define RENAME(from, to, more) ask("\"op\":\"rename\",\"path\":\"%s\",\"to\":\"%s\"%s", from, to, more)

static void test_rename(void)
{
	mkdir("n", 0755);
	put_file("n/a", "a");
	put_file("n/b", "b");
	CHECK_EQ(RENAME("n/a", "n/b", ",\"replace\":false"), EEXIST);
	CHECK_EQ(RENAME("n/a", "n/c", ",\"replace\":false"), 0);
	CHECK_EQ(RENAME("n/c", "n/b", ""), 0);
	CHECK(holds("n/b", "a") && count("n") == 1);
	CHECK_EQ(RENAME("n/none", "n/x", ""), ENOENT);
	CHECK_EQ(RENAME("n/b", "none/x", ""), ENOENT);
	CHECK_EQ(RENAME("n/b/", "n/x", ""), ENOTDIR);
	CHECK_EQ(RENAME("n/b", "n/x/", ""), ENOTDIR);
	CHECK_EQ(RENAME("n/", "m/", ""), 0);
	CHECK(holds("m/b", "a"));
	CHECK_EQ(RENAME("m", "m/sub", ""), EINVAL);
	CHECK_EQ(symlink("b", "m/link"), 0);
	CHECK_EQ(RENAME("m/link", "m/moved", ""), 0);
	CHECK(S_ISLNK(look("m/moved").st_mode) && holds("m/b", "a"));
	CHECK_EQ(ask("\"op\":\"rename\",\"path\":\"m/b\""), ENOENT);
}

/* ---- mounts, in a namespace of our own ---- */

static void put_text_file(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY);
	if (fd >= 0) {
		if (write(fd, text, strlen(text)) < 0)
			fprintf(stderr, "%s: %s\n", path, strerror(errno));
		close(fd);
	}
}

static int mounts_child(void)
{
	char map[64];
	uid_t uid = geteuid();
	gid_t gid = getegid();
	if (unshare(CLONE_NEWUSER | CLONE_NEWNS) < 0)
		return 77;
	put_text_file("/proc/self/setgroups", "deny");
	snprintf(map, sizeof map, "%u %u 1", uid, uid);
	put_text_file("/proc/self/uid_map", map);
	snprintf(map, sizeof map, "%u %u 1", gid, gid);
	put_text_file("/proc/self/gid_map", map);
	mkdir("disk", 0755);
	if (mount("none", "disk", "tmpfs", 0, "size=64k") < 0)
		return 77;

	check_failed = 0;
	/* A full disk: the old content stays and no temporary file. */
	put_file("disk/f", "old");
	int fd = memfd_of(200000, 'd');
	CHECK_EQ(ask_body(fd, "\"op\":\"write_file\",\"path\":\"disk/f\",\"body\":true"), ENOSPC);
	CHECK(holds("disk/f", "old") && count("disk") == 1);
	CHECK_EQ(link("disk/f", "disk/g"), 0);
	CHECK_EQ(ask_body(fd, "\"op\":\"write_file\",\"path\":\"disk/f\",\"body\":true"), ENOSPC);
	CHECK(holds("disk/f", "old") && look("disk/f").st_blocks <= 8);
	unlink("disk/g");
	close(fd);

	/* A file that is a mount point is written in place; in a read-only directory too; a read-only one is not. */
	put_file("disk/grant", "old");
	put_file("disk/backing", "old");
	CHECK_EQ(mount("disk/backing", "disk/grant", NULL, MS_BIND, NULL), 0);
	CHECK_EQ(WRITE("disk/grant", "through"), 0);
	CHECK(!got.atomic && holds("disk/backing", "through"));
	CHECK_EQ(count("disk"), 3);
	CHECK_EQ(mount(NULL, "disk", NULL, MS_REMOUNT | MS_BIND | MS_RDONLY, NULL), 0);
	CHECK_EQ(WRITE("disk/grant", "in a closed directory"), 0);
	CHECK(!got.atomic && holds("disk/backing", "in a closed directory"));
	CHECK_EQ(WRITE("disk/f", "x"), EROFS);
	CHECK_EQ(WRITE("disk/new", "x"), EROFS);
	CHECK_EQ(mount(NULL, "disk", NULL, MS_REMOUNT | MS_BIND, NULL), 0);
	CHECK_EQ(mount(NULL, "disk/grant", NULL, MS_REMOUNT | MS_BIND | MS_RDONLY, NULL), 0);
	CHECK_EQ(WRITE("disk/grant", "x"), EROFS);
	CHECK(holds("disk/backing", "in a closed directory"));
	CHECK_EQ(REMOVE("disk/grant", ""), EBUSY);

	/* Removing a mount point is refused before anything in it is gone. */
	CHECK_EQ(REMOVE("disk", RECURSIVE), EBUSY);
	CHECK_EQ(count("disk"), 3);
	return check_failed ? 1 : 0;
}

static void test_mounts(void)
{
	pid_t child = fork();
	if (!child)
		_exit(mounts_child());
	int status = 0;
	waitpid(child, &status, 0);
	if (WIFEXITED(status) && WEXITSTATUS(status) == 77)
		printf("no namespaces here: mounts skipped\n");
	else
		CHECK_EQ(status, 0);
}

/* ---- requests ---- */

static void test_parse(void)
{
	struct file_request rq;
	static const uint8_t wrong[] = {0x81, 0xa4, 'p', 'a', 't', 'h', 0x01}, extra[] = {0x80, 0xc0};
	CHECK(!file_request_parse(&rq, wrong, sizeof wrong));
	CHECK(!file_request_parse(&rq, extra, sizeof extra));
	CHECK(!file_request_parse(&rq, "", 0));
	CHECK(file_request_parse(&rq, extra, 1) && rq.op == FILE_NONE && rq.follow && rq.replace && rq.body_fd == -1);
	static const uint8_t nil[] = {0x81, 0xa4, 'p', 'a', 't', 'h', 0xc0};
	CHECK(file_request_parse(&rq, nil, sizeof nil) && rq.path.len == 0);

	/* A reply buffer that is too small is an error, not half a reply. */
	uint8_t buf[128];
	struct mp_writer w;
	int fd;
	rq = (struct file_request){.op = FILE_READ, .path = {(const uint8_t *)"/proc/meminfo", 13}, .limit = UINT64_MAX};
	mp_writer_init(&w, buf, sizeof buf);
	CHECK_EQ(files_handle(&rq, &w, &fd), -EMSGSIZE);
	CHECK(!w.overflow && w.len > 0 && fd == -1);
}

int main(void)
{
	enter_place();
	put_file("r", "hello\n");
	mkdir("w", 0755);
	CHECK(mkfifo("fifo", 0600) == 0 && symlink("r", "to-r") == 0);
	test_list();
	test_make_dir();
	test_remove();
	test_remove_race();
	test_rename();
	test_mounts();
	test_parse();
	return leave_place();
}
