/* gitconfig.c — see gitconfig.h. The list of settings that run something follows git-config(1) of 2.47. */
#include "gitconfig.h"

#include <string.h>

/* section.key; the subsection is left out: filter.lfs.clean is filter.clean. */
static const char *const RUNS[] = {
	"core.sshcommand", "core.hookspath", "core.editor", "core.pager", "core.askpass", "core.gitproxy",
	"core.alternaterefscommand", "sequence.editor", "diff.external", "diff.command", "diff.textconv", "merge.driver",
	"filter.clean", "filter.smudge", "filter.process", "credential.helper", "gpg.program", "gpg.defaultkeycommand",
	"mergetool.cmd", "mergetool.path", "difftool.cmd", "difftool.path", "browser.cmd", "browser.path", "man.cmd",
	"man.path", "guitool.cmd", "interactive.difffilter", "include.path", "includeif.path", "remote.uploadpack",
	"remote.receivepack", "remote.vcs", "uploadpack.packobjectshook", "init.templatedir", "trailer.command",
	"trailer.cmd", "tar.command", "imap.tunnel", "sendemail.smtpserver", "sendemail.sendmailcmd", "sendemail.tocmd",
	"sendemail.cccmd", "sendemail.headercmd", "gc.recentobjectshook", "web.browser", "instaweb.httpd",
	"protocol.allow", "archive.command", "receive.procreceiverefs", "gui.editor", "fetch.bundleuri",
};

static char lower(char c)
{
	return c >= 'A' && c <= 'Z' ? (char)(c + 32) : c;
}

static bool is_one_of(const char *value, const char *const *words)
{
	for (; *words; words++) {
		size_t i = 0;
		while ((*words)[i] && lower(value[i]) == (*words)[i])
			i++;
		if (!(*words)[i] && !value[i])
			return true;
	}
	return false;
}

bool gitconfig_runs(const struct gitconfig_entry *e)
{
	static const char *const plain[] = {"true", "false", "yes", "no", "on", "off", "1", "0", "", NULL};
	if (strcmp(e->name, "core.fsmonitor") == 0)
		return e->has_value && !is_one_of(e->value, plain);
	if (strncmp(e->name, "pager.", 6) == 0)
		return e->has_value && !is_one_of(e->value, plain);
	if (strncmp(e->name, "alias.", 6) == 0 || strcmp(e->name, "submodule.update") == 0)
		return e->value[0] == '!';
	if (strcmp(e->name, "remote.url") == 0 || strcmp(e->name, "remote.pushurl") == 0 ||
	    strcmp(e->name, "url.insteadof") == 0)
		return strncmp(e->value, "ext::", 5) == 0;
	for (size_t i = 0; i < sizeof RUNS / sizeof *RUNS; i++)
		if (strcmp(e->name, RUNS[i]) == 0)
			return true;
	return false;
}

struct cursor {
	const char *p, *end;
};

static bool blank(char c)
{
	return c == ' ' || c == '\t' || c == '\r' || c == '\v' || c == '\f';
}

static void skip_blanks(struct cursor *c)
{
	while (c->p < c->end && blank(*c->p))
		c->p++;
}

static void skip_line(struct cursor *c)
{
	while (c->p < c->end && *c->p != '\n')
		c->p++;
}

/* `[section "subsection"]` or `[section.subsection]`: only the section's own name is kept. */
static void read_section(struct cursor *c, char *section, bool *subsection)
{
	size_t n = 0;
	bool in_name = true;
	*subsection = false;
	for (c->p++; c->p < c->end && *c->p != ']' && *c->p != '\n'; c->p++) {
		if (*c->p == '"') { /* a subsection may hold a bracket */
			in_name = false;
			*subsection = true;
			for (c->p++; c->p < c->end && *c->p != '"' && *c->p != '\n'; c->p++)
				if (*c->p == '\\' && c->p + 1 < c->end)
					c->p++;
			if (c->p >= c->end || *c->p == '\n')
				break;
			continue;
		}
		if (blank(*c->p) || *c->p == '.') {
			*subsection = *subsection || *c->p == '.';
			in_name = false;
		}
		if (in_name && n + 2 < GITCONFIG_NAME_MAX / 2)
			section[n++] = lower(*c->p);
	}
	if (c->p < c->end && *c->p == ']')
		c->p++;
	section[n] = 0;
}

/* Up to the end of the line, or of the lines that a backslash joins. */
static void read_value(struct cursor *c, char *value)
{
	size_t n = 0, kept = 0;
	bool quoted = false;
	for (; c->p < c->end && *c->p != '\n'; c->p++) {
		char out = *c->p;
		bool escaped = false;
		if (out == '"') {
			quoted = !quoted;
			continue;
		}
		if (!quoted && (out == '#' || out == ';')) {
			skip_line(c);
			break;
		}
		if (out == '\\' && c->p + 1 < c->end) {
			c->p++;
			if (c->p[0] == '\r' && c->p + 1 < c->end && c->p[1] == '\n')
				c->p++;
			if (*c->p == '\n')
				continue;
			out = *c->p == 'n' ? '\n' : *c->p == 't' ? '\t' : *c->p;
			escaped = true;
		}
		if (n == 0 && !quoted && !escaped && blank(out))
			continue;
		if (n + 1 < GITCONFIG_VALUE_MAX)
			value[n++] = out;
		if (quoted || escaped || !blank(out))
			kept = n;
	}
	value[kept] = 0;
}

void gitconfig_each(const char *text, size_t len, bool (*each)(void *ctx, const struct gitconfig_entry *e), void *ctx)
{
	struct cursor c = {text, text + len};
	struct gitconfig_entry e;
	char section[GITCONFIG_NAME_MAX] = "";
	bool subsection = false;
	if (len >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0)
		c.p += 3;
	while (c.p < c.end) {
		skip_blanks(&c);
		if (c.p >= c.end)
			return;
		if (*c.p == '\n') {
			c.p++;
			continue;
		}
		if (*c.p == '#' || *c.p == ';') {
			skip_line(&c);
			continue;
		}
		if (*c.p == '[') {
			read_section(&c, section, &subsection);
			continue;
		}
		size_t n = strlen(section), key = 0;
		memcpy(e.name, section, n);
		e.name[n++] = '.';
		while (c.p < c.end && !blank(*c.p) && *c.p != '=' && *c.p != '\n' && *c.p != '#' && *c.p != ';') {
			if (n + 1 < sizeof e.name)
				e.name[n++] = lower(*c.p);
			c.p++;
			key++;
		}
		e.name[n] = 0;
		e.value[0] = 0;
		e.has_value = false;
		e.has_subsection = subsection;
		skip_blanks(&c);
		if (c.p < c.end && *c.p == '=') {
			c.p++;
			e.has_value = true;
			read_value(&c, e.value);
		} else {
			skip_line(&c);
		}
		if (key && section[0] && !each(ctx, &e))
			return;
	}
}
