/* test_files.c — files.h: read_file, stat and write_file on a real directory. */
#include "ask.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/xattr.h>

/* ---- read_file, stat ---- */

static void test_read(void)
{
	put_file("r", "hello\n");
	struct stat st = look("r");
	CHECK_EQ(READ("r"), 0);
	CHECK(got.content.len == 6 && !memcmp(got.content.ptr, "hello\n", 6));
	CHECK(got.size == 6 && got.ino == st.st_ino && got.mode == (st.st_mode & 07777));
	CHECK_EQ(got.mtime_ns, st.st_mtim.tv_sec * 1000000000LL + st.st_mtim.tv_nsec);
	CHECK_EQ(ask("\"op\":\"read_file\",\"path\":\"./r\",\"offset\":1,\"limit\":3"), 0);
	CHECK(got.content.len == 3 && !memcmp(got.content.ptr, "ell", 3));
	CHECK_EQ(ask("\"op\":\"read_file\",\"path\":\"r\",\"offset\":100"), 0);
	CHECK(got.has_content && got.content.len == 0);
	CHECK_EQ(ask("\"op\":\"read_file\",\"path\":\"r\",\"limit\":0"), 0);
	CHECK(got.has_content && got.content.len == 0);
	CHECK_EQ(ask("\"op\":\"read_file\",\"path\":\"r\",\"offset\":18446744073709551615"), EINVAL);
	put_file("empty", "");
	CHECK_EQ(READ("empty"), 0);
	CHECK(got.has_content && got.content.len == 0);

	CHECK_EQ(READ("none"), ENOENT);
	CHECK_EQ(READ("none/x"), ENOENT);
	CHECK_EQ(READ("r/x"), ENOTDIR);
	CHECK_EQ(READ(""), ENOENT);
	CHECK_EQ(READ("."), EISDIR);
	CHECK_EQ(READ("a\\u0000b"), EINVAL);
	CHECK_EQ(ask("\"op\":\"read_file\""), ENOENT);
	CHECK_EQ(ask("\"op\":\"read_file\",\"path_b64\":\"/w==\""), ENOENT);
	char name[5000];
	memset(name, 'n', sizeof name);
	name[300] = 0;
	CHECK_EQ(READ(name), ENAMETOOLONG);
	name[300] = 'n';
	name[4999] = 0;
	CHECK_EQ(READ(name), ENAMETOOLONG);
	put_file("closed", "x");
	chmod("closed", 0);
	CHECK_EQ(READ("closed"), EACCES);
	CHECK_EQ(ask("\"op\":\"nonsense\",\"path\":\"r\""), ENOSYS);
}

static void test_read_large(void)
{
	int fd = open("large", O_RDWR | O_CREAT, 0600);
	CHECK_EQ(ftruncate(fd, FILES_INLINE_MAX), 0);
	CHECK_EQ(READ("large"), 0);
	CHECK(got.fd < 0 && got.content.len == FILES_INLINE_MAX);
	CHECK_EQ(ftruncate(fd, FILES_INLINE_MAX + 1), 0);
	CHECK_EQ(READ("large"), 0);
	CHECK(got.fd >= 0 && !got.has_content && got.size == FILES_INLINE_MAX + 1);
	CHECK_EQ(fcntl(got.fd, F_GETFL) & O_ACCMODE, O_RDONLY);
	CHECK_EQ(fcntl(got.fd, F_GETFD), FD_CLOEXEC);
	CHECK_EQ(ask("\"op\":\"read_file\",\"path\":\"large\",\"offset\":10"), 0);
	CHECK(got.fd < 0 && got.content.len == FILES_INLINE_MAX - 9);
	if (ftruncate(fd, (off_t)1 << 40) == 0) {
		CHECK(pwrite(fd, "end", 3, ((off_t)1 << 40) - 3) == 3);
		CHECK_EQ(ask("\"op\":\"read_file\",\"path\":\"large\",\"limit\":100"), 0);
		CHECK_EQ(got.content.len, 100);
		CHECK_EQ(ask("\"op\":\"read_file\",\"path\":\"large\",\"offset\":1099511627773,\"limit\":1000"), 0);
		CHECK(got.content.len == 3 && !memcmp(got.content.ptr, "end", 3));
		CHECK_EQ(READ("large"), 0);
		CHECK(got.fd >= 0);
	}
	close(fd);
	unlink("large");
}

static void test_read_special(void)
{
	CHECK_EQ(mkfifo("fifo", 0600), 0);
	CHECK_EQ(READ("fifo"), EINVAL);
	CHECK(!strcmp(got.error, "not a regular file"));
	int s = socket(AF_UNIX, SOCK_STREAM, 0);
	struct sockaddr_un addr = {.sun_family = AF_UNIX, .sun_path = "sock"};
	CHECK_EQ(bind(s, (const struct sockaddr *)&addr, sizeof addr), 0);
	CHECK_EQ(READ("sock"), EINVAL);
	close(s);
	CHECK_EQ(READ("/dev/zero"), EINVAL);
	CHECK_EQ(READ("/dev/null"), EINVAL);
	CHECK_EQ(WRITE("fifo", "x"), EINVAL);
	CHECK_EQ(WRITE("sock", "x"), EINVAL);
	CHECK_EQ(WRITE("/dev/null", "x"), EINVAL);

	/* Files that show the worker itself are closed; the rest of /proc is read bounded. */
	CHECK_EQ(READ("/proc/self/status"), EACCES);
	CHECK_EQ(READ("/proc/self/environ"), EACCES);
	CHECK_EQ(READ("/proc/meminfo"), 0);
	CHECK(got.size == 0 && got.content.len > 100);
	CHECK_EQ(ask("\"op\":\"read_file\",\"path\":\"/proc/meminfo\",\"limit\":5"), 0);
	CHECK(got.content.len == 5 && !memcmp(got.content.ptr, "MemTo", 5));
	if (READ("/proc/kallsyms") == 0 || got.err == EFBIG)
		CHECK(got.err == EFBIG && !got.has_content);
	CHECK_EQ(ask("\"op\":\"read_file\",\"path\":\"/proc/kallsyms\",\"limit\":1000"), 0);
	CHECK_EQ(got.content.len, 1000);

	/* The kernel's own files are read, never written in the worker's name. */
	CHECK(WRITE("/proc/self/oom_score_adj", "500") != 0);
	CHECK(WRITE("/proc/self/mem", "500") != 0);
	CHECK(WRITE("/proc/self/new", "500") != 0);
}

static void test_magic_links(void)
{
	uint64_t how[3] = {O_PATH, 0, 0};
	int probe = (int)syscall(437 /* openat2 */, AT_FDCWD, ".", how, sizeof how);
	if (probe < 0) {
		printf("no openat2 here: magic links skipped\n");
		return;
	}
	close(probe);
	/* Magic links lead to what no name leads to. */
	int fd = open("r", O_RDONLY);
	char path[64];
	snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
	CHECK_EQ(READ(path), ELOOP);
	CHECK_EQ(WRITE(path, "x"), ELOOP);
	CHECK_EQ(READ("/proc/self/cwd/r"), ELOOP);
	CHECK_EQ(WRITE("/proc/self/cwd/r", "x"), ELOOP);
	CHECK_EQ(ask("\"op\":\"remove\",\"path\":\"/proc/self/cwd/r\""), ELOOP);
	CHECK_EQ(READ("/proc/self/exe"), ELOOP);
	CHECK_EQ(READ("/proc/self/root/etc/hostname"), ELOOP);
	CHECK(symlink(path, "planted") == 0);
	CHECK_EQ(READ("planted"), ELOOP);
	CHECK_EQ(WRITE("planted", "x"), ELOOP);
	CHECK(holds("r", "hello\n"));
	close(fd);
}

static void test_stat(void)
{
	static const struct {
		const char *path, *type;
	} of[] = {{"r", "file"}, {".", "dir"}, {"fifo", "fifo"}, {"sock", "socket"}, {"/dev/null", "char"}, {"to-r", "file"}};
	CHECK_EQ(symlink("r", "to-r"), 0);
	for (size_t i = 0; i < sizeof of / sizeof *of; i++) {
		CHECK_EQ(ask("\"op\":\"stat\",\"path\":\"%s\"", of[i].path), 0);
		CHECK(!strcmp(got.type, of[i].type));
	}
	CHECK(got.size == 6 && got.nlink == 1 && got.ino == look("r").st_ino);
	CHECK_EQ(ask("\"op\":\"stat\",\"path\":\"to-r\",\"follow\":false"), 0);
	CHECK(!strcmp(got.type, "link") && got.size == 1);
	CHECK_EQ(symlink("loop", "loop"), 0);
	CHECK_EQ(ask("\"op\":\"stat\",\"path\":\"loop\""), ELOOP);
	CHECK_EQ(ask("\"op\":\"stat\",\"path\":\"none\""), ENOENT);
}

/* ---- write_file ---- */

static void test_write(void)
{
	mkdir("w", 0755);
	CHECK_EQ(WRITE("w/a", "one"), 0);
	CHECK(got.atomic && got.size == 3 && got.ino == look("w/a").st_ino && holds("w/a", "one"));
	CHECK_EQ(look("w/a").st_mode & 07777, 0644);
	CHECK_EQ(WRITE("w/a", ""), 0);
	CHECK(holds("w/a", ""));
	CHECK_EQ(ask("\"op\":\"write_file\",\"path\":\"w/a\""), EINVAL);
	CHECK_EQ(WRITE("w", "x"), EISDIR);
	CHECK_EQ(WRITE("w/", "x"), EISDIR);
	CHECK_EQ(WRITE("w/a/", "x"), EISDIR);
	CHECK_EQ(WRITE("w/new/", "x"), EISDIR);
	CHECK_EQ(WRITE("/", "x"), EISDIR);
	CHECK_EQ(WRITE("", "x"), ENOENT);
	CHECK_EQ(WRITE("w/a/b", "x"), ENOTDIR);
	CHECK_EQ(WRITE("w/none/b", "x"), ENOENT);
	CHECK_EQ(count("w"), 1);

	/* Modes */
	chmod("w/a", 0751);
	CHECK_EQ(WRITE("w/a", "two"), 0);
	CHECK_EQ(look("w/a").st_mode & 07777, 0751);
	chmod("w/a", 04755);
	CHECK_EQ(WRITE("w/a", "two"), 0);
	CHECK_EQ(look("w/a").st_mode & 07777, 0755);
	CHECK_EQ(ask("\"op\":\"write_file\",\"path\":\"w/a\",\"content\":\"x\",\"mode\":%d", 06640), 0);
	CHECK_EQ(look("w/a").st_mode & 07777, 0640);
	CHECK_EQ(ask("\"op\":\"write_file\",\"path\":\"w/b\",\"content\":\"x\",\"mode\":%d", 07707), 0);
	CHECK_EQ(look("w/b").st_mode & 07777, 01707);
	chmod("w/b", 0200);
	CHECK_EQ(WRITE("w/b", "unreadable"), 0);
	CHECK(got.atomic && (look("w/b").st_mode & 07777) == 0200);
	CHECK_EQ(unlink("w/b"), 0);

	/* A file that is closed stays, though its directory is open. */
	chmod("w/a", 0444);
	CHECK_EQ(WRITE("w/a", "x"), EACCES);
	CHECK(holds("w/a", "x"));
	/* A file that is open is written, though its directory is closed. */
	chmod("w/a", 0644);
	chmod("w", 0555);
	CHECK_EQ(WRITE("w/a", "in place"), 0);
	CHECK(!got.atomic && holds("w/a", "in place") && got.size == 8);
	CHECK_EQ(WRITE("w/a", "short"), 0);
	CHECK(holds("w/a", "short"));
	CHECK_EQ(WRITE("w/c", "x"), EACCES);
	chmod("w", 0755);

	/* Parents */
	CHECK_EQ(ask("\"op\":\"write_file\",\"path\":\"w/p/q//r/f\",\"content\":\"x\",\"make_parents\":true"), 0);
	CHECK(holds("w/p/q/r/f", "x"));
	CHECK_EQ(ask("\"op\":\"write_file\",\"path\":\"w/a/q/f\",\"content\":\"x\",\"make_parents\":true"), ENOTDIR);

	/* Long names leave no room for the temporary one's. */
	char path[300] = "w/";
	memset(path + 2, 'l', 255);
	CHECK_EQ(WRITE(path, "x"), 0);
	CHECK_EQ(WRITE(path, "y"), 0);
	CHECK(got.atomic && holds(path, "y"));
	unlink(path);
	CHECK_EQ(count("w"), 2);
}

static void test_write_conditions(void)
{
	put_file("w/if", "old");
	CHECK_EQ(ask("\"op\":\"stat\",\"path\":\"w/if\""), 0);
	long long size = got.size, mtime = got.mtime_ns, ino = (long long)got.ino;
#define IF(s, m, i)                                                                                        \
	ask("\"op\":\"write_file\",\"path\":\"w/if\",\"content\":\"new\",\"if_unchanged\":[%lld,%lld,%lld]", s, m, i)
	CHECK_EQ(IF(size + 1, mtime, ino), ESTALE);
	CHECK_EQ(IF(size, mtime + 1, ino), ESTALE);
	CHECK_EQ(IF(size, mtime, ino + 1), ESTALE);
	CHECK(holds("w/if", "old"));
	CHECK_EQ(IF(size, mtime, ino), 0);
	CHECK(holds("w/if", "new"));
	CHECK_EQ(IF(size, mtime, ino), ESTALE);
	CHECK_EQ(IF((long long)got.size, mtime, ino), ESTALE);
	unlink("w/if");
	CHECK_EQ(IF(size, mtime, ino), ESTALE);
	CHECK(access("w/if", F_OK) < 0);

#define EXCLUSIVE(path) ask("\"op\":\"write_file\",\"path\":\"%s\",\"content\":\"e\",\"exclusive\":true", path)
	CHECK_EQ(EXCLUSIVE("w/ex"), 0);
	CHECK(holds("w/ex", "e"));
	CHECK_EQ(EXCLUSIVE("w/ex"), EEXIST);
	CHECK_EQ(symlink("nowhere", "w/dangling"), 0);
	CHECK_EQ(EXCLUSIVE("w/dangling"), EEXIST);
	unlink("w/ex");
	unlink("w/dangling");
	CHECK_EQ(ask("\"op\":\"write_file\",\"path\":\"w/sync\",\"content\":\"s\",\"fsync\":true"), 0);
	unlink("w/sync");
	CHECK_EQ(count("w"), 2);
}

static void test_write_links(void)
{
	mkdir("l", 0755);
	mkdir("l/sub", 0755);
	put_file("l/sub/target", "old");
	CHECK(symlink("sub/target", "l/one") == 0 && symlink("../l/one", "l/two") == 0);
	CHECK_EQ(WRITE("l/two", "new"), 0);
	CHECK(got.atomic && holds("l/sub/target", "new") && S_ISLNK(look("l/one").st_mode) && S_ISLNK(look("l/two").st_mode));
	CHECK_EQ(symlink("sub/made", "l/dangling"), 0);
	CHECK_EQ(WRITE("l/dangling", "made"), 0);
	CHECK(holds("l/sub/made", "made"));
	CHECK_EQ(symlink("none/made", "l/far"), 0);
	CHECK_EQ(WRITE("l/far", "x"), ENOENT);
	CHECK_EQ(symlink("circle", "l/circle"), 0);
	CHECK_EQ(WRITE("l/circle", "x"), ELOOP);
	CHECK_EQ(symlink("sub", "l/dir"), 0);
	CHECK_EQ(WRITE("l/dir", "x"), EISDIR);
	CHECK_EQ(WRITE("l/dir/through", "x"), 0);
	CHECK(holds("l/sub/through", "x"));
	char cwd[512], text[600];
	CHECK(getcwd(cwd, sizeof cwd));
	snprintf(text, sizeof text, "%s/l/sub/target", cwd);
	CHECK_EQ(symlink(text, "l/absolute"), 0);
	CHECK_EQ(WRITE("l/absolute", "abs"), 0);
	CHECK(holds("l/sub/target", "abs"));

	/* A hard link keeps its other name. */
	CHECK_EQ(link("l/sub/target", "l/hard"), 0);
	CHECK_EQ(WRITE("l/hard", "both"), 0);
	CHECK(!got.atomic && holds("l/sub/target", "both") && look("l/hard").st_nlink == 2);
}

static void test_write_xattr(void)
{
	char value[64];
	put_file("x", "old");
	if (setxattr("x", "user.note", "kept", 4, 0) < 0) {
		printf("no user attributes here: skipped\n");
		return;
	}
	CHECK_EQ(WRITE("x", "new"), 0);
	CHECK(got.atomic && getxattr("x", "user.note", value, sizeof value) == 4 && !memcmp(value, "kept", 4));

	/* A directory's default access list must not open a file that had none. */
	static const uint8_t acl[] = {2, 0, 0, 0, 1, 0, 7, 0, 255, 255, 255, 255, 2, 0, 4, 0, 1, 0, 0, 0, 4, 0, 5, 0, 255,
				      255, 255, 255, 16, 0, 7, 0, 255, 255, 255, 255, 32, 0, 0, 0, 255, 255, 255, 255};
	mkdir("acl", 0755);
	put_file("acl/f", "old");
	chmod("acl/f", 0640);
	if (setxattr("acl", "system.posix_acl_default", acl, sizeof acl, 0) < 0)
		return;
	CHECK_EQ(WRITE("acl/f", "new"), 0);
	CHECK(got.atomic && getxattr("acl/f", "system.posix_acl_access", value, sizeof value) < 0);
	CHECK_EQ(look("acl/f").st_mode & 07777, 0640);
	CHECK_EQ(setxattr("acl/f", "system.posix_acl_access", acl, sizeof acl, 0), 0);
	CHECK_EQ(WRITE("acl/f", "newer"), 0);
	CHECK_EQ(getxattr("acl/f", "system.posix_acl_access", value, sizeof value), sizeof acl);
}

#define BODY "\"op\":\"write_file\",\"path\":\"w/body\",\"body\":true"

static void test_write_body(void)
{
	int fd = memfd_of(300000, 'b');
	CHECK_EQ(ask_body(fd, BODY), 0);
	CHECK(got.atomic && got.size == 300000 && look("w/body").st_size == 300000);
	close(fd);
	fd = memfd_of(0, 0);
	CHECK_EQ(ask_body(fd, BODY), 0);
	CHECK_EQ(look("w/body").st_size, 0);
	close(fd);
	CHECK_EQ(ask_body(-1, BODY), EBADF);
	int pipes[2];
	CHECK_EQ(pipe(pipes), 0);
	CHECK_EQ(ask_body(pipes[0], BODY), EINVAL);
	close(pipes[0]);
	close(pipes[1]);
	unlink("w/body");
	CHECK_EQ(count("w"), 2);
}

/* A write that fails in the middle: here at the limit of a file's size, in test_mounts on a full disk. */
static void test_write_fails(void)
{
	struct rlimit old, small = {.rlim_cur = 4096, .rlim_max = RLIM_INFINITY};
	put_file("w/full", "old");
	int fd = memfd_of(100000, 'f');
	signal(SIGXFSZ, SIG_IGN);
	getrlimit(RLIMIT_FSIZE, &old);
	small.rlim_max = old.rlim_max;
	setrlimit(RLIMIT_FSIZE, &small);
	CHECK_EQ(ask_body(fd, "\"op\":\"write_file\",\"path\":\"w/full\",\"body\":true"), EFBIG);
	CHECK(holds("w/full", "old"));
	CHECK_EQ(count("w"), 3);
	CHECK_EQ(link("w/full", "w/full2"), 0);
	CHECK_EQ(ask_body(fd, "\"op\":\"write_file\",\"path\":\"w/full\",\"body\":true"), EFBIG);
	CHECK(holds("w/full", "old")); /* the space was asked for first */
	setrlimit(RLIMIT_FSIZE, &old);
	close(fd);
	unlink("w/full");
	unlink("w/full2");
}

int main(void)
{
	enter_place();
	test_read();
	test_read_large();
	test_read_special();
	test_magic_links();
	test_stat();
	test_write();
	test_write_conditions();
	test_write_links();
	test_write_xattr();
	test_write_body();
	test_write_fails();
	return leave_place();
}
