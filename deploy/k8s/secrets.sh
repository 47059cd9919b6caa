#!/bin/sh
# Prints the secrets that the manifests read, with new random values:
#   deploy/k8s/secrets.sh redis token | kubectl -n triptych create -f -
# `create` fails where they exist, so that no password changes by accident.
set -eu

random() { openssl rand -hex "$1"; }

redis() {
  encoder=$(random 24) decoder=$(random 24)
  cat <<EOF
---
# Redis' users: the encoder writes embeddings and keeps clients' files within bounds, by a script; the
# decoder only reads embeddings. seal-keys: what embeddings are sealed with, a key a line.
apiVersion: v1
kind: Secret
metadata:
  name: triptych-redis
stringData:
  users.acl: |
    user default off
    user encoder on >$encoder ~triptych:embedding:* -@all +ping +info +getrange +set (~triptych:file:* -@all +eval +evalsha +time +getrange +set +del +hget +hset +hdel +hincrby +zadd +zrem +zscore +zincrby +zrange +zrevrange +zrangebyscore)
    user decoder on >$decoder ~triptych:embedding:* -@all +ping +getrange
  encoder-password: $encoder
  decoder-password: $decoder
  seal-keys: $(random 32)
EOF
}

limits() {
  gateway=$(random 24)
  cat <<EOF
---
# The Redis of the component tenant-limits: gateways run the scripts of tenants' limits and of what
# clients name again later.
apiVersion: v1
kind: Secret
metadata:
  name: triptych-limits
stringData:
  users.acl: |
    user default off
    user gateway on >$gateway ~triptych:limits ~triptych:kept:* -@all +eval +evalsha +time +hget +hmget +hgetall +hkeys +hset +hdel +hincrby +get +set +del +pexpire +zadd +zrem +zscore +zincrby +zrange +zrevrange +zrangebyscore
  gateway-password: $gateway
EOF
}

token() {
  cat <<EOF
---
# What the services show each other, a token a line: the first is sent, each is accepted.
apiVersion: v1
kind: Secret
metadata:
  name: triptych-token
stringData:
  token: $(random 32)
EOF
}

[ $# -gt 0 ] || { echo "usage: $0 redis|limits|token ..." >&2; exit 2; }
for name in "$@"; do
  case $name in
    redis|limits|token) "$name" ;;
    *) echo "$0: no secret $name; there are: redis, limits, token" >&2; exit 2 ;;
  esac
done
