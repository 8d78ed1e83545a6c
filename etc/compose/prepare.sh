#!/bin/sh
# Creates the keys, passwords and secrets of the other services, each once. Writes the configuration at every start,
# from the template mediator.yaml.
set -eu
umask 077

etc=${ETC:-/etc/mediatord}
secrets=${SECRETS:-/secrets}

# $1: path, $2: owner
secret() {
    [ -s "$1" ] || {
        python3 -c 'import secrets; print(secrets.token_hex(32), end="")' >"$1.new"
        mv "$1.new" "$1"
    }
    chown "$2" "$1"
}

# MongoDB runs as user 999, and requires that only it can read this file.
secret "$secrets/keyfile" "${SERVER_USER:-999:999}"
chmod 0400 "$secrets/keyfile"
chmod 0755 "$secrets"
secret "$secrets/root-password" "$(id -u)"
secret "$secrets/mediatord-password" "$(id -u)"

if [ ! -e "$etc/keys.jwks" ]; then
    # Left by an interrupted run.
    rm -rf "$etc/new"
    mediatord init --dir "$etc/new" --public-url "$PUBLIC_URL" >/dev/null
    mv "$etc/new/log.key" "$etc/new/keys.jwks" "$etc"
    rm -r "$etc/new"
fi
secret "$etc/cluster.secret" "$(id -u)"
sed -e "s|@PUBLIC_URL@|$PUBLIC_URL|" -e "s|@PASSWORD@|$(cat "$secrets/mediatord-password")|" \
    "${TEMPLATE:-/template.yaml}" >"$etc/mediator.yaml"
chown -R "${NODE_USER:-10001:10001}" "$etc"
