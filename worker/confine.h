/* confine.h — the walls, as hello puts them up. Each returns 0 or an errno. */
#ifndef VJ_CONFINE_H
#define VJ_CONFINE_H

#include "worker.h"

#define NOT_ASKED 0xffff

struct walls {
	int dumpable, no_new_privs, rlimits, landlock, seccomp, probe_write, probe_syscall;
};

void wall_own_proc(void);     /* opens what a non-dumpable process cannot open later */
void wall_capabilities(void); /* gives up what would let a command raise a limit or read the worker */
int wall_rlimits(const struct request *q);
int wall_landlock(const struct request *q);
int wall_seccomp(const struct request *q);
void wall_probe(const struct request *q, struct walls *walls); /* tries in a child what must be denied */
long landlock_ruleset(uint64_t fs, uint64_t net, uint64_t scoped); /* a descriptor or -errno */

#endif
