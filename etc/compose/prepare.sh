#!/bin/sh
# What the other services need and no image may have: keys, passwords and secrets, each made once. The settings are
# written at every start, from mediator.yaml beside this file.
set -eu
umask 077

etc=${ETC:-/etc/mediatord}
secrets=${SECRETS:-/secrets}

# path, owner
secret() {
    [ -s "$1" ] || {
        python3 -c 'import secrets; print(secrets.token_hex(32), end="")' >"$1.new"
        mv "$1.new" "$1"
    }
    chown "$2" "$1"
}

# MongoDB runs as user 999 and wants a file that nobody else can read.
secret "$secrets/keyfile" "${SERVER_USER:-999:999}"
chmod 0400 "$secrets/keyfile"
chmod 0755 "$secrets"
secret "$secrets/root-password" "$(id -u)"
secret "$secrets/mediatord-password" "$(id -u)"

if [ ! -e "$etc/keys.jwks" ]; then
    # What was begun and not finished.
    rm -rf "$etc/new"
    mediatord init --dir "$etc/new" --public-url "$PUBLIC_URL" >/dev/null
    mv "$etc/new/log.key" "$etc/new/keys.jwks" "$etc"
    rm -r "$etc/new"
fi
secret "$etc/cluster.secret" "$(id -u)"
sed -e "s|@PUBLIC_URL@|$PUBLIC_URL|" -e "s|@PASSWORD@|$(cat "$secrets/mediatord-password")|" \
    "${TEMPLATE:-/template.yaml}" >"$etc/mediator.yaml"
chown -R "${NODE_USER:-10001:10001}" "$etc"
