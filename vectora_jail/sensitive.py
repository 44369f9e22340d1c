"""Paths that no jail sees, whatever a policy grants: credentials, keys, browsers' stores, histories.

Names are relative to the home directory. Absolute names are host services whose socket is as good as root.
"""

from __future__ import annotations

__all__ = ["SENSITIVE_HOME", "sensitive_paths"]

# fmt: off
SENSITIVE_HOME: tuple[str, ...] = (
    ".ssh", ".gnupg", ".aws", ".azure", ".kube", ".docker", ".config/gcloud", ".gcloud", ".config/gh",
    ".config/glab-cli", ".config/hub", ".config/op", ".config/doctl", ".config/heroku",
    ".config/rclone", ".config/containers/auth.json", ".config/pip/pip.conf", ".pip/pip.conf",
    ".config/uv/credentials.toml", ".local/share/uv/credentials", ".config/pypoetry/auth.toml",
    ".config/git/credentials", ".git-credentials", ".netrc", ".npmrc", ".yarnrc.yml", ".pypirc",
    ".gem/credentials", ".cargo/credentials", ".cargo/credentials.toml", ".config/composer/auth.json",
    ".composer/auth.json", ".m2/settings.xml", ".m2/settings-security.xml",
    ".gradle/gradle.properties", ".nuget/NuGet/NuGet.Config", ".terraform.d/credentials.tfrc.json",
    ".terraformrc", ".vault-token", ".credentials", ".secrets", ".keys", ".pki", ".password-store",
    ".1password", ".op", ".local/share/keyrings", ".local/share/kwalletd", ".config/Bitwarden",
    ".config/1Password", ".config/keepassxc", ".fly", ".modal.toml", ".databrickscfg", ".snowflake",
    ".oci", ".boto", ".s3cfg", ".passwd-s3fs", ".mc/config.json", ".huggingface/token",
    ".cache/huggingface/token", ".config/openai", ".config/anthropic", ".claude/.credentials.json",
    ".codex/auth.json", ".gemini", ".config/github-copilot", ".cursor/auth.json", ".config/goose",
    ".pgpass", ".my.cnf", ".mylogin.cnf", ".dbshell", ".config/psql", ".msmtprc", ".fetchmailrc",
    ".mozilla", ".thunderbird", ".config/chromium", ".config/google-chrome", ".config/BraveSoftware",
    ".config/microsoft-edge", ".config/Slack", ".config/discord", ".config/Signal", ".electrum",
    ".bitcoin", ".ethereum", ".sparrow", ".config/solana", ".age", ".config/sops", ".ansible/vault",
    ".vnc", ".config/remmina", ".bash_history", ".zsh_history", ".history", ".python_history",
    ".node_repl_history", ".psql_history", ".mysql_history", ".sqlite_history", ".rediscli_history",
    ".lesshst", ".viminfo", ".local/share/fish/fish_history", ".local/state/bash", ".Xauthority",
    ".ICEauthority",
)
# fmt: on
"""Below a home directory; a directory stands for everything in it."""


def sensitive_paths(*homes: bytes) -> tuple[bytes, ...]:
    """Return the sensitive paths of these home directories, absolute and sorted; none of them need exist."""
    found = {
        home + b"/" + name.encode()
        for home in homes
        if home.startswith(b"/") and home != b"/"
        for name in SENSITIVE_HOME
    }
    return tuple(sorted(found))
