#!/bin/sh
# Fails when the committed code of the protos is not what the protos generate today.
set -eu
python=${1:-python3}
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
scripts/generate_proto.sh "$python" "$directory"
status=0
for generated in "$directory"/services/common/pb/*; do
    diff -u "services/common/pb/$(basename "$generated")" "$generated" || status=1
done
[ $status = 0 ] && echo "generated code matches proto/" || echo "run: make proto" >&2
exit $status
