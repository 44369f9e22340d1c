/* terminal.c — a pseudo-terminal of the jail's own devpts (pty(7), ioctl_tty(2)). */
#include "worker.h"

#include "compat.h"
#include "rawsys.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#define PTS_MAJOR 136 /* to 143; Documentation/admin-guide/devices.txt */

static struct winsize size_of(unsigned rows, unsigned cols)
{
	return (struct winsize){.ws_row = (unsigned short)(rows ? rows & 0xffff : 24),
				.ws_col = (unsigned short)(cols ? cols & 0xffff : 80)};
}

/* The libcs disagree on the type of the request. */
static long control(int fd, unsigned long request, const void *arg)
{
	return raw3(SYS_ioctl, fd, request, arg);
}

static int open_slave(int number, int flags)
{
	char name[32] = "/dev/pts/", digits[12], *p = name + 9;
	struct stat st;
	int n = 0;
	do
		digits[n++] = (char)('0' + number % 10);
	while ((number /= 10) && n < 10);
	while (n)
		*p++ = digits[--n];
	int fd = open(name, O_RDWR | O_NOCTTY | O_CLOEXEC | flags);
	if (fd < 0)
		return -errno;
	if (fstat(fd, &st) == 0 && S_ISCHR(st.st_mode) && major(st.st_rdev) >= PTS_MAJOR &&
	    major(st.st_rdev) < PTS_MAJOR + 8)
		return fd;
	close(fd);
	return -ENOTTY;
}

int terminal_open(unsigned rows, unsigned cols, int *master, int *slave, int *number)
{
	const struct winsize size = size_of(rows, cols);
	int unlocked = 0, e;
	int fd = open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC);

	if (fd < 0)
		return -errno;
	if (control(fd, TIOCSPTLCK, &unlocked) < 0 || control(fd, TIOCGPTN, number) < 0) {
		e = -EIO;
		goto fail;
	}
	*slave = (int)raw3(SYS_ioctl, fd, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC);
	if (*slave < 0) /* before 4.13 */
		*slave = open_slave(*number, 0);
	if (*slave < 0) {
		e = *slave;
		goto fail;
	}
	control(fd, TIOCSWINSZ, &size);
	*master = fd;
	return 0;
fail:
	close(fd);
	*slave = -1;
	return e;
}

/* By the slave and not by a copy of the master: the terminal hangs up when the host closes the only master. */
int terminal_resize(const struct job *j, unsigned rows, unsigned cols)
{
	const struct winsize size = size_of(rows, cols);
	if (j->pts < 0)
		return -ENOTTY;
	if (j->chan)
		return chan_resize(j->chan, &size);
	int fd = open_slave(j->pts, O_NONBLOCK);
	if (fd < 0)
		return fd;
	int e = (int)control(fd, TIOCSWINSZ, &size);
	close(fd);
	return e;
}
