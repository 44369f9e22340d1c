/* gipattern.h — one gitignore pattern: read into tokens, matched against one path. For gitignore.c only. */
#ifndef VJ_GIPATTERN_H
#define VJ_GIPATTERN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum gi_token_kind { T_BYTE, T_ANY, T_SET, T_STAR, T_TREE, T_TREE_SLASH };

struct gi_token {
	uint8_t kind, byte;
	uint16_t set; /* index into the rule's sets */
};

struct gi_byteset {
	uint8_t bits[32];
};

struct gi_rule {
	char *text; /* without leading and trailing slash */
	size_t len, literal, tail; /* bytes before the first special one, and after the last wildcard */
	struct gi_token *tokens; /* of what follows `literal` */
	struct gi_byteset *sets;
	size_t ntokens, nsets;
	bool negate, floor, dir_only, basename, absolute, floating, dotgit, dead;
};


/* Fill the derived fields of a rule from its text (no leading, no trailing slash left). 0, −EINVAL, −ENOMEM. */
int gi_rule_finish(struct gi_rule *r);
void gi_rule_free(struct gi_rule *r);
/* The byte that the last name of every match begins, and ends with, or −1 when the pattern leaves it open. */
int gi_rule_first(const struct gi_rule *r);
int gi_rule_last(const struct gi_rule *r);
/* Does the text (a name, or a path relative to what the rule is anchored at) match? */
bool gi_rule_text(const struct gi_rule *r, const char *text, size_t len, bool folded);
uint8_t gi_fold(uint8_t c);

#endif
