#!/bin/sh
# Spark needs Java 17 or newer. If it is missing, install it as root on Debian; elsewhere print instructions.
set -eu
have() {
    java=${JAVA_HOME:+$JAVA_HOME/bin/}java
    command -v "$java" >/dev/null 2>&1 || return 1
    version=$("$java" -version 2>&1 | sed -n 's/.*version "\([0-9]*\).*/\1/p' | head -n 1)
    [ -n "$version" ] && [ "$version" -ge 17 ]
}
have && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "Java 17 is missing: installing openjdk-17-jre-headless …"
    apt-get -qq update
    DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends openjdk-17-jre-headless >/dev/null
    have && exit 0
fi
echo "Coranto needs Java 17 or newer for Spark: install openjdk-17-jre-headless (Debian, Ubuntu) or another Java 17+, or set JAVA_HOME." >&2
exit 1
