/* tree.h — what the files of the tree watch share: directories, items, and one tree's state. Not for others. */
#ifndef VJ_TREE_H
#define VJ_TREE_H

#include <limits.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "gitignore.h"
#include "treewatch.h"

#define TREE_PATH_MAX PATH_MAX /* longer paths cannot be named to the kernel: the report says so */
#define TREE_REASON_MAX 256
#define TREE_HALF_MAX 32

/* One object of the file system, as statx(2) shows it; btime in ns, 0 where the file system has none. */
struct tree_object {
	uint64_t dev, ino;
	int64_t btime, mtime, ctime;
	uint32_t mode, nlink, uid;
};

/* A directory that was walked, or is only watched. Found by (parent, name) and by watch descriptor. */
enum dir_flags {
	DIR_WRITABLE = 1,
	DIR_FOLD = 2,     /* ignores case */
	DIR_DOTGIT = 4,   /* at or below a `.git`: only rules that name it */
	DIR_GIT = 8,      /* watched for git's sake only, nothing in it is masked */
	DIR_ANCHOR = 16,  /* watched for single names that a policy gives by path, outside every root */
	DIR_ROOT = 32,
	DIR_UNWATCHED = 64, /* the watch could not be made */
	DIR_LISTED = 128,
	DIR_WORKSPACE = 512, /* holds the policy file */
	DIR_INNER = 1024,    /* in a covered directory: everything in it is covered too, see ITEM_DEEP */
	DIR_DEAD = 256,   /* taken out; freed when no queued event points to it */
};
struct vj_dir {
	struct vj_dir *parent, *child, *next, *prev;
	struct vj_dir *same_name; /* chain of the table by name */
	struct vj_dir *same_wd;   /* chain of the table by watch descriptor; other trees' directories too */
	struct vj_tree *tree;
	uint64_t dev, ino; /* 0: not listed yet */
	uint32_t hash;
	int wd;
	uint16_t flags, len;
	char name[]; /* of a root or anchor: its absolute path */
};

enum item_what { ITEM_PIN, ITEM_RO, ITEM_COVER }; /* the higher one wins at one path, and is made later */
enum item_flags {
	ITEM_APPLIED = 1,
	ITEM_HISTORY = 2, /* a cover that followed its object to another name */
	ITEM_ALIAS = 4,   /* another hard link */
	ITEM_LINK = 8,    /* where a masked symlink leads */
	ITEM_LEAVING = 16,
	ITEM_IS_DIR = 32,
	ITEM_SEEN = 64,
	ITEM_SENT = 128, /* in the list of ops that was handed out last */
	ITEM_PATH = 256, /* named by path in the policy */
	/* A directory that was covered late: a process may have entered it before, and for that process the cover does
	 * not exist. So the files in it are covered one by one, below the cover (ITEM_INNER). */
	ITEM_DEEP = 512,
	ITEM_INNER = 1024,
};
struct vj_item {
	struct vj_item *same_path, *same_object;
	struct tree_object object;
	uint32_t hash, len;
	uint16_t flags;
	uint8_t what;
	char path[];
};

struct tree_root {
	char *path;
	size_t len;
	bool writable, top; /* top: not below another root, so walked by itself */
};

enum name_kind { NAME_MASK, NAME_PROTECT };
/* A path that the policy names: looked for in its directory, and wherever a symlink leads. */
struct tree_name {
	char *path;
	size_t len, parent_len;
	enum name_kind kind;
};

struct tree_git {
	char *path;
	char kind; /* d directory, f pointer file, l symlink */
	bool audited;
	bool late;    /* appeared while the jail lived */
	bool settled; /* and no command that may still be making it was running: it can be locked */
	struct tree_object leads; /* l: the object that the link led to */
};

/* One op of the last list. */
struct tree_sent {
	struct vj_item *item; /* NULL: dropped meanwhile */
	bool uncover;
};

struct tree_list {
	char **at;
	size_t n, cap;
};

/* A name in a directory about which events came. */
enum touch_flags { TOUCH_GONE = 1, TOUCH_MOVED_AWAY = 2, TOUCH_CAME = 4, TOUCH_ATTRIB = 8, TOUCH_DIR = 16 };
struct tree_touch {
	struct vj_dir *dir;
	uint64_t seq;
	uint32_t flags, last; /* all of them, and those of the event that came last */
	uint16_t len;
	char *name;
};

struct vj_tree {
	pthread_mutex_t lock; /* all below but the queue */
	struct gi_set *rules;
	struct tree_root *roots;
	size_t nroots;
	struct tree_name *names;
	size_t nnames;
	char *workspace, *audit;
	size_t workspace_len;
	int git;
	uint64_t max_entries, max_ms, max_watches;
	bool uid0; /* the jail's user is root, without capabilities */

	struct vj_dir **dirs; /* hash table; `tops` are the walked roots and the anchors */
	size_t ndirs, dirs_size;
	struct vj_dir *tops, *graveyard;
	struct vj_item **by_path, **by_object;
	size_t nitems, items_size, ncovers;
	struct tree_object *known; /* objects that were covered and whose name is not known now */
	size_t nknown, known_cap;
	struct tree_list links, planted, appeared, baseline; /* links: symlinks that match a mask */
	struct tree_list pinned; /* directories that were pinned before the first command */
	struct tree_list unreadable, host_runs; /* directories; files that appeared and that tools of the host run */
	struct tree_git *gits;
	size_t ngits;
	uint64_t watches;

	struct tree_sent *sent; /* in the order of the last list of ops */
	size_t nsent;

	uint64_t entries, ndirs_seen, rescans;
	double ms;
	bool complete, scanned, live, pending, rescan_mode, links_dirty, gits_dirty, names_dirty, alias_wanted;
	/* Directories that were caught on the move: the event that tells where to frees them, or they are found again at
	 * their place and walked; before that nothing is over. */
	struct vj_dir **lost;
	size_t nlost, lost_cap;
	size_t open; /* names that came, are not there, and have not been told to be gone */
	size_t digested;
	char reason[TREE_REASON_MAX], no_watch[TREE_REASON_MAX]; /* why the walk is incomplete; why there is no watch */

	int mntns_fd, userns_fd;
	bool attached;

	/* guarded by the watch lock, treewatch.c */
	struct tree_touch *queue;
	size_t nqueue, queue_cap;
	uint64_t events; /* how many names were ever queued */
	uint32_t half[TREE_HALF_MAX]; /* cookies of directories that left their place and have not come anywhere yet */
	size_t nhalf;
	bool queue_lost; /* overflow: walk again */
	/* the policy file: not protected yet; written to or open for writing before it was; came where none was */
	bool policy_arrived, policy_raced, policy_planted, policy_absent;
	struct vj_tree *next;
	int users;
	unsigned forks;
	bool dead, visited;
};

/* All trees of the process. Order of locks: a tree's own, then this one. */
extern struct tree_watch {
	pthread_mutex_t lock;
	pthread_cond_t idle;
	int fd, wake; /* inotify; eventfd that ends the thread's wait */
	bool thread, fresh; /* fresh: something was queued that the thread has not looked at */
	struct vj_dir **by_wd; /* hash table */
	size_t size, n;
	struct vj_tree *trees;
	unsigned forks; /* a tree of the parent is nothing to a forked child: its thread and its locks are elsewhere */
} tree_watch;

/* ---- treeitem.c, treeops.c ---- */
uint32_t tree_hash(const void *p, size_t len, uint32_t seed);
int tree_stat(const char *path, struct tree_object *o); /* no symlink is followed at the end */
int tree_stat_at(int dir, const char *name, struct tree_object *o);
struct vj_item *tree_item_at(struct vj_tree *t, const char *path, size_t len);
struct vj_item *tree_item_of(struct vj_tree *t, uint64_t ino); /* any item with this inode number, then ->same_object */
/* Add or strengthen. The item stays applied only when it is the same object under the same name. 0 or −ENOMEM, −E2BIG. */
int tree_item_add(struct vj_tree *t, const char *path, size_t len, enum item_what what, unsigned flags,
		  const struct tree_object *o);
void tree_item_drop(struct vj_tree *t, struct vj_item *item, bool remember);
void tree_items_below(struct vj_tree *t, const char *path, size_t len, bool remember);
void tree_items_unsee(struct vj_tree *t);
void tree_items_sweep(struct vj_tree *t);
int tree_known_add(struct vj_tree *t, const struct tree_object *o);
bool tree_known_take(struct vj_tree *t, const struct tree_object *o);
bool tree_knows_inode(const struct vj_tree *t, uint64_t ino);
/* Read-only bind at path and pins of what stands between it and its grant. Nothing outside the writable grants. */
int tree_protect(struct vj_tree *t, const char *path, size_t len, unsigned flags, const struct tree_object *o);
int tree_pin(struct vj_tree *t, const char *path, size_t len, const struct tree_object *o);
int tree_pin_parents(struct vj_tree *t, const char *path, size_t len);
const struct tree_root *tree_root_of(const struct vj_tree *t, const char *path, size_t len); /* the deepest, or NULL */
int tree_list_add(struct tree_list *l, const char *text, size_t len);
bool tree_list_has(const struct tree_list *l, const char *text, size_t len);
void tree_list_free(struct tree_list *l);
void tree_items_free(struct vj_tree *t);
int tree_ops_encode(struct vj_tree *t, bool all, uint8_t **buf, size_t *len);
/* `calm`: nothing in the tree moved meanwhile, so that a name that the jail does not have really is not there. */
int tree_ops_answer(struct vj_tree *t, const int32_t *results, size_t count, bool calm, size_t *retry);

/* ---- treedir.c ---- */
struct vj_dir *tree_dir_new(struct vj_tree *t, struct vj_dir *parent, const char *name, size_t len, unsigned flags);
struct vj_dir *tree_dir_find(struct vj_tree *t, struct vj_dir *parent, const char *name, size_t len);
void tree_dir_free(struct vj_tree *t, struct vj_dir *d); /* with everything below */
void tree_dirs_bury(struct vj_tree *t);
void tree_lost(struct vj_tree *t, struct vj_dir *d);
void tree_lost_at(struct vj_tree *t, const char *path); /* the directory that holds this path */
int tree_lost_settle(struct vj_tree *t); /* how many are still lost, or −errno */
bool tree_dir_in_place(const struct vj_dir *d);
ssize_t tree_dir_path(const struct vj_dir *d, char *out, size_t cap); /* length, or −ENAMETOOLONG */

/* ---- treefs.c ---- */
enum tree_fs { FS_PLAIN, FS_PSEUDO, FS_MAY_FOLD, FS_FOLDS, FS_REMOTE };
enum tree_fs tree_fs_of(int fd);
bool tree_fs_folds(int fd, enum tree_fs kind);

/* ---- treelook.c ---- */
enum tree_type { TYPE_UNKNOWN = 0, TYPE_DIR = 4, TYPE_REG = 8, TYPE_LNK = 10 };
/* One name of one directory. */
struct tree_look {
	struct vj_tree *t;
	struct vj_dir *dir;
	int fd; /* of the directory, or −1: stat by path */
	const char *path;
	size_t len, name; /* offset of the last name */
	size_t rel;
	unsigned type;
	uint64_t ino;
	struct tree_object o; /* mode 0: not read yet */
};
int tree_look_read(struct tree_look *l);
size_t tree_look_rel(const struct vj_tree *t, const struct vj_dir *d, const char *path);
int tree_look_other_name(struct tree_look *l);
/* < 0: error, 0: done with this name, 1: a directory to walk, 2: a directory whose whole content is covered */
int tree_look_decide(struct tree_look *l);

/* ---- treescan.c ---- */
struct tree_walk {
	struct vj_tree *t;
	uint64_t entries, started_ns, deadline_ns;
	struct vj_dir **stack;
	size_t depth, cap;
	bool aliases; /* second pass: look for inodes of items only */
	bool stop;
	char path[TREE_PATH_MAX + 512];
};
int tree_walk_below(struct vj_tree *t, struct vj_dir *d); /* one subtree, with its watches */
/* Decide about one name of a directory as it is now (events). */
int tree_look_at(struct vj_tree *t, struct vj_dir *d, const char *name, size_t len, bool *absent);
int tree_alias_pass(struct vj_tree *t);
void tree_incomplete(struct vj_tree *t, const char *why);
uint64_t tree_now_ns(void);

/* ---- treeroots.c ---- */
int tree_scan_all(struct vj_tree *t);

/* ---- treenames.c ---- */
int tree_links_refresh(struct vj_tree *t);
int tree_names_refresh(struct vj_tree *t);
/* Where a path leads when every symlink is followed; 0 and its length, or −errno. */
ssize_t tree_resolve(const char *path, char *out, size_t cap, struct tree_object *o);

/* ---- treegit.c ---- */
int tree_git_found(struct vj_tree *t, struct vj_dir *d, const char *path, size_t len, uint32_t mode);
int tree_git_refresh(struct vj_tree *t);
void tree_git_free(struct vj_tree *t);
int tree_join(char *out, size_t cap, const char *dir, const char *name); /* length, or −ENAMETOOLONG */
/* A small regular file, at once and whole; never a FIFO. Its length, or −errno. */
ssize_t tree_read_small(const char *path, char *out, size_t cap);
/* `gitdir: PATH` of a pointer file, or the line of a `commondir` file (prefix ""): the directory it leads to. */
bool tree_read_pointer(const char *file, const char *prefix, const char *base, char *out, size_t cap);

/* ---- treeaway.c ---- */
int tree_open_plain(const char *path, uint64_t flags); /* no symlink is followed; descriptor or −errno */
int tree_move_away(const struct vj_tree *t, const char *path, const char *kind, char **moved_to);

/* ---- treeaudit.c ---- */
int tree_audit_baseline(struct vj_tree *t); /* what is there before the jail's first command is not the agent's */

/* ---- treewatch.c ---- */
void tree_watch_add(struct vj_tree *t, struct vj_dir *d, int fd, const char *path);
void tree_watch_drop(struct vj_dir *d);
void tree_watch_lock(void);
void tree_watch_unlock(void);
bool tree_watch_queue(struct vj_tree *t, const struct tree_touch *again); /* with its old place in the order */
void tree_watch_drain(void); /* read what is queued, never waiting; the watch lock is held */
void tree_watch_share(void);
void tree_watch_join(struct vj_tree *t);
void tree_watch_leave(struct vj_tree *t);
void tree_need_rescan(struct vj_tree *t, const char *why);

/* ---- treetouch.c ---- */
int tree_touched(struct vj_tree *t, struct tree_touch *batch, size_t n); /* frees the names */

/* ---- treepolicy.c ---- */
void tree_policy_settle(struct vj_tree *t);

/* ---- treesync.c ---- */
int tree_round(struct vj_tree *t, bool force); /* digest what is queued, apply it; force: walk again */

#endif
