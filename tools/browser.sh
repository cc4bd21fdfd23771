#!/bin/sh
# Install Debian's Chromium for the test of the Dagster UI, as root on Debian. Elsewhere the test reports that it cannot run.
set -eu
command -v chromium >/dev/null 2>&1 && exit 0
[ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 || exit 0
echo "Installing chromium for the browser test …"
apt-get -qq update
DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium >/dev/null
