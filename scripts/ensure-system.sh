#!/bin/sh
# Makes programs available that no Python package brings: ensure-system.sh redis chromium venv
# Installs a missing one with apt-get, as root or through sudo; says what to do where it cannot.
set -eu

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

can_install() {
    command -v apt-get >/dev/null && { [ "$(id -u)" = 0 ] || sudo -n true 2>/dev/null; }
}

updated=
install() {
    echo "==> installing $1"
    if [ -z "$updated" ]; then
        as_root apt-get update -qq
        updated=yes
    fi
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$1" \
        >/dev/null
}

present() {
    case $1 in
        redis) command -v redis-server >/dev/null ;;
        chromium) command -v chromium >/dev/null || command -v google-chrome >/dev/null ;;
        venv) "${PYTHON:-python3}" -c 'import ensurepip, venv' 2>/dev/null ;;
    esac
}

package() {
    case $1 in
        redis) echo redis-server ;;
        chromium) echo chromium ;;
        venv) echo python3-venv ;;
        *) echo "unknown program: $1" >&2; exit 2 ;;
    esac
}

for program in "$@"; do
    name=$(package "$program")
    if present "$program"; then
        continue
    elif can_install; then
        install "$name"
    elif [ "$program" = redis ] && [ "${REDIS_OPTIONAL:-}" = yes ]; then
        echo "==> no redis-server on PATH and no right to install it: going on without" >&2
    else
        echo "==> $name is needed: install it (apt-get install $name) and try again" >&2
        exit 1
    fi
done
