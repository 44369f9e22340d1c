/* main.c — the arguments, the descriptors, then the loop.
 *
 *   vectora-jail-worker --fd N       requests as SEQPACKET messages on descriptor N
 *   vectora-jail-worker --socket PATH  the same on the socket that it finds a listener on; only once
 *   vectora-jail-worker --stream     requests as frames on standard input, replies on standard output
 *   vectora-jail-worker --json       the same as JSON, one object a line; hello may be left out
 *   vectora-jail-worker --connect HOST:PORT   standard input and output through the jail's proxy, for ssh
 *   vectora-jail-worker --version
 */
#include "worker.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

struct worker_state worker = {.scope_fd = -1, .io_fd = -1, .oom_fd = -1, .null_fd = -1};

static void say(const char *text)
{
	/* Nothing can be done when nobody listens. */
	if (write(2, text, strlen(text)) < 0)
		return;
}

static int fail(const char *step, int err)
{
	say("vectora-jail-worker: ");
	say(step);
	say(": ");
	say(strerror(-err));
	say("\n");
	return 125;
}

/* Whoever starts a worker without a pid namespace arms SIGKILL for its own death; the commands would outlive that. */
static void armed_death(void)
{
	int signo = 0;
	if (!worker.pid1 && prctl(PR_GET_PDEATHSIG, &signo, 0, 0, 0) == 0 && signo)
		prctl(PR_SET_PDEATHSIG, SIGTERM, 0, 0, 0);
}

static int serve(int channel, int out, enum lane_kind kind)
{
	int e = confine_descriptors(&channel, kind == LANE_PACKET ? NULL : &out);
	struct lane *l;

	if (e)
		return fail("descriptors", e);
	worker.pid = getpid();
	worker.pid1 = worker.pid == 1;
	armed_death();
	if (!worker.pid1 && prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) < 0)
		return fail("subreaper", -errno);
	if ((e = job_scan_open()) < 0)
		return fail("/proc", e);
	if ((e = loop_signals()) < 0)
		return fail("signals", e);
	if (kind == LANE_JSON) { /* a person may leave hello out */
		worker.env = environ;
		worker.path = path_of(environ);
	}
	if ((e = lane_open(channel, kind, true, &l)) < 0)
		return fail("channel", e);
	if (kind != LANE_PACKET && (e = stream_open(l, out, kind == LANE_JSON)) < 0)
		return fail("stream", e);
	loop_run();
}

/* A container's way in: the host listens on a SEQPACKET socket in a directory that is bound into it. */
static int serve_socket(const char *path)
{
	struct sockaddr_un a = {.sun_family = AF_UNIX};
	if (strlen(path) >= sizeof a.sun_path)
		return fail("socket", -ENAMETOOLONG);
	strcpy(a.sun_path, path);
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	if (fd < 0 || connect(fd, (const struct sockaddr *)&a, sizeof a) < 0)
		return fail("socket", -errno);
	return serve(fd, -1, LANE_PACKET);
}

int main(int argc, char **argv)
{
	if (argc == 2 && !strcmp(argv[1], "--version")) {
		static const char text[] = "vectora-jail-worker " VJ_VERSION "\n";
		return write(1, text, sizeof text - 1) < 0;
	}
	if (argc == 2 && !strcmp(argv[1], "--stream"))
		return serve(0, 1, LANE_FRAMES);
	if (argc == 2 && !strcmp(argv[1], "--json"))
		return serve(0, 1, LANE_JSON);
	if (argc == 3 && !strcmp(argv[1], "--connect"))
		return proxy_command(argv[2]);
	if (argc == 3 && !strcmp(argv[1], "--socket"))
		return serve_socket(argv[2]);
	if (argc == 3 && !strcmp(argv[1], "--fd")) {
		char *end;
		long fd = strtol(argv[2], &end, 10);
		if (!*end && fd >= 0 && fd < 65536)
			return serve((int)fd, -1, LANE_PACKET);
	}
	say("usage: vectora-jail-worker --fd N | --socket PATH | --stream | --json | --connect HOST:PORT | --version\n");
	return 2;
}
