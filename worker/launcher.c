/* launcher.c — vectora-jail-launcher: what must change namespaces or identity outside a jail does so in this program,
 * never in a child that shares the backend's memory (commit_creds() would make that memory non-dumpable).
 *
 *   enter OPS_FD RESULT_FD MNTNS_FD [USERNS_FD]           apply a list of mounts inside a jail, answer, end
 *   stage UID GID PARENT FIRST_FD COUNT -- PROGRAM ARG…   as root: bind COUNT opened sources below /tmp of a mount
 *                                                         namespace of our own, become UID, execute PROGRAM
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "child.h"
#include "kernel.h"
#include "livemount.h"
#include "msg.h"
#include "start.h"

#define STAGE_ROOT "/tmp" /* exists wherever bwrap works: it builds its own root there */
#define STAGE_MAX 512

static int number(const char *text)
{
	char *end;
	long n = strtol(text, &end, 10);

	return end == text || *end || n < 0 || n > 0x7fffffff ? -1 : (int)n;
}

static int write_all(int fd, const uint8_t *data, size_t len)
{
	while (len > 0) {
		ssize_t n = write(fd, data, len);
		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return -errno;
		data += n;
		len -= (size_t)n;
	}
	return 0;
}

/* ---- enter ---- */

/* Read the ops and apply them. *results: malloc'ed, one errno an op. */
static int enter_and_apply(int ops_fd, int mntns_fd, int userns_fd, int32_t **results, size_t *count)
{
	struct stat st;

	if (fstat(ops_fd, &st) != 0)
		return -errno;
	if (st.st_size <= 0 || st.st_size > (off_t)VJ_OPS_MAX)
		return -EBADMSG;
	size_t len = (size_t)st.st_size;
	void *ops = mmap(NULL, len, PROT_READ, MAP_PRIVATE, ops_fd, 0);
	if (ops == MAP_FAILED)
		return -errno;
	size_t capacity = len; /* an op has at least one byte */
	*results = malloc(capacity * sizeof **results);
	if (*results == NULL)
		return -ENOMEM;
	int err = vj_ns_enter(mntns_fd, userns_fd);
	return err ? err : vj_ops_apply(ops, len, *results, capacity, count);
}

static int enter(int ops_fd, int result_fd, int mntns_fd, int userns_fd)
{
	int32_t *results = NULL;
	size_t count = 0;
	struct mp_writer w;
	int err = enter_and_apply(ops_fd, mntns_fd, userns_fd, &results, &count);
	size_t room = 16 + 5 * (count + 1);
	uint8_t *answer = malloc(room);

	if (answer == NULL)
		return 1;
	mp_writer_init(&w, answer, room);
	mp_write_array(&w, (uint32_t)count + 1);
	mp_write_int(&w, -err);
	for (size_t i = 0; i < count; i++)
		mp_write_int(&w, results[i]);
	return w.overflow || write_all(result_fd, answer, w.len) ? 1 : 0;
}

/* ---- stage ---- */

/* Tell the starter which step failed: "!errno step" on bwrap's info descriptor. */
static int stage_failed(const char *step, int err)
{
	char text[256];
	int n = snprintf(text, sizeof text, "!%d %s: %s", err, step, strerror(err));

	if (n > 0)
		write_all(VJ_FD_INFO, (const uint8_t *)text, (size_t)n);
	return 1;
}

/* Clone every opened source while we are still in the mount namespace that it belongs to. */
static int clone_sources(int first, int count, int *trees)
{
	struct vj_mount_attr private = {.propagation = MS_PRIVATE};
	unsigned clone = VJ_OPEN_TREE_CLONE | VJ_OPEN_TREE_CLOEXEC | VJ_AT_EMPTY_PATH | VJ_AT_RECURSIVE;
	unsigned set = VJ_AT_EMPTY_PATH | VJ_AT_RECURSIVE;

	for (int i = 0; i < count; i++) {
		trees[i] = (int)syscall(VJ_SYS_open_tree, first + i, "", clone);
		if (trees[i] < 0 || syscall(VJ_SYS_mount_setattr, trees[i], "", set, &private, sizeof private) != 0)
			return -errno;
	}
	return 0;
}

static int place_sources(int first, int count, const int *trees)
{
	char path[32];
	struct stat st;

	for (int i = 0; i < count; i++) {
		snprintf(path, sizeof path, STAGE_ROOT "/%d", i);
		if (fstat(first + i, &st) != 0)
			return -errno;
		if (S_ISDIR(st.st_mode) ? mkdir(path, 0755) != 0 : mknod(path, S_IFREG | 0644, 0) != 0)
			return -errno;
		if (syscall(VJ_SYS_move_mount, trees[i], "", AT_FDCWD, path, VJ_MOVE_MOUNT_F_EMPTY_PATH) != 0)
			return -errno;
		close(trees[i]);
		close(first + i);
	}
	return 0;
}

static int stage(uid_t uid, gid_t gid, pid_t parent, int first, int count, char **argv)
{
	static char *const no_environment[] = {NULL};
	int trees[STAGE_MAX];
	int err = clone_sources(first, count, trees);

	if (err)
		return stage_failed("clone the sources", -err);
	if (unshare(CLONE_NEWNS) != 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0)
		return stage_failed("own mount namespace", errno);
	if (mount("tmpfs", STAGE_ROOT, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755,size=64k,nr_inodes=1k") != 0)
		return stage_failed("staging tmpfs", errno);
	err = place_sources(first, count, trees);
	if (err)
		return stage_failed("bind the sources", -err);
	if (mount(NULL, STAGE_ROOT, NULL, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV, NULL) != 0)
		return stage_failed("read-only staging", errno);
	if (chdir("/") != 0 || setgroups(0, NULL) != 0)
		return stage_failed("supplementary groups", errno);
	if (setresgid(gid, gid, gid) != 0 || setresuid(uid, uid, uid) != 0)
		return stage_failed("change of identity", errno);
	/* the change of identity has cleared it, prctl(2) */
	if (prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) != 0)
		return stage_failed("parent death signal", errno);
	if (getppid() != parent)
		return 1;
	execve(argv[0], argv, no_environment);
	return stage_failed("execute the jail builder", errno);
}

int main(int argc, char **argv)
{
	if (argc == 2 && !strcmp(argv[1], "--version")) {
		puts("vectora-jail-launcher 1");
		return 0;
	}
	prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
	if ((argc == 5 || argc == 6) && !strcmp(argv[1], "enter")) {
		int ops = number(argv[2]), result = number(argv[3]), mntns = number(argv[4]);
		int userns = argc == 6 ? number(argv[5]) : -1;
		if (ops >= 0 && result >= 0 && mntns >= 0 && (argc == 5 || userns >= 0))
			return enter(ops, result, mntns, userns);
	}
	if (argc > 8 && !strcmp(argv[1], "stage") && !strcmp(argv[7], "--")) {
		int uid = number(argv[2]), gid = number(argv[3]), parent = number(argv[4]);
		int first = number(argv[5]), count = number(argv[6]);
		if (uid > 0 && gid >= 0 && parent > 0 && first >= VJ_FD_DATA && count >= 0 && count <= STAGE_MAX)
			return stage((uid_t)uid, (gid_t)gid, parent, first, count, argv + 8);
	}
	fputs("usage: vectora-jail-launcher enter OPS RESULT MNTNS [USERNS] | stage UID GID PARENT FIRST COUNT -- PROGRAM\n",
	      stderr);
	return 2;
}
