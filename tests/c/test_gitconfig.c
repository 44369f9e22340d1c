/* test_gitconfig.c — which settings of a hostile git configuration run a program. */
#include <stdio.h>
#include <string.h>

#include "check.h"
#include "gitconfig.h"

static bool first_that_runs(void *ctx, const struct gitconfig_entry *e)
{
	if (!gitconfig_runs(e))
		return true;
	snprintf(ctx, 512, "%.100s=%.300s", e->name, e->value);
	return false;
}

static const char *runs(const char *text)
{
	static char found[512];
	found[0] = 0;
	gitconfig_each(text, strlen(text), first_that_runs, found);
	return found;
}

int main(void)
{
	static const struct {
		const char *text, *expected;
	} cases[] = {
		{"[core]\n\tfsmonitor = /tmp/x\n", "core.fsmonitor=/tmp/x"},
		{"[core]\n\tfsmonitor = true\n", ""},
		{"[core] fsmonitor=/tmp/x", "core.fsmonitor=/tmp/x"},
		{"[CORE]\nFsMonitor = \"/tmp/x y\" ; note\n", "core.fsmonitor=/tmp/x y"},
		{"\xef\xbb\xbf[core]\r\n\tsshCommand = sh\r\n", "core.sshcommand=sh"},
		{"[filter \"a]b\"]\n\tclean = x\n", "filter.clean=x"},
		{"[filter \"a\\\"b\"]\n\tsmudge = x\n", "filter.smudge=x"},
		{"[filter.lfs]\n\tprocess = x\n", "filter.process=x"},
		{"[alias]\n\tst = status\n\tx = !sh\n", "alias.x=!sh"},
		{"[alias]\n\tx = \\\n!sh\n", "alias.x=!sh"},
		{"[include]\n\tpath = ../evil\n", "include.path=../evil"},
		{"[includeIf \"gitdir:/\"]\n\tpath = e\n", "includeif.path=e"},
		{"[pager]\n\tlog = true\n\tdiff = sh\n", "pager.diff=sh"},
		{"# [core]\n; fsmonitor = x\n[user]\n\tname = x # fsmonitor\n", ""},
		{"[core]\n\thooksPath\n", "core.hookspath="},
		{"[remote \"o\"]\n\turl = ext::sh -c id\n", "remote.url=ext::sh -c id"},
		{"[remote \"o\"]\n\turl = https://example.org/x\n\tfetch = +refs/*:refs/*\n", ""},
		{"[submodule \"s\"]\n\tupdate = !id\n", "submodule.update=!id"},
		{"[core\n[core]\npager = x", "core.pager=x"},
		{"[", ""},
		{"[core]\n=\n\\\n\"\n", ""},
	};
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		const char *got = runs(cases[i].text);
		if (strcmp(got, cases[i].expected))
			fprintf(stderr, "case %zu: %s\n", i, got);
		CHECK(strcmp(got, cases[i].expected) == 0);
	}
	return check_report();
}
