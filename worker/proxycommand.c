/* proxycommand.c — `--connect host:port`: standard input and output through the jail's own proxy.
 *
 * It is what ssh gets as its ProxyCommand (ssh_config(5)): no privilege, no channel, the proxy of the environment asked
 * by HTTP CONNECT (RFC 9110, 9.3.6).
 */
#include "worker.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define TARGET_MAX 300
#define HEADER_MAX 8192

static int write_whole(int fd, const char *p, size_t n)
{
	while (n) {
		ssize_t k = write(fd, p, n);
		if (k < 0 && errno == EINTR)
			continue;
		if (k < 0)
			return -errno;
		p += k;
		n -= (size_t)k;
	}
	return 0;
}

/* The port of http://127.0.0.1:PORT in the environment; 0 when there is none. */
static uint16_t proxy_port(void)
{
	static const char *const names[] = {"https_proxy", "HTTPS_PROXY", "http_proxy", "HTTP_PROXY"};
	static const char prefix[] = "http://127.0.0.1:";

	for (size_t i = 0; i < VJ_ARRAY(names); i++) {
		const char *v = getenv(names[i]);
		if (!v || strncmp(v, prefix, sizeof prefix - 1))
			continue;
		long port = strtol(v + sizeof prefix - 1, NULL, 10);
		if (port > 0 && port < 65536)
			return (uint16_t)port;
	}
	return 0;
}

static int dial(uint16_t port)
{
	struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port)};
	a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return -errno;
	if (connect(fd, (const struct sockaddr *)&a, sizeof a) < 0) {
		int e = -errno;
		close(fd);
		return e;
	}
	return fd;
}

/* Asks for the tunnel; a refusal's status line goes to standard error. 0 or -errno. */
static int ask(int fd, const char *target)
{
	char text[HEADER_MAX] = "CONNECT ";
	size_t n = 0;

	strcat(text, target);
	strcat(text, " HTTP/1.1\r\nHost: ");
	strcat(text, target);
	strcat(text, "\r\n\r\n");
	int e = write_whole(fd, text, strlen(text));
	if (e)
		return e;
	/* Byte by byte: what follows the empty line belongs to the tunnel. */
	while (n < 4 || memcmp(text + n - 4, "\r\n\r\n", 4) != 0) {
		ssize_t k = n == sizeof text - 1 ? 0 : read(fd, text + n, 1);
		if (k < 0 && errno == EINTR)
			continue;
		if (k <= 0)
			return k < 0 ? -errno : -EPROTO;
		n++;
	}
	text[n] = 0;
	if (strncmp(text, "HTTP/1.", 7) == 0 && strncmp(text + 8, " 200", 4) == 0)
		return 0;
	write_whole(2, text, strcspn(text, "\r"));
	write_whole(2, "\n", 1);
	return -EACCES;
}

/* One buffer from `from` to `to`; false at the end of `from`. */
static bool copy(int from, int to)
{
	static char buf[65536];
	ssize_t n = read(from, buf, sizeof buf);
	if (n < 0)
		return errno == EINTR || errno == EAGAIN;
	return n > 0 && write_whole(to, buf, (size_t)n) == 0;
}

static int tunnel(int fd)
{
	struct pollfd p[2] = {{.fd = 0, .events = POLLIN}, {.fd = fd, .events = POLLIN}};

	while (p[1].fd >= 0) {
		if (poll(p, 2, -1) < 0) {
			if (errno == EINTR)
				continue;
			return 1;
		}
		if (p[0].fd >= 0 && p[0].revents && !copy(0, fd)) {
			shutdown(fd, SHUT_WR);
			p[0].fd = -1;
		}
		if (p[1].revents && !copy(fd, 1))
			p[1].fd = -1;
	}
	return 0;
}

int proxy_command(const char *target)
{
	const char *colon = strrchr(target, ':');
	int e;

	if (!colon || colon == target || !colon[1] || strlen(target) > TARGET_MAX || strpbrk(target, " \r\n\t")) {
		e = -EINVAL;
	} else {
		uint16_t port = proxy_port();
		int fd = port ? dial(port) : -ENETUNREACH;
		e = fd < 0 ? fd : ask(fd, target);
		if (!e)
			return tunnel(fd);
	}
	static const char say[] = "vectora-jail-worker --connect: ";
	write_whole(2, say, sizeof say - 1);
	write_whole(2, strerror(-e), strlen(strerror(-e)));
	write_whole(2, "\n", 1);
	return 1;
}
