#!/bin/sh
# Install the binaries of MariaDB's server (no service) for the tests of SQL stores, which start it, as root on Debian.
# Elsewhere these tests report that they cannot run.
set -eu
PATH=$PATH:/usr/sbin
command -v mariadbd >/dev/null 2>&1 && exit 0
[ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 || exit 0
echo "Installing mariadb-server-core for the tests of SQL stores …"
apt-get -qq update
DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends mariadb-server-core >/dev/null
