/* treefs.c — what the walk must know of a file system: pseudo, remote, or one whose directories may ignore case. */
#define _GNU_SOURCE 1
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "tree.h"

/* Can a directory of ext4 ignore case on this kernel? Asking once spares a call for each directory. */
static bool ext4_folds(void)
{
	static int known; /* 0 not asked, 1 no, 2 yes; the same answer in every thread */
	if (!known)
		known = access("/sys/fs/ext4", F_OK) == 0 && access("/sys/fs/ext4/features/casefold", F_OK) != 0 ? 1 : 2;
	return known == 2;
}

enum tree_fs tree_fs_of(int fd)
{
	static const uint32_t pseudo[] = {0x9fa0, 0x62656572, 0x27e0eb, 0x63677270, 0x1cd1, 0x64626720, 0x74726163,
					  0xcafe4a11, 0x73636673, 0x19800202, 0x62656570, 0x65735543, 0xde5e81e4,
					  0x6165676c, 0x0187};
	static const uint32_t remote[] = {0x6969, 0xfe534d42, 0xff534d42, 0x517b, 0x65735546, 0x01021997, 0x00c36400};
	struct statfs fs;
	if (fstatfs(fd, &fs) != 0)
		return FS_PLAIN;
	uint32_t magic = (uint32_t)fs.f_type;
	for (size_t i = 0; i < sizeof pseudo / sizeof *pseudo; i++)
		if (magic == pseudo[i])
			return FS_PSEUDO;
	if (magic == 0xff534d42 || magic == 0xfe534d42 || magic == 0x517b || magic == 0x4d44 || magic == 0x2011bab0 ||
	    magic == 0x5346544e || magic == 0x7366746e)
		return FS_FOLDS; /* CIFS, FAT, exFAT, NTFS */
	for (size_t i = 0; i < sizeof remote / sizeof *remote; i++)
		if (magic == remote[i])
			return FS_REMOTE;
	/* ext4, f2fs, tmpfs: a flag of the directory */
	return (magic == 0xef53 && ext4_folds()) || magic == 0xf2f52010 || magic == 0x01021994 ? FS_MAY_FOLD : FS_PLAIN;
}

bool tree_fs_folds(int fd, enum tree_fs kind)
{
	long flags = 0; /* FS_IOC_GETFLAGS, FS_CASEFOLD_FL: ioctl_iflags(2), Linux 5.2 */
	if (kind == FS_MAY_FOLD && syscall(SYS_ioctl, fd, 0x80086601ul, &flags) == 0)
		return (flags & 0x40000000) != 0;
	return kind == FS_FOLDS;
}
