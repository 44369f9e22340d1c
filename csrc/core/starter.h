/* starter.h — programs started from one permanent thread.
 *
 * PR_SET_PDEATHSIG (ours and bwrap's --die-with-parent) fires when the thread that created the child ends, not when
 * the process does, prctl(2). The thread is made at the first start and, after fork(2), anew in the child.
 */
#ifndef VJ_STARTER_H
#define VJ_STARTER_H

#include <stdint.h>

#include "child.h"

/* vj_child_start from the permanent thread; waits until the program was executed. 0 or −errno, child->stage. */
int vj_starter_run(struct vj_child *child, int32_t *pid, int32_t *pidfd);

#endif
