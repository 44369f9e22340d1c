# Sourced by ./demo and ./test: packages of the system, a virtual environment of this checkout.
# POSIX sh; nothing here needs Python before it is installed.

INSTALL=1
FIX=0
ARGUMENTS=
for argument in "$@"; do
	case $argument in
	--no-install) INSTALL=0 ;;
	--fix) FIX=1 ;;
	*) ARGUMENTS="$ARGUMENTS $argument" ;;
	esac
done

as_root() {
	if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi
}

have() { command -v "$1" >/dev/null 2>&1; }

# The interpreter: the system's own where it is new enough, so that other users of the machine can run it too.
python_command() {
	for candidate in /usr/bin/python3 python3; do
		if have "$candidate" && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
			echo "$candidate"
			return
		fi
	done
}

missing_packages() {
	python=$(python_command)
	[ -n "$python" ] || echo python3
	"${python:-false}" -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
	header=$("${python:-false}" -c 'import sysconfig; print(sysconfig.get_path("include"))' 2>/dev/null || true)
	[ -f "$header/Python.h" ] || echo python3-dev
	have gcc || echo gcc
	[ -f /usr/include/stdio.h ] || echo libc6-dev
	have musl-gcc || echo musl-tools
	[ -x /usr/bin/bwrap ] || [ -x /usr/local/bin/bwrap ] || echo bubblewrap
	have git || echo git
	[ -e /etc/ssl/certs/ca-certificates.crt ] || echo ca-certificates
}

# install PACKAGE... : one apt line
install_packages() {
	[ $# -gt 0 ] || return 0
	line="apt-get install -y --no-install-recommends $*"
	if [ $INSTALL = 0 ]; then
		echo "missing packages; as root: $line" >&2
		exit 1
	fi
	if ! have apt-get; then
		echo "these are missing, and this is not Debian or Ubuntu: $*" >&2
		exit 1
	fi
	echo "installing: $line"
	as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq update
	if [ -f /etc/lsb-release ] && ! apt-cache show musl-tools >/dev/null 2>&1; then
		# Ubuntu keeps musl-tools in universe, which a minimal image does not list
		as_root sed -i 's/^\(Components:.*\bmain\)\b/\1 universe/; s/^\(deb .* main\)$/\1 universe/' \
			/etc/apt/sources.list /etc/apt/sources.list.d/*.sources 2>/dev/null || true
		as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq update
	fi
	# shellcheck disable=SC2086
	as_root env DEBIAN_FRONTEND=noninteractive $line >/dev/null
}

setup_packages() {
	# shellcheck disable=SC2046
	install_packages $(missing_packages)
}

# Ubuntu 24.04 and later let no program make user namespaces unless an AppArmor profile says so.
setup_userns() {
	bwrap --unshare-user --ro-bind / / true 2>/dev/null && return 0
	restricted=$(cat /proc/sys/kernel/apparmor_restrict_unprivileged_userns 2>/dev/null || echo 0)
	[ "$restricted" = 1 ] || return 0
	profile='abi <abi/4.0>,
include <tunables/global>
profile vectora-jail-bwrap /usr/bin/bwrap flags=(unconfined) {
  userns,
}'
	if [ $FIX = 1 ]; then
		echo "$profile" | as_root tee /etc/apparmor.d/vectora-jail-bwrap >/dev/null
		as_root apparmor_parser -r /etc/apparmor.d/vectora-jail-bwrap
		return 0
	fi
	echo "This system lets bwrap make no user namespaces (kernel.apparmor_restrict_unprivileged_userns = 1)." >&2
	echo "--fix would write /etc/apparmor.d/vectora-jail-bwrap, after which every program may use bwrap's:" >&2
	echo "$profile" >&2
	echo "Without it the jail is held by Landlock alone." >&2
}

# setup_venv WHAT... : what pip installs into this checkout's own environment
setup_venv() {
	[ -x .venv/bin/python ] || "$(python_command)" -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check "$@"
}
