#!/bin/sh
# Build the images without a container engine, as root on Debian:
#
#   apt-get install buildah debootstrap
#   sh deploy/images.sh                   # coranto-python, coranto-etcd, coranto-broker, coranto
#   sh deploy/images.sh --try             # … and run the compose and Kubernetes files in them (`make images`)
#
# PYTHON_IMAGE is a base image with python3 and its module venv (default: an image that debootstrap builds once from
# Debian's release, without later security updates). MIRROR is a Debian mirror (default: debootstrap's). EXTRA_CA is a
# file of certificates that pip trusts, for networks that inspect TLS; no image contains it. PYTHON runs the tests.
# `buildah push IMAGE DESTINATION` copies an image to a registry or an archive, and `buildah rmi IMAGE` removes it.
set -eu
cd "$(dirname "$0")/.."
for program in buildah debootstrap; do
    command -v "$program" > /dev/null || { echo "install $program: apt-get install buildah debootstrap" >&2; exit 1; }
done
[ "$(id -u)" = 0 ] || { echo "run this as root: debootstrap and buildah create file systems" >&2; exit 1; }
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
suite=bookworm
python=${PYTHON_IMAGE:-localhost/coranto-python:$suite}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
printf '[global]\ncert = /run/extra-ca.pem\n' > "$work/pip.conf"

quietly() { # quietly COMMAND…: print the command's output only if it fails
    "$@" > "$work/log" 2>&1 || { tail -40 "$work/log" >&2; exit 1; }
}
known() { # print the ID of $image, if it exists
    buildah images --quiet --no-trunc "$image" 2> /dev/null || true
}
tag() { # tag IMAGE COMMAND…: build the image with a command, and remove the previous image of this name
    image=$1
    shift
    echo "building $image …"
    before=$(known)
    quietly "$@"
    if [ -n "$before" ] && [ "$before" != "$(known)" ]; then
        buildah rmi "$before" > /dev/null || echo "the previous $image is kept, because the containers named above use it" >&2
    fi
}
base() { # Join commands with &&: `set -e` has no effect in a function that `quietly` runs.
    debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates \
            $suite "$work/root" ${MIRROR:+"$MIRROR"} \
     && chroot "$work/root" apt-get clean \
     && rm -rf "$work/root/var/lib/apt/lists"/* "$work/root/var/cache/apt"/*.bin "$work/root/var/log"/* \
     && (cd "$work/root/usr/share" && find doc man locale info -not -type d -delete) \
     && container=$(buildah from scratch) \
     && buildah add --quiet "$container" "$work/root" / \
     && buildah config --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
            --env LANG=C.UTF-8 "$container" \
     && buildah commit --quiet --rm "$container" "$image"
}
etcd() {
    container=$(buildah from "$python") \
     && buildah run --isolation chroot "$container" -- sh -c 'apt-get -qq update \
         && apt-get -qq install -y --no-install-recommends etcd-server etcd-client \
         && apt-get clean && rm -rf /var/lib/apt/lists/*' \
     && buildah commit --quiet --rm "$container" "$image"
}
bud() { # bud EXTRAS
    buildah bud --quiet --isolation chroot \
        ${EXTRA_CA:+--volume "$EXTRA_CA:/run/extra-ca.pem:ro" --volume "$work/pip.conf:/etc/pip.conf:ro"} \
        --build-arg "PYTHON_IMAGE=$python" --build-arg "EXTRAS=$1" --tag "$image" \
        --file deploy/Dockerfile --ignorefile deploy/Dockerfile.dockerignore .
}

[ -n "${PYTHON_IMAGE:-}" ] || [ -n "$(buildah images --quiet "$python" 2> /dev/null)" ] || tag "$python" base
tag localhost/coranto-etcd:$suite etcd
tag "localhost/coranto-broker:$version" bud broker,oidc,traces
tag "localhost/coranto:$version" bud broker,oidc,traces,spark,dagster
buildah images --format '{{.Name}}:{{.Tag}}  {{.Size}}' | grep '^localhost/coranto'
[ "${1:-}" != --try ] || \
    CORANTO_TEST_IMAGES=1 "${PYTHON:-python3}" -m pytest -v --log-cli-level=INFO \
        --log-cli-format='%(asctime)s %(message)s' --log-cli-date-format=%H:%M:%S tests/installation/images
