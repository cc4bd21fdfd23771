#!/bin/sh
# The tests of SQL stores start MariaDB servers of their own. The server's binaries (no service) are installed only for root on Debian; elsewhere
# those tests report that they cannot run.
set -eu
PATH=$PATH:/usr/sbin
command -v mariadbd >/dev/null 2>&1 && exit 0
[ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 || exit 0
echo "Installing mariadb-server-core for the tests of SQL stores …"
apt-get -qq update
DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends mariadb-server-core >/dev/null
