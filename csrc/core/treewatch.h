/* treewatch.h — which paths of the granted trees are masked or protected, now and while the jail lives.
 *
 * A tree is walked once; every match of a mask rule, every hard link to one and every `.git` becomes an *item*: a cover,
 * a read-only bind or a pin. inotify(7) then tells what changed, and vj_tree_sync repairs in the running jail what a
 * rename or a new file opened. All functions return 0 or a negative errno, are thread-safe, and need no GIL.
 */
#ifndef VJ_TREEWATCH_H
#define VJ_TREEWATCH_H

#include <stddef.h>
#include <stdint.h>

#define VJ_TREE_COVERS_MAX 50000 /* more covers than this: −E2BIG, fs.mount-max is 100,000 */

enum vj_tree_git { VJ_GIT_OFF = 0, VJ_GIT_CONFIG = 1, VJ_GIT_READ_ONLY = 2 };

struct vj_tree;

/* A tree from its description, msgpack: {roots: [[path, writable]...], workspace: path, masks: [[pattern, negate,
 * floor]...], mask_paths: [path...], protect: [path...], git: enum vj_tree_git, max_entries, max_ms, max_watches,
 * known: [[dev, ino, btime_ns]...] (what an earlier jail of this workspace had covered), audit: path (directory
 * outside every root, for vj_tree_git_audit)}. −EBADMSG: malformed; −EINVAL: a pattern or a relative path. */
int vj_tree_new(const uint8_t *spec, size_t len, struct vj_tree **out);
void vj_tree_free(struct vj_tree *t);

/* Walk, and watch what was walked. A walk that hit a limit is not an error: the report says complete: false. */
int vj_tree_scan(struct vj_tree *t);

/* The ops for the present state (pins, protections, covers; each from the top down), for the launcher's `enter`.
 * *buf is malloc'ed: vj_free. vj_tree_applied takes the launcher's answers, one positive errno an op in the order of
 * the last vj_tree_ops: 0, or the −errno of a cover or protection that could not be made. */
int vj_tree_ops(struct vj_tree *t, uint8_t **buf, size_t *len);
int vj_tree_applied(struct vj_tree *t, const int32_t *results, size_t count);

/* From now on vj_tree_sync (and a thread of ours, within milliseconds) applies changes inside this jail. The
 * descriptors are duplicated. What vj_tree_applied has not confirmed is applied by the first sync. */
int vj_tree_attach(struct vj_tree *t, int mntns_fd, int userns_fd);

/* Everything that happened in the tree before this call is in force when it returns. 0 = nothing had changed, 1 = the
 * jail was changed; −errno: a cover could not be made, the caller must not start a command. */
int vj_tree_sync(struct vj_tree *t);

/* msgpack: {masks, history, protected, pins, gits, planted, appeared: [path...], hazards: [[path, kind]...], policy_raced,
 * complete, reason, entries, dirs, watches, us, ms, watch: "inotify"|"rescan"|"off", rescans, known: [[dev, ino,
 * btime_ns]...]}. history: covers that followed their object; planted: a policy file that appeared; appeared: covers made
 * after the scan. Hazards: unreadable_directory (covered as a whole), host_runs (appeared, and tools of the host run it). */
int vj_tree_report(struct vj_tree *t, uint8_t **buf, size_t *len);

/* Look for git redirects and exec lines that appeared since the last audit (call it after vj_tree_sync, at the end of
 * a call): each is moved to the audit directory. `idle`: no other command runs in the jail, so that repositories that
 * appeared are complete and the next sync locks them (a lock in the middle would break `git clone`). *buf: msgpack
 * [[path, kind, text, moved-to | nil, errno]...], kinds commondir, config, hook, alternates, todo. Returns how many were
 * found, or −errno. */
int vj_tree_git_audit(struct vj_tree *t, int idle, uint8_t **buf, size_t *len);

void vj_free(void *p);

/* How ops reach a jail: vj_enter of start.h unless a test puts something else here. */
extern int (*vj_tree_enter)(int mntns_fd, int userns_fd, const uint8_t *ops, size_t len, int deadline_ms,
			    int32_t *results, size_t capacity, size_t *count);

#endif
