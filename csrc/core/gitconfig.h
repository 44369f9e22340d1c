/* gitconfig.h — read the text of a git configuration file and tell which of its settings run a program.
 *
 * Syntax of git-config(1): sections, subsections, quotes, comments, continued lines. The text is hostile: nothing is
 * allocated, nothing is followed, what does not parse is skipped up to the next line.
 */
#ifndef VJ_GITCONFIG_H
#define VJ_GITCONFIG_H

#include <stdbool.h>
#include <stddef.h>

#define GITCONFIG_NAME_MAX 256   /* bytes of "section.key", lower case, without the subsection */
#define GITCONFIG_VALUE_MAX 4096 /* what is longer is cut */

struct gitconfig_entry {
	char name[GITCONFIG_NAME_MAX];
	char value[GITCONFIG_VALUE_MAX];
	bool has_value, has_subsection;
};

/* Call `each` for every setting until it answers false. */
void gitconfig_each(const char *text, size_t len, bool (*each)(void *ctx, const struct gitconfig_entry *e), void *ctx);

/* Does this setting make git run a program, or read more configuration? */
bool gitconfig_runs(const struct gitconfig_entry *e);

#endif
