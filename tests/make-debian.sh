#!/bin/sh
# Puts a small Debian with Python, pip and dpkg, unpacked, into target/test-data/debian, for the tests that install packages
# as a fake root. Needs root and debootstrap, and takes about a minute. Does nothing when it is there.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
out="$root/target/test-data/debian"
if [ -f "$out/etc/debian_version" ]; then
    exit 0
fi
[ "$(id -u)" = 0 ] || { echo "make-debian: only root can make it" >&2; exit 1; }
command -v debootstrap >/dev/null || { echo "make-debian: debootstrap is absent" >&2; exit 1; }

# The release and the mirror of this machine.
release=$(. /etc/os-release && echo "${VERSION_CODENAME:-stable}")
mirror=$(apt-get indextargets --no-release-info --format '$(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' |
    awk -v release="$release" '$2 == release && $3 == "main" && !found { print $1; found = 1 }')
[ -n "$mirror" ] || { echo "make-debian: the sources of apt name no mirror of $release" >&2; exit 1; }

mkdir -p "$root/target/test-data"
# Next to the goal, so that the last step is one rename and nobody sees half of it.
work=$(mktemp -d "$root/target/test-data/.debian-XXXXXX")
trap 'rm -rf --one-file-system "$work"' EXIT
trap 'exit 1' INT TERM
image="$work/image"
# What debootstrap mounts stays in a namespace of its own and goes with it.
unshare --mount --propagation private \
    debootstrap --variant=minbase --include=python3,python3-pip "$release" "$image" "$mirror" >"$work/log" 2>&1 ||
    { tail -20 "$work/log" >&2; exit 1; }

cd "$image"
rm -rf dev/* var/cache/apt/* var/lib/apt/lists/* var/log/* usr/share/doc/* usr/share/man/* usr/share/info/* \
    usr/share/locale/* debootstrap
# Apptainer shows the host's own there and complains about an image that lacks them.
touch etc/hosts etc/resolv.conf etc/localtime
# Tests of an ordinary user make a copy of their own, so everything can be read, and nothing is setuid.
chmod -R u+rwX,go+rX,ug-s .
cd "$root"
if ! mv -T "$image" "$out" 2>/dev/null; then
    # Somebody else was faster, or left half of it.
    [ -f "$out/etc/debian_version" ] || {
        echo "make-debian: $out is there and not whole: remove it" >&2
        exit 1
    }
fi
